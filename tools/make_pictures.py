"""Write docs/pictures/*.png, the pictures of README, from the explorers. Deterministic.

    python tools/make_pictures.py
    python tools/make_pictures.py --model DIR --out DIR
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.engine import Engine  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.paths import MODELS, relative  # noqa: E402
from course_lib.show import (  # noqa: E402
    BlockSelectionExplorer,
    QuantizationErrorExplorer,
    RoundingBiasExplorer,
)

OUT = ROOT / "docs" / "pictures"


def pictures(engine: Engine, tokens: int = 2061) -> dict[str, bytes]:
    """Every picture by its file name."""
    return {
        "block_selection.png": BlockSelectionExplorer(engine, tokens=tokens, k=8).png(),
        "quantization_error.png": QuantizationErrorExplorer(
            engine, source="normal", outlier=8).png(),
        "rounding_bias.png": RoundingBiasExplorer(rule="trunc").png(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "needle-qwen3", metavar="DIR")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    args = parser.parse_args()
    try:
        made = pictures(Engine.load(args.model))
    except CourseError as error:
        print(f"make_pictures: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    for name, data in made.items():
        path = args.out / name
        changed = not path.exists() or path.read_bytes() != data
        if changed:
            write_atomically(path, data)
        print(f"{relative(path)}: {len(data)} bytes, {'written' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
