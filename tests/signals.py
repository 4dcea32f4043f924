"""Signals in child processes of tests."""

import signal


def hear_ctrl_c() -> None:
    """As preexec_fn: a child hears Ctrl-C although the tests run in the background of a shell,
    which makes everything that it starts there deaf to it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
