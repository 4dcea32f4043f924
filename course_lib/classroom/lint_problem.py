"""What every lint rule reports, and the pattern of an absolute path that two of them share."""

from __future__ import annotations

import re
from dataclasses import dataclass

ABSOLUTE = re.compile(
    r"(?<![\w/.:~*-])(?:/(?:home|root|work|tmp|usr|opt|var|mnt|media|srv|etc|Users|private)/[\w.-]"
    r"|[A-Z]:\\+\w+\\|~/[\w.])"
)


@dataclass(frozen=True)
class Problem:
    """One broken rule: its name, the place, and what to do."""

    rule: str
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message} [{self.rule}]"
