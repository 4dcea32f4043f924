"""What fits in memory: bytes of a model's weights, KV cache and scratch, from its config alone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from course_lib import memory
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import PIECE, weight_bytes
from course_lib.engine.model import TILE
from course_lib.engine.weight_cache import SMALL
from course_lib.engine.weights import WEIGHT_KINDS, slots_of
from course_lib.errors import CourseError
from course_lib.kvcache import kv_bytes_per_token
from course_lib.memory import gigabytes
from course_lib.weight_blocks import BLOCK

CONTEXT = 4096
PROGRAM = 100_000_000  # Python, NumPy and a tokenizer: measured 60 to 100 MB


class Need(NamedTuple):
    """Bytes of one way to run a model. `loading` is what packing needs beside the weights."""

    weights: int
    cache: int
    scratch: int
    loading: int

    @property
    def running(self) -> int:
        """Bytes while it runs, the program's own included."""
        return PROGRAM + self.weights + self.cache + self.scratch


def need(config: ModelConfig, kind: str, kv: str, context: int) -> Need:
    """What a model takes with weights of a kind and a context of so many tokens.

    kind: one of WEIGHT_KINDS; kv: "f32" or "q8".
    """
    return Need(weight_bytes(config, kind), cache_bytes(config, kv, context),
                scratch_bytes(config, kv, context), loading_bytes(config))


def cache_bytes(config: ModelConfig, kv: str, context: int) -> int:
    """Bytes of the KV cache of all layers, blocks allocated in advance included; of a q8 cache also
    the K rows that sparse decode keeps a second time, 8 of 32."""
    blocks = -(-context * 9 // 8 // BLOCK)  # it grows by an eighth
    block = BLOCK * kv_bytes_per_token(config.num_key_value_heads, config.head_dim, kv)
    if kv == "q8":
        block += 8 * config.num_key_value_heads * (config.head_dim + 4)
    return config.num_hidden_layers * blocks * block


def scratch_bytes(config: ModelConfig, kv: str, context: int) -> int:
    """Bytes of the arrays that live while a prompt of `context` tokens is read.

    Of all tokens: hidden states, query, key and value rows of two layers, attention's result, sums
    of attention weights, and K and V read back from q8. Of one tile: what goes through the
    matrices.
    """
    d = config.head_dim
    q, rows = config.num_attention_heads * d, config.num_key_value_heads * d
    token = config.hidden_size + 2 * (q + 2 * rows) + q + config.num_attention_heads + 256
    token += 2 * rows if kv == "q8" else 0
    widest = max((slot.shape[0] for slot in slots_of(config) if slot.packed
                  and slot.name.startswith("model.layers")), default=0)
    tile = min(TILE, context) * (2 * widest + 4 * config.hidden_size + q)
    return 4 * (context * token + tile + 2 * config.vocab_size)


def loading_bytes(config: ModelConfig) -> int:
    """Bytes that reading and packing need beside their result: some rows in several forms."""
    row = max(slot.shape[1] for slot in slots_of(config) if slot.packed)
    return 16 * max(PIECE, 16 * row)


def kinds_of(config: ModelConfig) -> tuple[str, ...]:
    """The kinds of weights that this model can have: packed ones need rows of whole blocks."""
    whole = all(slot.shape[1] % BLOCK == 0 for slot in slots_of(config) if slot.packed)
    return WEIGHT_KINDS if whole else ("f32",)


def longest_context(config: ModelConfig, kind: str, kv: str, free: int) -> int:
    """The longest context that fits in `free` bytes, at most the model's own; 0 if none does."""
    low, high = 0, config.max_position_embeddings
    while low < high:
        middle = (low + high + 1) // 2
        if need(config, kind, kv, middle).running <= free:
            low = middle
        else:
            high = middle - 1
    return low


def verdict(config: ModelConfig, context: int, free: int | None) -> tuple[bool, str]:
    """Whether some way to run the model with `context` tokens fits in `free` bytes, and a line that
    says which one to take or what is missing."""
    kinds = kinds_of(config)
    ways = [(kind, kv) for kind in ("q8_0", "q4_0", "f32") if kind in kinds for kv in ("q8", "f32")]
    if weight_bytes(config, "f32") < SMALL:
        ways.insert(0, ("f32", "f32"))
    if free is None:
        kind, kv = ways[0]
        return True, f"how much memory is free is not known here: take --weights {kind} --kv {kv}"
    needs = {way: need(config, way[0], way[1], context).running for way in ways}
    for (kind, kv), least in needs.items():
        if least <= free:
            return True, f"fits: take --weights {kind} --kv {kv}"
    small = min(needs, key=lambda way: needs[way])
    least = needs[small]
    shorter = longest_context(config, *small, free)
    other = f"take a context of at most {shorter} tokens" if shorter >= BLOCK else (
        "choose a smaller model")
    return False, (
        f"does not fit: --weights {small[0]} --kv {small[1]} needs {gigabytes(least)} with "
        f"{context} tokens, {gigabytes(free)} are free: close other programs, or {other}"
    )


def require_memory(config: ModelConfig, kind: str, path: Path) -> None:
    """CourseError, naming the remedy, unless the weights of the checkpoint at `path` fit in what is
    free now. Packed ones are mapped and could be read again and again from the disk, for every
    token: that is refused too."""
    free = memory.available()
    least = weight_bytes(config, kind) + loading_bytes(config)
    if free is None or least <= free:
        return
    smaller = {other: weight_bytes(config, other) for other in kinds_of(config)}
    fitting = [f"load them as {other} ({gigabytes(size)})" for other, size in smaller.items()
               if size + loading_bytes(config) <= free]
    remedy = " or ".join(fitting[:2]) if fitting else "choose a smaller model"
    raise CourseError(
        f"{path}: weights as {kind} need {gigabytes(least)} of memory, {gigabytes(free)} are "
        f"free: {remedy}, or close other programs"
    )


def require_context(config: ModelConfig, kv: str, tokens: int, *, chunk: int | None = None,
                    offloaded: bool = False) -> None:
    """CourseError unless a context of `tokens` fits beside the weights, which are there already.

    chunk: of a prefill in chunks, which needs the scratch memory of one, and beside the cache the
    float32 rows of all, unless they are offloaded.
    """
    free = memory.available()
    at_once = tokens if chunk is None else min(tokens, chunk)
    least = cache_bytes(config, kv, tokens) + scratch_bytes(config, kv, at_once)
    if chunk is not None and not offloaded:
        least += cache_bytes(config, "f32", tokens)
    if free is not None and least > free:
        kinder = "use --kv q8 or a shorter context" if kv == "f32" else "use a shorter context"
        raise CourseError(
            f"a context of {tokens} tokens with kv {kv} needs {gigabytes(least)} of memory, "
            f"{gigabytes(free)} are free: {kinder}, or close other programs"
        )
