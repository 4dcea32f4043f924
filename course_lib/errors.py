"""The one exception that a user of the course is meant to read."""


class CourseError(Exception):
    """One sentence for the user: what is wrong, where, and what to do about it.

    Commands and loaders raise it; the command line prints ``course: <message>`` to stderr and
    exits 2. Library functions raise ValueError or TypeError for bad arguments instead.
    """
