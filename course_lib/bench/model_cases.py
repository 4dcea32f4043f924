"""The shipped model as a whole: what the kernels do to a prompt and to a token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from course_lib.bench.groups import Bench, Group, Plan, Work
from course_lib.engine import Engine, Session
from course_lib.paths import MODELS
from course_lib.sparse import sparse_decode_gate

MODEL = MODELS / "needle-qwen3"
CONTEXTS = (512, 2048)
DECODE_K = 32


def plans() -> list[Plan]:
    """Nothing where the model's files are not there."""
    if not MODEL.is_dir():
        return []
    return [Plan("model", f"model {n}", partial(build, n), all_threads=False, quick=n == 512)
            for n in CONTEXTS]


def build(n: int, bench: Bench) -> Group:
    """Exact prefill of n tokens, and one more token after them, in f32 rows.

    Each call of a token comes after those before it, as in generation: the context grows by about a
    hundred tokens while it is measured. Taking tokens back would make the next call sample all
    blocks again. Blocks are chosen only where the engine would not read all rows anyway.
    """
    engine = Engine.load(MODEL)
    ids = bench.rng.integers(0, engine.config.vocab_size, n).tolist()
    exact = engine.prefill(ids)
    pruned = exact.fork()

    def prefill() -> None:
        engine.prefill(ids)

    def token(session: Session, decode_k: int | None) -> None:
        session.step(ids[0], decode_k=decode_k)

    calls: dict[str, Callable[[], object]] = {
        "prefill": prefill, "token": partial(token, exact, None)}
    if sparse_decode_gate(n, DECODE_K):
        calls[f"token k={DECODE_K}"] = partial(token, pruned, DECODE_K)
    works = [Work(f"{MODEL.name} {name}", call, whole_model=True, numpy=name)
             for name, call in calls.items()]
    return Group(works, calls, "f32", n)
