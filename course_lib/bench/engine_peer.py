"""Getting llama.cpp ready: the file, the library, and whether it computes the same model."""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from course_lib.bench.engine_cases import Ids, Peer
from course_lib.bench.engine_gguf import write_gguf
from course_lib.bench.engine_llama import BATCH, KV_TYPES, LlamaModel
from course_lib.bench.engine_weights import KIND, RandomSource
from course_lib.engine.config import ModelConfig
from course_lib.engine.conversion import weight_bytes
from course_lib.engine.model import Model
from course_lib.engine.prefill import run_prompt
from course_lib.errors import CourseError

ROOM = 512
"""Tokens beyond the deepest task: those that are generated, and the last copy of the prompt."""

HEADER = 2**20  # bytes of a file beside its weights, at most

SAME_MODEL = 0.98
"""Least correlation of both engines' logits. Both round activations to 8 bits and KV rows to their
own type, so they are alike and not equal; with a wrong RoPE or norm nothing remains of it."""


@contextmanager
def llama_peer(source: RandomSource, model: Model, tokens: int, threads: int,
               on_progress: Callable[[int, int], object]) -> Iterator[tuple[Peer, float]]:
    """llama.cpp with the weights of `source` and room for `tokens`, and how alike its logits are.

    Yields the peer and the correlation of logits after a few tokens. CourseError for a full disk,
    and where the engines do not compute the same.
    """
    with loaded(source, model.config, on_progress) as llama:
        peer = Peer({kv: llama.context(kv, tokens + ROOM, model.config.vocab_size)
                     for kv in KV_TYPES})
        for context in peer.contexts.values():
            context.set_threads(threads)
        alike = agreement(peer, model)
        prompt = Ids(model.config).prompt(min(BATCH, tokens))
        for context in peer.contexts.values():
            context.clear()
            context.decode(prompt)
            context.keep_prompt(len(prompt))
        yield peer, alike


def loaded(source: RandomSource, config: ModelConfig,
           on_progress: Callable[[int, int], object]) -> LlamaModel:
    """The weights of `source` in llama.cpp, through a file that is gone when this returns: what is
    mapped stays until it is given back, so a run that is killed leaves nothing behind."""
    with ended_by_signals(), tempfile.TemporaryDirectory(prefix="course-bench-") as folder:
        path = Path(folder) / "random.gguf"
        need, free = weight_bytes(config, KIND) + HEADER, shutil.disk_usage(folder).free
        if need > free:
            raise CourseError(f"bench: --peer needs {need / 1e6:.0f} MB in {tempfile.gettempdir()}"
                              f", {free / 1e6:.0f} are free; free some, or name another folder in "
                              "TMPDIR.")
        try:
            write_gguf(path, source, config, on_progress)
        except OSError as error:
            raise CourseError(f"bench: {path} was not written ({error.strerror or error}); name "
                              "another folder in TMPDIR.") from None
        return LlamaModel(path)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let `kill` and a closed terminal end the program as an exit does, so that what must be
    removed is."""
    signals = (signal.SIGTERM, signal.SIGHUP)
    before = {s: signal.signal(s, lambda number, _: sys.exit(128 + number)) for s in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def agreement(peer: Peer, model: Model) -> float:
    """The least correlation of both engines' logits after eight tokens, over the kinds of rows;
    CourseError where it is small."""
    prompt = Ids(model.config).prompt(8)
    found = []
    for context, kv in zip(peer.contexts.values(), ("f32", "q8"), strict=True):
        _, hidden = run_prompt(model, prompt, kv=kv)
        context.clear()
        context.decode(prompt)
        found.append(float(np.corrcoef(model.logits(hidden[-1]), context.logits())[0, 1]))
    if not min(found) >= SAME_MODEL:
        raise CourseError(f"bench: llama.cpp does not compute the same model (its logits correlate "
                          f"{min(found):.3f} with the course's); install another version of "
                          "llama-cpp-python, or leave --peer out.")
    return min(found)
