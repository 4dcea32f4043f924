"""argparse with one-sentence errors that name the nearest valid option."""

from __future__ import annotations

import argparse
from typing import NoReturn

from course_lib.errors import CourseError
from course_lib.nearest import nearest


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose errors are CourseErrors and which takes no abbreviated options."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=", 1)[0]
            valid = sorted(o for o in self._option_string_actions if o.startswith("--"))
            if word.startswith("-"):
                self.error(f"unknown option {word}; {nearest(word, valid)}")
            self.error(f"unexpected argument {word!r}; see {self.prog} --help")
        return parsed

    def error(self, message: str) -> NoReturn:
        raise CourseError(f"{self.prog.rpartition(' ')[2]}: {message}")
