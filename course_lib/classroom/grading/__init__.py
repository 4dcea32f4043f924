"""Marks for many submissions: found, taken apart, run in a sandbox, compared, written down.

Nothing of a submission ever runs in the grader's own process, and no expected value ever enters the
sandbox.
"""
