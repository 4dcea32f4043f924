"""The options of `Engine.prefill`: named, explained and checked in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from course_lib.engine.checks import check_choice, check_count
from course_lib.engine.chunked_prefill import CHUNK, SLOTS, Chunked, as_chunked
from course_lib.engine.model import TILE
from course_lib.engine.prefill import IMPORTANCE_RULES
from course_lib.kvcache import CACHE_DTYPES
from course_lib.prefill import PrefillPolicy


@dataclass(frozen=True, kw_only=True)
class PrefillOptions:
    """How a prompt is run; ValueError for an unknown or contradictory option.

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
    in a file that is gone at the end, of which `ram_budget` bytes may be in memory (None: the
    `slots` that blocks are read into; more or fewer change no bit); the cache that decode
    reads is filled at the end and is not part of the budget. The policy, `policy` of the session,
    starts anew and then knows what was read (`get_density_stats`); `on_progress` counts tokens.
    """

    kv: str = "f32"
    importance: str | None = None
    window: int | None = None
    prefill_k: int | None = None
    prefill_group: int | None = None
    block_size: int = 32
    tile: int = TILE
    policy: str | PrefillPolicy | None = None
    chunk: int = CHUNK
    offload: str | Path | bool | None = None
    ram_budget: int | None = None
    slots: int = SLOTS
    on_progress: Callable[[int, int], None] | None = None
    chunked: Chunked | None = field(init=False)  # the chunked way to run, if there is a policy

    def __post_init__(self) -> None:
        check_choice("kv", self.kv, CACHE_DTYPES)
        if self.importance is not None:
            check_choice("importance", self.importance, IMPORTANCE_RULES)
        for name in ("window", "prefill_k", "prefill_group"):
            check_count(name, getattr(self, name), optional=True)
        for name in ("block_size", "tile"):
            check_count(name, getattr(self, name))
        if self.prefill_group is not None and self.prefill_k is None:
            raise ValueError("prefill_group needs prefill_k")
        if self.window is not None and self.importance != "last_window":
            raise ValueError('window needs importance="last_window"')
        object.__setattr__(self, "chunked", self._chunked())

    def _chunked(self) -> Chunked | None:
        if self.policy is None:
            if self.offload or self.ram_budget is not None or self.chunk != CHUNK \
                    or self.slots != SLOTS:
                raise ValueError("chunk, offload, ram_budget and slots are about prefill in "
                                 'chunks: give a policy too, such as "full"')
            return None
        if self.prefill_k is not None:
            raise ValueError("prefill_k and policy are two ways to choose blocks: leave one out")
        if self.importance not in (None, "none"):
            raise ValueError(f'importance="{self.importance}" needs the softmax over the whole '
                             "context, and a policy has only parts of it: leave importance out or "
                             'give "none"')
        return as_chunked(self.policy, self.chunk, self.offload, self.ram_budget, self.slots)


def takes_prefill_options(method: Callable[..., Any]) -> Callable[..., Any]:
    """Show the fields of PrefillOptions as the keywords of a method with ``**options``, where its
    signature is asked for: by help(), and by a notebook that completes names."""
    mine = inspect.signature(method)
    theirs = inspect.signature(PrefillOptions).parameters.values()
    before = [p for p in mine.parameters.values() if p.kind is not p.VAR_KEYWORD]
    method.__signature__ = mine.replace(parameters=[*before, *theirs])  # type: ignore[attr-defined]
    return method
