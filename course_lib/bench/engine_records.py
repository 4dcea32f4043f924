"""The rows of `./course bench --engine`: tokens a second of a whole engine."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class EngineRecord:
    """One engine at one task; None where a column has no meaning.

    engine: "course" or "llama". phase: "pp", a prompt of `n` tokens after `depth` others, or "tg",
    one token after `depth` others. kv: rows of the KV cache, "f32" and "q8" of the course, "f16"
    and "q8_0" of llama.cpp. sparse_k: None where all rows are read, a number of blocks, or "auto",
    the engine's own choice. tokens_per_s: from the median. bandwidth_fraction: bytes of weights and
    KV rows that a token must read, a second, as a part of what as many threads read in the same
    rounds. python_fraction: the part of the time outside the kernels, measured in other runs.
    """

    engine: str
    phase: str
    n: int
    depth: int
    kv: str
    sparse_k: int | str | None
    threads: int
    tokens_per_s: float
    bandwidth_fraction: float | None = None
    python_fraction: float | None = None


COLUMNS = tuple(field.name for field in fields(EngineRecord))
