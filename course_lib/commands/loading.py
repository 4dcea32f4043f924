"""Loading a checkpoint in a command: a progress bar on a terminal, silence elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

from tqdm import tqdm

from course_lib.engine import Engine


def load_with_bar(path: str | Path, weights: str = "f32") -> Engine:
    """`Engine.load(path, weights)`, with a bar of the bytes read on stderr if that is a terminal.

    What the library has to tell while loading (weights that are converted again) is a line there.
    Raises what `Engine.load` raises; Ctrl-C leaves no file behind.
    """
    with tqdm(desc="loading", unit="B", unit_scale=True, leave=False, file=sys.stderr,
              disable=not sys.stderr.isatty()) as bar:

        def on_progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        def on_note(text: str) -> None:
            tqdm.write(f"course: {text}", file=sys.stderr)

        return Engine.load(path, weights, on_progress, on_note)
