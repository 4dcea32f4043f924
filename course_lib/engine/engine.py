"""The engine as a user meets it: load a checkpoint, then text in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from course_lib.engine.chat import Messages
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.checks import (
    check_choice,
    check_context,
    check_count,
    check_decode_k,
    check_ids,
)
from course_lib.engine.chunked_prefill import CHUNK, Chunked, as_chunked, run_chunked
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversation import Answer, Reply, room_for_answer
from course_lib.engine.conversion import Progress, check_kind, load_weights
from course_lib.engine.fits import require_context, require_memory
from course_lib.engine.generate import GeneratedToken, Generation, generate_from, stream_from
from course_lib.engine.model import TILE, Model
from course_lib.engine.prefill import IMPORTANCE_RULES, run_prompt
from course_lib.engine.prompt_cache import PromptCache
from course_lib.engine.sampling import Sampler
from course_lib.engine.session import Session
from course_lib.engine.tokenizer import Tokenizer
from course_lib.engine.weight_cache import Note, cached_weights
from course_lib.engine.weights import Weights, check_tensors
from course_lib.kvcache import CACHE_DTYPES
from course_lib.prefill import PrefillPolicy


class Engine:
    """A model with its tokenizer: float32 arithmetic, weights as float32 or in packed blocks."""

    def __init__(self, config: ModelConfig, weights: Weights, tokenizer: Tokenizer):
        self.config = config
        self.tokenizer = tokenizer
        self.model = Model(config, weights)

    @classmethod
    def load(
        cls,
        path: str | Path,
        weights: str = "f32",
        on_progress: Progress | None = None,
        on_note: Note | None = None,
    ) -> Engine:
        """The engine of a checkpoint, its weights as "f32", "q8_0" or "q4_0".

        path: what `open_checkpoint` opens. Packed weights are kept in a file and mapped from it
        the next time, see `cached_weights`; `on_note` is told, in a sentence, why such a file is
        made again. `on_progress(done, total)` counts bytes of weights while they are read.
        Raises CourseError, one sentence that names the file and the remedy, for anything absent,
        damaged, not supported or too large for this machine's memory.
        """
        check_kind(weights)
        config, source, tokenizer = open_checkpoint(path)
        check_tensors(source, config)
        require_memory(config, weights, source.path)
        if weights == "f32":
            loaded = load_weights(source, config, weights, on_progress)
        else:
            loaded = cached_weights(source, config, weights, on_progress, on_note)  # type: ignore[arg-type]
        return cls(config, loaded, tokenizer)

    def encode(self, text: str, allow_special: bool = True) -> list[int]:
        """Token ids of `text`, none added; see `Tokenizer.encode` for `allow_special`."""
        return self.tokenizer.encode(text, allow_special)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; see `Tokenizer.decode`."""
        return self.tokenizer.decode(ids)

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        *,
        enable_thinking: bool = False,
    ) -> list[int]:
        """Token ids of a conversation; see `Tokenizer.apply_chat_template`."""
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt, enable_thinking=enable_thinking
        )

    def forward(self, ids: Sequence[int]) -> np.ndarray:
        """Logits at every position, float32 `[n, vocab]`, with exact attention on float32 rows."""
        _, hidden = run_prompt(self.model, self._prompt(ids))
        return self.model.logits(hidden)

    def prefill(
        self,
        ids: Sequence[int],
        *,
        kv: str = "f32",
        importance: str | None = None,
        window: int | None = None,
        prefill_k: int | None = None,
        prefill_group: int | None = None,
        block_size: int = 32,
        tile: int = TILE,
        policy: str | PrefillPolicy | None = None,
        chunk: int = CHUNK,
        offload: str | Path | bool | None = None,
        ram_budget: int | None = None,
        on_progress: Progress | None = None,
    ) -> Session:
        """Run the prompt `ids`; a Session whose logits are those after its last token.

        kv: "f32" or "q8", the rows the cache keeps. With q8, prefill attends to the quantized
        rows too (quantize, then read back): what is measured later is a q8 cache, not a mixture.
        importance: softmax weight that prompt queries gave to each position, summed over layers
        and heads; "all_queries" (the default), "last_window" (only the last `window` queries;
        default n mod 256, 256 where that is 0) or "none" (the only one with a policy, and its
        default). It comes from the softmax that prefill computed.
        prefill_k: None for exact attention, else blocks per head and mini-batch of 256 queries
        (only when the prompt is longer than two blocks). Source: engine rule, design of 10-2.
        prefill_group: with prefill_k, so many tokens share a selection instead of a mini-batch.
        tile: rows that go through the matrices together, for memory; on compiled kernels it
        changes no bit. on_progress(done, total) counts tiles, layer after layer.
        policy: None for the whole prompt at once, else a policy of course_lib.prefill, or the name
        of one ("full", "quest", "xattn"): the prompt goes through all layers `chunk` tokens at a
        time, a multiple of the policy's block size; each chunk reads itself and the blocks of
        history that the policy chooses. Rows wait in memory, or with `offload` (True, or a folder)
        in a file that is gone at the end, of which `ram_budget` bytes may be in memory (None: two
        blocks); the cache that decode reads is filled at the end and is not part of the budget.
        The policy, `policy` of the session, starts anew and then knows what was read
        (`get_density_stats`); `on_progress` counts tokens.
        Raises CourseError if the prompt is longer than the context or needs more memory than is
        free, or if the model's numbers are not finite, ValueError for empty or out-of-range ids
        and for unknown options.
        """
        chunked = _check_prefill_options(
            kv, importance, window, prefill_k, prefill_group, block_size, tile,
            policy, chunk, offload, ram_budget, on_progress,
        )
        ids = self._prompt(ids)
        if chunked is not None:
            return run_chunked(self.model, ids, chunked, kv=kv, block_size=block_size, tile=tile,
                               on_progress=on_progress)
        require_context(self.config, kv, len(ids))
        session, hidden = run_prompt(
            self.model,
            ids,
            kv=kv,
            importance=importance or "all_queries",
            window=window,
            prefill_k=prefill_k,
            prefill_group=prefill_group,
            block_size=block_size,
            tile=tile,
            on_progress=on_progress,
        )
        session.logits = self.model.logits(hidden[-1])
        return session

    def generate(
        self,
        ids: Sequence[int],
        max_new_tokens: int,
        decode_k: int | str | None = None,
        *,
        sampler: Sampler | None = None,
        n_probe: int = 8,
        **prefill_options,
    ) -> list[int]:
        """Continuation of `ids`, greedy without a sampler: new token ids, without the end token.

        decode_k=None is exact; a number reads that many blocks, "auto" decides by length. Other
        options as `prefill`.
        """
        check_count("max_new_tokens", max_new_tokens)
        check_decode_k(decode_k)
        ids = self._prompt(ids)
        check_context(len(ids) + max_new_tokens, self.config.max_position_embeddings)
        session = self.prefill(ids, **prefill_options)
        return generate_from(
            session, max_new_tokens, decode_k, sampler=sampler, n_probe=n_probe
        ).ids

    def generate_from(
        self, session: Session, max_new_tokens: int, decode_k: int | str | None = None, **options
    ) -> Generation:
        """Continuation of a prefilled session; see `course_lib.engine.generate_from`."""
        return generate_from(session, max_new_tokens, decode_k, **options)

    def stream(
        self, session: Session, max_new_tokens: int, decode_k: int | str | None = None, **options
    ) -> Iterator[GeneratedToken]:
        """The tokens that continue `session`, with their text, as they come; they are fed to it.

        See `course_lib.engine.stream_from`.
        """
        options.setdefault("tokenizer", self.tokenizer)
        return stream_from(session, max_new_tokens, decode_k, **options)

    def chat(
        self,
        messages: Messages,
        *,
        max_new_tokens: int = 512,
        decode_k: int | str | None = None,
        sampler: Sampler | None = None,
        enable_thinking: bool = False,
        trace: bool = False,
        n_probe: int = 8,
        importance: str | None = None,
        cache: PromptCache | None = None,
        **prefill_options,
    ) -> Answer:
        """The model's answer to a conversation: an iterator of tokens, with its `reply` so far.

        At most max_new_tokens, and no more than the context has room for. importance: as
        `prefill`; None stands for "none" where decode_k=None, which reads all rows, makes it
        useless, and with a policy; else for prefill's own default. cache: what an earlier call was
        given; of a prompt that begins like its last one only the rest is run (`PromptCache`).
        Raises ValueError for malformed messages and options, CourseError if the checkpoint has no
        usable chat template or the conversation fills its context; before any work.
        """
        check_count("max_new_tokens", max_new_tokens)
        check_decode_k(decode_k)
        check_count("n_probe", n_probe)
        ids = self.apply_chat_template(messages, enable_thinking=enable_thinking)
        limit = self.config.max_position_embeddings
        max_new_tokens = room_for_answer(len(ids), max_new_tokens, limit)
        if importance is None:
            useless = decode_k is None or prefill_options.get("policy") is not None
            importance = "none" if useless else "all_queries"
        _check_prefill_options(importance=importance, **prefill_options)
        held = PromptCache() if cache is None else cache
        reused = held.reusable(ids, importance=importance, **prefill_options)
        return Answer(
            Reply(self.tokenizer, len(ids), reused_tokens=reused),
            lambda: held.prefill(self, ids, importance=importance, **prefill_options),
            max_new_tokens, decode_k=decode_k, sampler=sampler, trace=trace, n_probe=n_probe,
        )

    def _prompt(self, ids: Sequence[int]) -> list[int]:
        checked = check_ids(ids, self.config.vocab_size)
        check_context(len(checked), self.config.max_position_embeddings)
        return checked


def _check_prefill_options(
    kv: str = "f32",
    importance: str | None = None,
    window: int | None = None,
    prefill_k: int | None = None,
    prefill_group: int | None = None,
    block_size: int = 32,
    tile: int = TILE,
    policy: str | PrefillPolicy | None = None,
    chunk: int = CHUNK,
    offload: str | Path | bool | None = None,
    ram_budget: int | None = None,
    on_progress: Progress | None = None,
) -> Chunked | None:
    """ValueError for an unknown or contradictory option; the chunked way to run, if there is a
    policy."""
    check_choice("kv", kv, CACHE_DTYPES)
    if importance is not None:
        check_choice("importance", importance, IMPORTANCE_RULES)
    check_count("window", window, optional=True)
    check_count("prefill_k", prefill_k, optional=True)
    check_count("prefill_group", prefill_group, optional=True)
    check_count("block_size", block_size)
    check_count("tile", tile)
    if prefill_group is not None and prefill_k is None:
        raise ValueError("prefill_group needs prefill_k")
    if window is not None and importance != "last_window":
        raise ValueError('window needs importance="last_window"')
    if policy is None:
        if offload or ram_budget is not None or chunk != CHUNK:
            raise ValueError("chunk, offload and ram_budget are about prefill in chunks: give a "
                             'policy too, such as "full"')
        return None
    if prefill_k is not None:
        raise ValueError("prefill_k and policy are two ways to choose blocks: leave one out")
    if importance not in (None, "none"):
        raise ValueError(f'importance="{importance}" needs the softmax over the whole context, and '
                         'a policy has only parts of it: leave importance out or give "none"')
    return as_chunked(policy, chunk, offload, ram_budget)
