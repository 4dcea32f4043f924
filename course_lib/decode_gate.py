"""When an engine that may choose reads blocks only: from this machine's crossover on.

Below the crossover a good dense kernel is faster than choosing blocks. `./course bench` measures it
and remembers it here; before that, numbers of another machine stand in. An experiment that asks
for a number of blocks gets them whatever this says.
"""

import functools
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from course_lib import backend
from course_lib.atomic import write_atomically

AUTOMATIC_BLOCKS = 32
ELSEWHERE: dict[str, int | None] = {"f32": 3210, "q8": 3650}
"""Tokens, by kv, on the two-core x86 server (AVX-512, one thread) that this course was made on:
`./course bench --quick --threads 1`, one selection per query head, probed rows of q8 packed."""
REMEMBERED = Path(sys.prefix) / "cache" / "crossover.json"


def automatic_blocks(n: int, kv: str) -> int | None:
    """Return how many blocks decode reads of n tokens where it may choose; None means all rows.

    kv: "f32" or "q8", else ValueError. NumPy always reads all rows: where it
    gains by blocks was not measured.
    """
    if kv not in ELSEWHERE:
        raise ValueError(f"kv must be {' or '.join(map(repr, ELSEWHERE))}, not {kv!r}.")
    info = backend.info()
    if info.variant == "numpy":
        return None
    return AUTOMATIC_BLOCKS if n >= crossover(info.variant, backend.threads(), kv) else None


@functools.cache
def crossover(variant: str, threads: int, kv: str) -> float:
    """Return the tokens from which block-sparse decode is faster, inf for never."""
    known = _read().get(_key(variant, threads, kv), ELSEWHERE[kv])
    return float("inf") if known is None else known


def remember(variant: str, threads: int, found: Mapping[str, int | None]) -> None:
    """Keep what was measured on this machine: kv -> tokens, or None where dense always won.

    Kept in the course's environment. OSError if that cannot be written.
    """
    known = _read() | {_key(variant, threads, kv): tokens for kv, tokens in found.items()}
    REMEMBERED.parent.mkdir(exist_ok=True)
    write_atomically(REMEMBERED, json.dumps(known, indent=1) + "\n")
    crossover.cache_clear()


def _key(variant: str, threads: int, kv: str) -> str:
    return f"{variant}, {threads} threads, {kv}"


def _read() -> dict[str, int | None]:
    """What is remembered; nothing where there is no file or it was damaged."""
    try:
        known = json.loads(REMEMBERED.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(known, dict):
        return {}
    return {key: value for key, value in known.items()
            if value is None or (type(value) is int and value >= 0)}
