"""What is timed of the engine: a prompt, and a token after many others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from course_lib.arrays import F32
from course_lib.bench.attention_cases import distinct_tokens
from course_lib.bench.engine_llama import KV_TYPES, LlamaContext
from course_lib.bench.engine_weights import token_bytes
from course_lib.decode_gate import AUTOMATIC_BLOCKS
from course_lib.engine.checks import AUTO
from course_lib.engine.config import ModelConfig
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from course_lib.engine.session import Session
from course_lib.kvcache import CACHE_DTYPES, KVCache, kv_bytes_per_token
from course_lib.sparse import sparse_decode_gate

BLOCK_SIZE, N_PROBE = 32, 8
Q8_0_BYTES = 34 / 32  # of a value in llama.cpp's q8_0 rows


@dataclass(frozen=True)
class Arm:
    """One of the ways that take turns. `call` computes a prompt or one more token; `read_bytes`: of
    weights and KV rows that a token must read, None for a prompt."""

    engine: str
    kv: str
    sparse_k: int | str | None
    call: Callable[[], object]
    read_bytes: float | None = None


@dataclass(frozen=True)
class Task:
    """A row of every arm: phase "pp" or "tg", tokens of a call, tokens that are there before."""

    phase: str
    n: int
    depth: int

    @property
    def title(self) -> str:
        """How messages name it."""
        return f"prompt {self.n:,}" if self.phase == "pp" else f"token at {self.depth:,}"


@dataclass(frozen=True)
class Peer:
    """llama.cpp's conversations, one of each kind of KV rows, each with a prompt to fill from."""

    contexts: dict[str, LlamaContext]


class Ids:
    """Token ids that are the same in every run."""

    def __init__(self, config: ModelConfig, seed: int = 20) -> None:
        self._rng = np.random.default_rng(seed)
        self._vocab_size = config.vocab_size

    def prompt(self, n: int) -> list[int]:
        """n of them."""
        return self._rng.integers(0, self._vocab_size, n).tolist()


def arms_of(task: Task, model: Model, peer: Peer | None) -> list[Arm]:
    """The arms of a task; they hold its KV caches."""
    ids = Ids(model.config)
    if task.phase == "pp":
        prompt = ids.prompt(task.n)
        arms = [Arm("course", kv, None, prompt_call(model, prompt, kv)) for kv in CACHE_DTYPES]
        if peer is not None:
            arms += [Arm("llama", kv, None, llama_prompt(peer.contexts[kv], prompt))
                     for kv in KV_TYPES]
    else:
        arms = [arm for kv in CACHE_DTYPES for arm in token_arms(task.depth, model, kv, ids)]
        if peer is not None:
            arms += [llama_token(task.depth, model.config, kv, peer.contexts[kv], ids)
                     for kv in KV_TYPES]
    return arms


def prompt_call(model: Model, prompt: list[int], kv: str) -> Callable[[], object]:
    """Exact prefill into an empty cache, and the logits after the last token; nothing is recorded
    of the attention weights, which llama.cpp does not do either."""
    def call() -> None:
        _, hidden = run_prompt(model, prompt, kv=kv)
        model.logits(hidden[-1])

    return call


def token_arms(depth: int, model: Model, kv: str, ids: Ids) -> list[Arm]:
    """A token with all rows, with chosen blocks, and as the engine decides.

    The ways share a conversation, so each token comes after those of the others: the context grows
    by some dozens while it is measured. Where blocks are not chosen anyway there is one way.
    """
    session = random_session(depth, model, kv)
    ways: tuple[int | str | None, ...] = (None, AUTOMATIC_BLOCKS, AUTO)
    if not sparse_decode_gate(depth, AUTOMATIC_BLOCKS, BLOCK_SIZE):
        ways = (None,)

    def arm(way: int | str | None) -> Arm:
        def call() -> None:
            session.step(ids.prompt(1)[0], decode_k=way)

        read = token_bytes(model.config) + kv_bytes_read(session, way, ids.prompt(1)[0])
        return Arm("course", kv, way, call, read)

    return [arm(way) for way in ways]


def random_session(depth: int, model: Model, kv: str) -> Session:
    """A conversation after `depth` tokens whose rows are random, not computed.

    Time does not depend on what rows say, but for the blocks that query heads choose: of random
    rows no two heads choose the same, which is the most to read.
    """
    config = model.config
    cache = KVCache(config.num_hidden_layers, config.num_key_value_heads, config.head_dim,
                    dtype=kv, block_size=BLOCK_SIZE)
    session = Session(model, cache, BLOCK_SIZE)
    if depth:
        rng = np.random.default_rng(20)
        shape = (2, config.num_key_value_heads, depth, config.head_dim)
        k, v = rng.standard_normal(shape, F32)
        for layer in range(config.num_hidden_layers):
            cache.append(layer, k, v)
        session.importance = rng.uniform(0, 1, depth).astype(F32)
    return session


def kv_bytes_read(session: Session, way: int | str | None, token: int) -> float:
    """Bytes of KV rows that the next token reads, found by feeding `token`: those of all rows, or
    of the rows that are probed and of the blocks that are chosen, those of two query heads of a KV
    head once."""
    cache = session.cache
    trace: list = []
    session.step(token, decode_k=way, trace=trace)
    row = kv_bytes_per_token(1, cache.head_dim, cache.dtype)
    total = 0.0
    for chosen in trace[0]:
        if not chosen:
            total += len(session) * row * cache.num_kv_heads
            continue
        probed = len(session) // BLOCK_SIZE * N_PROBE * cache.num_kv_heads
        ids = np.stack([selection.ids for selection in chosen])
        total += row * (probed / 2 + distinct_tokens(ids, cache.num_kv_heads))
    return total


def llama_prompt(context: LlamaContext, prompt: list[int]) -> Callable[[], object]:
    """A prompt into an empty cache, and the logits after its last token."""
    def call() -> None:
        context.clear()
        context.decode(prompt)
        context.logits()

    return call


def llama_token(depth: int, config: ModelConfig, kv: str, context: LlamaContext, ids: Ids) -> Arm:
    """One more token; llama.cpp reads all rows."""
    context.fill(depth)

    def call() -> None:
        context.decode(ids.prompt(1))
        context.logits()

    value = 2 if kv == "f16" else Q8_0_BYTES
    rows = 2 * config.num_hidden_layers * config.num_key_value_heads * depth
    read = token_bytes(config) + rows * config.head_dim * value
    return Arm("llama", kv, None, call, read)
