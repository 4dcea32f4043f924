"""Write the sealed truths of source-reading exercises from ``tests/grading/dayNN.py``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.classroom.sealed import seal_day, sealed_path  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402

EXAMPLE = ROOT / "tests" / "fixtures" / "example_day"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("days", nargs="*", type=int, metavar="DAY",
                        help="default: every day, and the example day 99")
    days = parser.parse_args().days
    sources = {int(path.stem[3:]): path for folder in (ROOT / "tests", EXAMPLE)
               for path in sorted((folder / "grading").glob("day[0-9][0-9].py"))}
    for day in days:
        if day not in sources:
            print(f"seal_readings: no tests/grading/day{day:02d}.py; days there are: "
                  + ", ".join(map(str, sources)), file=sys.stderr)
            return 2
    try:
        for day in days or sources:
            source = sources[day]
            text = seal_day(runpy.run_path(str(source))["READINGS"])
            if source.is_relative_to(EXAMPLE):
                path = EXAMPLE / "exercises" / "sealed" / f"{source.stem}.json"
            else:
                path = sealed_path(day)
            path.parent.mkdir(exist_ok=True)
            if path.exists() and path.read_text(encoding="utf-8") == text:
                print(f"{source.stem}: unchanged")
                continue
            write_atomically(path, text)
            print(f"{source.stem}: sealed")
    except CourseError as error:
        print(f"seal_readings: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
