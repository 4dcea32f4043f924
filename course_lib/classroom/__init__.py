"""The classroom: building, linting, checking and handing out the day notebooks.

A notebook needs three names of it, and nothing else::

    from course_lib.classroom import check, solved_or
"""

from course_lib.classroom.checking import check, solved_or

__all__ = ["check", "solved_or"]
