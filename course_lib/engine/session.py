"""A conversation in progress: the KV cache, the importance array and the next token's logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from course_lib.engine.checks import check_context, check_count, check_decode_k, check_ids
from course_lib.engine.decode import DecodeAttention, StepStats
from course_lib.engine.model import Model
from course_lib.engine.whole_token import whole_token
from course_lib.kvcache import KVCache

if TYPE_CHECKING:
    from course_lib.prefill import PrefillPolicy


class Session:
    """Made by `Engine.prefill`; every `step` feeds one token and gives the logits after it.

    `importance` is float32 `[prompt tokens]`, or None when it was not recorded; generated tokens
    count as zero. `logits` float32 `[vocab]`, read-only, belong to the token fed last. `last_step`
    holds the cost of the last `step`. `policy` is the one that the prompt was prefilled by, if any.
    """

    def __init__(self, model: Model, cache: KVCache, block_size: int):
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.importance: np.ndarray | None = None
        self.logits = np.empty(0, dtype=np.float32)
        self.last_step: StepStats | None = None
        self.policy: PrefillPolicy | None = None

    def __len__(self) -> int:
        return self.cache.length

    @property
    def logits(self) -> np.ndarray:
        return self._logits

    @logits.setter
    def logits(self, values: np.ndarray) -> None:
        # Read-only: who sorts or masks what `step` returned must not change the next choice.
        self._logits = values.view()
        self._logits.flags.writeable = False

    def fork(self) -> Session:
        """An independent copy: neither session sees what is fed to the other afterwards."""
        other = Session(self.model, self.cache.copy(), self.block_size)
        other.importance = None if self.importance is None else self.importance.copy()
        other.logits, other.last_step = self.logits.copy(), self.last_step
        other.policy = self.policy
        return other

    def step(
        self,
        token: int,
        *,
        decode_k: int | str | None = None,
        n_probe: int = 8,
        force_blocks: Sequence[int] = (),
        trace: list | None = None,
    ) -> np.ndarray:
        """Feed `token`; the logits after it, float32 `[vocab]`, read-only.

        decode_k=None reads every row; a number reads that many blocks per layer and query head
        (block-sparse decode, article 10-2), unless the context is two blocks or shorter; "auto"
        reads 32 blocks from the length on at which that is faster on this machine. All use the
        same kernel, so decode_k >= number of blocks gives the same bits as None. Blocks in
        `force_blocks` are read in addition to the selected ones. `trace`, a list, gets one entry:
        the Selections as [layer][head] (no heads where nothing was selected). Raises CourseError
        when the context is full or the model's numbers are not finite, ValueError for a bad token,
        decode_k, n_probe or force_blocks; the session is then as before, also after an interrupt.
        """
        (token,) = check_ids([token], self.model.config.vocab_size)
        check_decode_k(decode_k)
        check_count("n_probe", n_probe)
        n = self.cache.length
        check_context(n + 1, self.model.config.max_position_embeddings)
        attend = DecodeAttention(
            self.cache,
            self.importance,
            decode_k=decode_k,
            block_size=self.block_size,
            n_probe=n_probe,
            force_blocks=force_blocks,
        )
        before = self._logits, self.last_step
        try:
            hidden = whole_token(self.model, token, attend, traced=trace is not None)
            if hidden is None:
                hidden = self.model.hidden([token], n, attend)
            self.logits = self.model.logits(hidden[-1])
            self.last_step = attend.stats()
        except BaseException:
            self.cache.truncate(n)
            self._logits, self.last_step = before
            raise
        if trace is not None:
            trace.append(attend.selections)
        return self.logits

    def score(self, ids: Sequence[int], **step_options) -> np.ndarray:
        """Log-probability (natural) of each of `ids` given all before it, float32 `[len(ids)]`.

        Teacher forcing: every id is fed by `step` with `step_options`, so perplexity
        exp(-mean(score)) is that of this cache and this decode mode. Works on a fork.
        """
        ids = check_ids(ids, self.model.config.vocab_size)
        session = self.fork()
        scores = np.empty(len(ids), dtype=np.float32)
        for i, token in enumerate(ids):
            scores[i] = log_softmax(session.logits)[token]
            if i + 1 < len(ids):
                session.step(token, **step_options)
        return scores


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log of the softmax over the last axis, float32."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
