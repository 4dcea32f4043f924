"""The bar of one phase of a run (prefill, decode) with its tokens per second."""

from __future__ import annotations

import sys

from tqdm import tqdm

DELAY = 1.0  # seconds: a phase that is over sooner shows no bar


class PhaseBar:
    """Call it with (phase, done, total) as work goes on; `close` it when the run ends.

    `tokens`: what a whole prefill reads, whose progress may be counted in other units. A bar is
    drawn on a terminal only, and goes when its phase does.
    """

    def __init__(self, tokens: int):
        self._tokens = tokens
        self._bar: tqdm | None = None

    def __call__(self, phase: str, done: int, total: int) -> None:
        tokens = self._tokens if phase == "prefill" else total
        reached = tokens * done // max(total, 1)
        if self._bar is None or self._bar.desc != phase or reached < self._bar.n:
            self.close()
            self._bar = tqdm(desc=phase, total=tokens, unit="token", unit_scale=True, leave=False,
                             delay=DELAY, file=sys.stderr, disable=not sys.stderr.isatty())
        self._bar.update(reached - self._bar.n)
        if reached >= tokens:
            self.close()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
