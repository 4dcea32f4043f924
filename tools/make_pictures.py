"""Write docs/gallery.md and its pictures, docs/pictures/*.png, from the explorers. Deterministic.

    python tools/make_pictures.py
    python tools/make_pictures.py --out DIR     (DIR/gallery.md, DIR/pictures/*.png)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from course_lib import show  # noqa: E402
from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.paths import NOTEBOOKS, relative  # noqa: E402

OUT = ROOT / "docs"


class Exhibit(NamedTuple):
    """An explorer in one position: the picture's file, a title, the day that uses it (None: none
    yet), what one sees, and its arguments."""

    explorer: str
    file: str
    title: str
    day: int | None
    sees: str
    arguments: dict[str, Any]


EXHIBITS = (
    Exhibit("WeightBlockExplorer", "weight_block", "Eighteen bytes for 32 weights", 4,
            "A block of the shipped model's weights, its errors in steps, and every byte of it: "
            "which holds the scale, and which the code of the element you ask for.",
            {"kind": "q4_0", "element": 20}),
    Exhibit("OnlineSoftmaxExplorer", "online_softmax", "A softmax that reads once", 7,
            "Scores come one by one. Where a new maximum comes, the sum and the output so far are "
            "scaled down; in the end they are those of the two-pass softmax.",
            {"source": "model"}),
    Exhibit("KVLedgerExplorer", "kv_ledger", "Where the bytes of a KV cache go", 8,
            "The same rows in four formats, as a decode step reads them and as memory holds them.",
            {"tokens": 4096, "mirror": True}),
    Exhibit("QuantizationErrorExplorer", "quantization_error", "One outlier, one coarse step", 9,
            "A row in 8 bits. Its largest value sets the step for all its neighbours.",
            {"source": "normal", "outlier": 8}),
    Exhibit("RoundingBiasExplorer", "rounding_bias", "Rounding that leans to one side", 9,
            "Four rules, their mean error by the sign of the value, and what attention makes of "
            "it.",
            {"rule": "trunc"}),
    Exhibit("BlockSelectionExplorer", "block_selection", "Why this block?", 10,
            "One query of the shipped model: which blocks it reads, by importance (I), probe (P) "
            "or recency (R), how exact attention weighs them, and what the model then says.",
            {"k": 8}),
    Exhibit("KSweepExplorer", "k_sweep", "How many blocks are enough?", 11,
            "Recorded recall at every k, and the text that the model wrote.", {"k": 2}),
    Exhibit("ImportanceMapExplorer", "importance_map", "Who looked where", 11,
            "The weight that chosen queries gave to each block, by layer or head.", {}),
    Exhibit("PrefillMaskExplorer", "prefill_mask", "A mask for reading the prompt", 12,
            "Beside exact attention: which blocks a policy keeps, why, and what is lost.", {}),
    Exhibit("VoteExplorer", "vote", "Four heads, one list", 13,
            "Ballots of several heads, and the one list of blocks that a rule makes of them.", {}),
    Exhibit("RingTimelineExplorer", "ring_timeline", "Loading while computing", 14,
            "Blocks of history that do not fit memory pass through a ring of slots.", {}),
    Exhibit("LseMergeExplorer", "lse_merge", "Parts of a softmax, put together", 14,
            "Attention over parts of the context, merged by their log-sum-exp to the whole.", {}),
    Exhibit("RooflineExplorer", "roofline", "What memory allows", None,
            "Operations per byte of decode's kernels under the roof of a machine: of round "
            "numbers, or of yours, measured.", {}),
)

HEAD = """# Gallery

The explorers of the course, each in one position. In JupyterLab they are live: sliders and lists
move them, by mouse or keyboard, and the text below the picture states every number in it. Open one
in its day (`./course lab`), or in any cell:

    from course_lib.show import {names}

**Predict first.** Each explorer asks a question; answer it before you move anything.

[style.py](../course_lib/show/style.py) gives every meaning its colour, letter and hatch.
`tools/make_pictures.py` writes this page and its pictures. The numbers are those of the shipped
model, derived or recorded."""


def made(exhibit: Exhibit) -> show.Explorer:
    """The explorer in the exhibit's position."""
    return getattr(show, exhibit.explorer)(**exhibit.arguments)


def gallery(explorers: dict[str, show.Explorer]) -> str:
    """The page's text for explorers by the names of their classes."""
    parts = [HEAD.format(names=EXHIBITS[0].explorer)]
    for exhibit in EXHIBITS:
        explorer = explorers[exhibit.explorer]
        arguments = ", ".join(f"{k}={v!r}" for k, v in exhibit.arguments.items())
        where = _day(exhibit.day)
        parts.append(f"""## {exhibit.title}

`{exhibit.explorer}({arguments})`{where}

{exhibit.sees}

**Predict first:** {explorer.question[:1].upper()}{explorer.question[1:]}

![{explorer.alt}](pictures/{exhibit.file}.png)

<details><summary>Its numbers</summary>

```text
{explorer.summary()}
```

</details>""")
    return "\n\n".join(parts) + "\n"


def _day(day: int | None) -> str:
    notebooks = [] if day is None else sorted(NOTEBOOKS.glob(f"day{day:02d}_*.ipynb"))
    return f" · [day {day}](../notebooks/{notebooks[0].name})" if notebooks else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR")
    args = parser.parse_args()
    try:
        explorers = {exhibit.explorer: made(exhibit) for exhibit in EXHIBITS}
        files = {f"pictures/{e.file}.png": explorers[e.explorer].png() for e in EXHIBITS}
        files["gallery.md"] = gallery(explorers).encode()
    except CourseError as error:
        print(f"make_pictures: {error}", file=sys.stderr)
        return 2
    (args.out / "pictures").mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        path = args.out / name
        changed = not path.exists() or path.read_bytes() != data
        if changed:
            write_atomically(path, data)
        print(f"{relative(path)}: {len(data)} bytes, {'written' if changed else 'unchanged'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
