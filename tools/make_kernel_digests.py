#!/usr/bin/env python3
"""Write tests/oracle/golden/kernel_digests.json: what the portable kernels compute.

    python tools/make_kernel_digests.py [--check]

Run it again after the definition of an operation or a case has changed, and say so in the commit:
an optimization changes no digest. --check writes nothing; exit code 1 if the file would change.
Exit code 2 where the portable kernels are not compiled.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import kernels_pyx  # noqa: E402
from course_lib.atomic import write_atomically  # noqa: E402
from tests.oracle.kernel_cases import SIZES, cases  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden" / "kernel_digests.json"


def digests() -> dict[str, str]:
    return {name: call.digest("portable") for operation in sorted(SIZES)
            for name, call in cases(operation).items()}


def recorded(path: Path) -> dict[str, str]:
    """What the file holds; nothing if there is none or it is damaged."""
    try:
        found = json.loads(path.read_text(encoding="ascii"))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if it would change")
    arguments = parser.parse_args(argv)
    if "portable" not in kernels_pyx.VARIANTS:
        print("make_kernel_digests: the portable kernels are not compiled here; "
              "python setup.py build_ext --inplace", file=sys.stderr)
        return 2
    old, new = recorded(GOLDEN), digests()
    changed = [name for name in old.keys() | new.keys() if old.get(name) != new.get(name)]
    operations = sorted({name.partition("(")[0] for name in changed})
    print(f"{len(new)} digests; new, changed or gone: {len(changed)} ({', '.join(operations)})")
    if arguments.check:
        return 1 if changed else 0
    write_atomically(GOLDEN, json.dumps(new, indent=0) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
