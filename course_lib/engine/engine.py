"""The engine as a user meets it: load a checkpoint, then text in, text out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.engine.chat import Messages
from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.checks import check_context, check_count, check_decode_k, check_ids
from course_lib.engine.chunked_prefill import run_chunked
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversation import Answer, Reply, room_for_answer
from course_lib.engine.conversion import Progress, check_kind, load_weights
from course_lib.engine.fits import require_context, require_memory
from course_lib.engine.generate import GeneratedToken, Generation, generate_from, stream_from
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from course_lib.engine.prefill_options import PrefillOptions, takes_prefill_options
from course_lib.engine.prompt_cache import PromptCache
from course_lib.engine.sampling import Sampler
from course_lib.engine.session import Session
from course_lib.engine.tokenizer import Tokenizer
from course_lib.engine.weight_cache import Note, cached_weights
from course_lib.engine.weights import Weights, check_tensors


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

    @takes_prefill_options
    def prefill(self, ids: Sequence[int], **options: Any) -> Session:
        """Run the prompt `ids`; a Session whose logits are those after its last token.

        options: what `PrefillOptions` names and explains; without any, all of the prompt at once
        by exact attention, with the importance of all queries.
        Raises CourseError if the prompt is longer than the context or needs more memory than is
        free, or if the model's numbers are not finite, ValueError for empty or out-of-range ids
        and for unknown options.
        """
        how = _prefill_options(options)
        ids = self._prompt(ids)
        if how.chunked is not None:
            return run_chunked(self.model, ids, how.chunked, kv=how.kv, block_size=how.block_size,
                               tile=how.tile, on_progress=how.on_progress)
        require_context(self.config, how.kv, len(ids))
        session, hidden = run_prompt(
            self.model,
            ids,
            kv=how.kv,
            importance=how.importance or "all_queries",
            window=how.window,
            prefill_k=how.prefill_k,
            prefill_group=how.prefill_group,
            block_size=how.block_size,
            tile=how.tile,
            on_progress=how.on_progress,
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
        _prefill_options({"importance": importance, **prefill_options})
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


def _prefill_options(options: dict[str, Any]) -> PrefillOptions:
    """PrefillOptions of keywords; TypeError, as a call with a wrong keyword gives, for others."""
    known = inspect.signature(PrefillOptions).parameters
    for name in options:
        if name not in known:
            raise TypeError(f"Engine.prefill() got an unexpected keyword argument {name!r}; "
                            f"there are {', '.join(known)}")
    return PrefillOptions(**options)
