#!/usr/bin/env python3
"""Write constraints.txt anew: install the requirements of pyproject.toml in a fresh temporary
environment, newest versions allowed, and record what came. Run it with the oldest patch release of
CI's Python minor that a board has (Debian 12: 3.11.2), so that the versions fit that one too; run
`./course test` before committing the result."""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.launcher.environment import requirements  # noqa: E402


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [f"{folder}/bin/python", "-m", "pip"]
        subprocess.run([*pip, "install", *requirements(str(ROOT))], check=True)
        frozen = subprocess.run(
            [*pip, "freeze", "--all"], check=True, capture_output=True, text=True
        ).stdout
    lines = [line for line in frozen.splitlines() if not line.startswith("pip==")]
    header = [
        f"# Python {version} only: the exact versions that CI ran. Other Pythons get the lower",
        "# bounds of pyproject.toml. Written by tools/make_constraints.py.",
    ]
    write_atomically(ROOT / "constraints.txt", "\n".join([*header, *lines]) + "\n")


if __name__ == "__main__":
    main()
