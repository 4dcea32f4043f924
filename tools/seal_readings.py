"""Write the sealed truths of source-reading exercises from ``tests/grading/dayNN.py``.

Usage: python tools/seal_readings.py [DAY ...]   (default: every day)
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_lib.classroom.sealed import seal_day, sealed_path  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402


def main(days: list[str]) -> int:
    names = {f"day{int(day):02d}" for day in days}
    try:
        for source in sorted((ROOT / "tests" / "grading").glob("day[0-9][0-9].py")):
            if names and source.stem not in names:
                continue
            text = seal_day(runpy.run_path(str(source))["READINGS"])
            path = sealed_path(int(source.stem[3:]))
            path.parent.mkdir(exist_ok=True)
            if path.exists() and path.read_text(encoding="utf-8") == text:
                print(f"{source.stem}: unchanged")
                continue
            temporary = path.with_suffix(".tmp")
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
            print(f"{source.stem}: sealed")
    except CourseError as error:
        print(f"seal_readings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
