"""How one list of blocks is made of what many heads and query blocks want, and what gets lost."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import as_float32
from course_lib.engine import Engine
from course_lib.lab.block_mass import LayerMasses, layer_masses
from course_lib.lab.planted import PLANTED, planted
from course_lib.lab.prompts import NeedlePrompt
from course_lib.prefill import (
    AGGREGATORS,
    aggregate,
    find_blocks_chunked,
    flat_group_gemm_fuse_reshape,
    softmax_fuse_block_sum,
)
from course_lib.prefill.trace import REASONS
from course_lib.prefill.xattn import base_2_scale
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.prefill_mask import asking_prompts
from course_lib.show.style import PREFILL
from course_lib.show.text import percent, plural
from course_lib.show.vote_picture import VotePicture

MODEL = "the shipped model"
SOURCES = (*PLANTED, MODEL)
THRESHOLDS = (0.5, 0.7, 0.8, 0.9, 0.95)
CHUNKS = (64, 128, 256, 512)
PADDINGS = ("counted", "left out")
STRIDE, MODEL_BLOCK = 8, 64


class Chunk(NamedTuple):
    """What is voted on: estimated mass float32 [heads, rows, blocks]; the block that each KV head
    looks for, None for one that looks for nothing."""

    sums: np.ndarray
    needles: tuple[int | None, ...]


class VoteExplorer(Explorer):
    """The ballots of one chunk and the list that a rule makes of them.

    source: one of SOURCES, planted data or the last chunk of a prompt of the shipped model (an
    exact prefill's queries and keys). prompt, layer and chunk (tokens, so many blocks of 64) are
    the model's; padding, of the planted "padded chunk", whether its zero queries vote. engine and
    prompts as PrefillMaskExplorer; the model is loaded when it is first asked for.
    """

    alt = ("a grid of ballots, one row for each KV head and query block, one column for each block "
           "of history; below it the votes of each block, and the list that is read")
    drawing = VotePicture
    question = ("Four KV heads, each of which needs another block: which of them does a majority "
                "read? And which does the mean of their masses read?")

    def __init__(
        self, engine: Engine | None = None, *, prompts: Sequence[NeedlePrompt] | None = None,
        tokens: int = 2048, source: str = "each KV head its own", rule: str = "majority",
        threshold: float = 0.9, padding: str = "counted", prompt: int = 0, layer: int = 1,
        chunk: int = 256,
    ) -> None:
        self._engine, self._prompts, self._tokens = engine, prompts, tokens
        count = 4 if prompts is None else len(prompts)
        layers = 3 if engine is None else engine.config.num_hidden_layers
        super().__init__({
            "source": dropdown("votes from", SOURCES, source, "planted data or the shipped model"),
            "rule": dropdown("rule", tuple(AGGREGATORS), rule, "how one list is made"),
            "threshold": steps("threshold τ", THRESHOLDS, threshold,
                               "the share of estimated mass that each ballot keeps"),
            "padding": dropdown("padding", PADDINGS, padding,
                                "the zero queries of the padded chunk"),
            "prompt": number("prompt", count - 1, prompt, "of the shipped model"),
            "layer": number("layer", layers - 1, layer, "of the shipped model"),
            "chunk": steps("chunk", CHUNKS, chunk, "of the shipped model: tokens at the end"),
        })

    @property
    def engine(self) -> Engine:
        """The engine; loaded when it is first needed."""
        return self._engine or shipped_engine()

    @property
    def prompts(self) -> Sequence[NeedlePrompt]:
        """Prompts that end with the beginning of the answer."""
        return self._prompts or asking_prompts(self.engine, self._tokens)

    def compute(
        self, source: str = "each KV head its own", rule: str = "majority",
        threshold: float = 0.9, padding: str = "counted", prompt: int = 0, layer: int = 1,
        chunk: int = 256,
    ) -> dict[str, Any]:
        """Ballots, votes, list and needles; defaults as the class's.

        ballots: bool [kv heads, rows, blocks]; votes, mass: the share of all of them that a block
        has, float64 [blocks]; lists: the blocks read, one array or one for each KV head; reasons:
        a word for every block of every list; lost: the (KV head, block) pairs whose needle its KV
        head does not read.
        """
        if source == MODEL:
            made = _model_chunk(layer_masses(self.engine, self.prompts[prompt]),
                                self.prompts[prompt].value_span[0], layer, chunk)
        else:
            made = _planted_chunk(source, padding)
        sums, needles = made
        kv_heads, (heads, rows, blocks) = len(needles), sums.shape
        masks = find_blocks_chunked(sums, 0, threshold, causal=False)
        joined = aggregate(masks, rule, num_kv_heads=kv_heads, block_sums=sums,
                           threshold=threshold, sink=True)
        ballots = masks.reshape(kv_heads, -1, rows, blocks).any(axis=1)
        lists = joined.by_head
        reads = [lists[h if len(lists) > 1 else 0].tolist() for h in range(kv_heads)]
        own = np.array([[b in reads[h * kv_heads // heads] for b in range(blocks)]
                        for h in range(heads)])
        sought = [(h, b) for h, b in enumerate(needles) if b is not None]
        shares = sums.sum(axis=(0, 1), dtype=np.float64)
        return {
            "source": source, "rule": rule, "threshold": threshold, "padding": padding,
            "prompt": prompt, "layer": layer, "chunk": chunk, "kv_heads": kv_heads, "rows": rows,
            "n_blocks": blocks, "ballots": ballots, "votes": ballots.mean(axis=(0, 1)),
            "mass": shares / shares.sum(), "lists": lists,
            "reasons": [[REASONS[c] for c in codes] for codes in joined.trace.reasons],
            "needles": needles, "sought": sought,
            "lost": [(h, b) for h, b in sought if b not in reads[h]],
            "mask_density": float(masks.mean()),
            "read_density": float(np.mean([len(r) for r in reads]) / blocks),
            "kept_mass": float((sums * own[:, None]).sum() / sums.sum()),
        }

    def react(self) -> None:
        if self.params["source"] == MODEL:
            self._busy("the shipped model reads the prompt")
        self._refresh()

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def block_sums(q: np.ndarray, k: np.ndarray, block_size: int, real_q_len: int | None = None
               ) -> np.ndarray:
    """The estimated mass of every block of history, for a chunk of queries, as the policy does."""
    scores = flat_group_gemm_fuse_reshape(q, k, STRIDE)
    return softmax_fuse_block_sum(
        scores, block_size // STRIDE, scale=base_2_scale(STRIDE, q.shape[2]), is_causal=False,
        real_q_len=None if real_q_len is None else -(-real_q_len // STRIDE))


@lru_cache(maxsize=8)
def _planted_chunk(source: str, padding: str) -> Chunk:
    case = planted(source)
    real = case.real_rows if padding == "left out" else None
    return Chunk(block_sums(case.q, case.k, case.block_size, real), case.needles)


@lru_cache(maxsize=32)
def _model_chunk(record: LayerMasses, value: int, layer: int, chunk: int) -> Chunk:
    q, k, _ = record.layers[layer]
    sums = block_sums(as_float32(q[:, -chunk:], "q", 3), as_float32(k[:, :-chunk], "k", 3),
                      MODEL_BLOCK)
    return Chunk(sums, (value // MODEL_BLOCK,) * len(k))


def where(r: dict[str, Any]) -> str:
    """What was voted on."""
    if r["source"] == MODEL:
        return (f"{r['source']}, prompt {r['prompt']}, layer {r['layer']}, the last "
                f"{r['chunk']} tokens")
    padding = f", padding {r['padding']}" if r["source"] == "padded chunk" else ""
    return r["source"] + padding


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    pairs = r["kv_heads"] * r["rows"]
    lines = [
        f"{where(r)}; τ = {r['threshold']:g}, rule {r['rule']}",
        f"{plural(pairs, 'ballot')} of {r['kv_heads']} KV heads × "
        f"{plural(r['rows'], 'query block')}, {r['n_blocks']} blocks of history; "
        f"a query head keeps {percent(r['mask_density'])}",
    ]
    cast = (r["ballots"].sum(axis=(0, 1))).tolist()
    lines.append("votes  " + " ".join(f"{b}:{v}" for b, v in enumerate(cast)))
    if r["rule"] == "mean_score":
        lines.append("mass   " + " ".join(f"{b}:{100 * m:.0f}%" for b, m in enumerate(r["mass"])))
    for at, (ids, reasons) in enumerate(zip(r["lists"], r["reasons"], strict=True)):
        name = "all KV heads read" if len(r["lists"]) == 1 else f"KV head {at} reads"
        lines.append(f"{name} " + " ".join(f"{b}{PREFILL[reasons[b]].letter}" for b in ids))
    lines.append(f"read {percent(r['read_density'])} of the blocks, "
                 f"{percent(r['kept_mass'])} of the estimated mass")
    for head, block in r["sought"]:
        lost = (head, block) in r["lost"]
        lines.append(f"KV head {head} looks for block {block}, which has {cast[block]} of {pairs} "
                     f"votes: {'LOST' if lost else 'read'}")
    return "\n".join(lines)
