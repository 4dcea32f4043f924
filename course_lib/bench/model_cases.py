"""The shipped model as a whole: what the kernels do to a prompt and to a token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from course_lib.bench.groups import Bench, Group, Plan, Work
from course_lib.engine import Engine
from course_lib.paths import MODELS

MODEL = MODELS / "needle-qwen3"
CONTEXTS = (512, 2048)


def plans() -> list[Plan]:
    """Nothing where the model's files are not there."""
    if not MODEL.is_dir():
        return []
    return [Plan("model", f"model {n}", partial(build, n), all_threads=False, quick=n == 512)
            for n in CONTEXTS]


def build(n: int, bench: Bench) -> Group:
    """Exact prefill of n tokens, and one more token after them, in f32 rows."""
    engine = Engine.load(MODEL)
    ids = bench.rng.integers(0, engine.config.vocab_size, n).tolist()
    session = engine.prefill(ids)

    def prefill() -> None:
        engine.prefill(ids)

    def token(decode_k: int | None = None) -> None:
        session.step(ids[0], decode_k=decode_k)
        session.cache.truncate(n)

    calls: dict[str, Callable[[], object]] = {
        "prefill": prefill, "token": token, "token k=32": partial(token, 32),
    }
    works = [Work(f"{MODEL.name} {name}", call, whole_model=True, numpy=name)
             for name, call in calls.items()]
    return Group(works, calls, "f32", n)
