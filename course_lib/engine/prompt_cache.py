"""The next turn's prompt begins like the last one's: its rows are kept, only the rest is run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from course_lib.engine.prefill import float_rows
from course_lib.engine.session import Session
from course_lib.prefill_attention import causal_attention

if TYPE_CHECKING:
    from course_lib.engine.engine import Engine

Progress = Callable[[int, int], None]


class PromptCache:
    """The session of the last prompt. It is fed what comes after the prompt, too.

    Rows are used again that have, on the compiled kernels, the bits of a prefill of the whole
    prompt: those of exact prefill, however it was cut, and of exact decode in float32. (Decode
    multiplies q8 rows before it scales them, prefill after.) A prompt whose importance is wanted,
    or which is prefilled sparsely or by a policy, is always run as a whole: its importance sums
    over all queries, and such a row depends on its mini-batch or chunk.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._ids: list[int] = []
        self._layout = ("", 0)

    def reusable(
        self, ids: list[int], *, kv: str = "f32", importance: str = "none", block_size: int = 32,
        **options,
    ) -> int:
        """How many first tokens of `ids` a prefill with these options would not run again."""
        if self._session is None or (kv, block_size) != self._layout or not _exact(
            importance, options
        ):
            return 0
        return common_prefix(self._ids, ids[:-1])  # the last token is run for its logits

    def prefill(
        self, engine: Engine, ids: list[int], *, kv: str = "f32", importance: str = "none",
        block_size: int = 32, **options,
    ) -> tuple[Session, int]:
        """A session that holds exactly the prompt `ids`, and how many of its rows were there.

        Options as `Engine.prefill`. The session is valid until the next call.
        """
        common = self.reusable(
            ids, kv=kv, importance=importance, block_size=block_size, **options
        )
        if self._session is None or not common:
            self._session, self._ids = None, []  # its memory is free before more is taken
            session = engine.prefill(
                ids, kv=kv, importance=importance, block_size=block_size, **options
            )
            if _exact(importance, options):
                self._session, self._ids, self._layout = session, ids, (kv, block_size)
            return session, 0
        self._ids = ids[:common]
        self._session.cache.truncate(common)
        extend(self._session, ids[common:], options.get("on_progress"))
        self._ids = ids
        return self._session, common

    def fed(self, ids: list[int]) -> None:
        """Say what was fed to the session behind its prompt, if that was by exact attention.

        What of `ids` the session does not hold (the last token is not fed) is left out.
        """
        if self._session is not None and self._layout[0] == "f32":
            self._ids = self._ids + ids[: len(self._session) - len(self._ids)]


def _exact(importance: str, options: dict) -> bool:
    sparse = options.get("prefill_k"), options.get("policy")
    return importance == "none" and sparse == (None, None)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many first items two lists share."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.array(a[:n]) != np.array(b[:n]))
    return int(differ[0]) if len(differ) else n


def extend(session: Session, ids: list[int], on_progress: Progress | None = None) -> None:
    """Feed prompt tokens to a session behind those it holds, all at once, by exact attention.

    The session is as before if that fails or is interrupted.
    """
    start, cache = len(session), session.cache

    def attend(layer: int, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        cache.append(layer, k, v)
        return causal_attention(q, *float_rows(cache.rows(layer)), start=start)

    try:
        hidden = session.model.hidden(ids, start, attend, on_progress=on_progress)
        session.logits = session.model.logits(hidden[-1])
    except BaseException:
        cache.truncate(start)
        raise
