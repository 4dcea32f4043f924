"""llama.cpp beside the engine, by the binding of its C library in `llama-cpp-python`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from course_lib.errors import CourseError

BATCH = 512
"""Tokens that llama.cpp computes at once, its own default; between two batches Ctrl-C is heard."""

KV_TYPES = ("f16", "q8_0")
"""Its KV caches that stand beside ours of "f32" and "q8"."""


class LlamaModel:
    """A GGUF file in llama.cpp's memory; a context manager that gives the memory back."""

    def __init__(self, path: Path) -> None:
        self._api = llama_cpp = import_module("llama_cpp")
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._model:
            raise CourseError(f"bench: llama.cpp does not load {path}; install another version of "
                              "llama-cpp-python, or leave --peer out.")
        self.contexts: list[LlamaContext] = []

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, *error: object) -> None:
        for context in self.contexts:
            context.close()
        self._api.llama_model_free(self._model)

    def context(self, kv: str, tokens: int, vocab_size: int) -> LlamaContext:
        """A KV cache of "f16" or "q8_0" rows with room for `tokens`."""
        made = LlamaContext(self._api, self._model, kv, tokens, vocab_size)
        self.contexts.append(made)
        return made


class LlamaContext:
    """One conversation of llama.cpp: its KV cache, and what computes with it.

    Flash attention is llama.cpp's own choice for f16 rows and must be on for q8_0 ones.
    """

    def __init__(self, api: Any, model: Any, kv: str, tokens: int, vocab_size: int) -> None:
        self._api, self._vocab_size = api, vocab_size
        self._prompt: tuple[ctypes.Array, int] | None = None
        parameters = api.llama_context_default_params()
        parameters.n_ctx = tokens
        parameters.n_batch = parameters.n_ubatch = BATCH
        parameters.n_seq_max, parameters.kv_unified = 2, True  # the second sequence is for `fill`
        parameters.type_k = parameters.type_v = (
            api.GGML_TYPE_F16 if kv == "f16" else api.GGML_TYPE_Q8_0)
        parameters.flash_attn_type = (api.LLAMA_FLASH_ATTN_TYPE_AUTO if kv == "f16"
                                      else api.LLAMA_FLASH_ATTN_TYPE_ENABLED)
        self._context = api.llama_init_from_model(model, parameters)
        if not self._context:
            raise CourseError(f"bench: llama.cpp makes no KV cache of {tokens} tokens in {kv}; "
                              "close other programs, or leave --peer out.")
        self._memory = api.llama_get_memory(self._context)

    def close(self) -> None:
        """Give the cache back."""
        if self._context:
            self._api.llama_free(self._context)
            self._context = None

    def set_threads(self, count: int) -> None:
        """Use `count` threads, for a prompt as for a token."""
        self._api.llama_set_n_threads(self._context, count, count)

    def clear(self) -> None:
        """Forget all tokens."""
        self._api.llama_memory_clear(self._memory, False)

    def decode(self, ids: Sequence[int]) -> None:
        """Feed tokens after those that are there; the logits of the last are computed."""
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            tokens = (ctypes.c_int32 * len(part))(*part)
            batch = self._api.llama_batch_get_one(tokens, len(part))
            failed = self._api.llama_decode(self._context, batch)
            if failed:
                raise CourseError(f"bench: llama.cpp cannot compute {len(part)} tokens (its code "
                                  f"{failed}); close other programs, or leave --peer out.")

    def logits(self) -> np.ndarray:
        """A copy of the logits of the last token, float32 `[vocab]`."""
        found = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(found, (self._vocab_size,)).copy()

    def keep_prompt(self, tokens: int) -> None:
        """Remember the rows of the `tokens` tokens that are there now, for `fill`."""
        size = self._api.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        if self._api.llama_state_seq_get_data(self._context, state, size, 0) != size:
            raise CourseError("bench: llama.cpp does not hand out its KV rows; leave --peer out.")
        self._prompt = state, tokens

    def fill(self, depth: int) -> None:
        """Hold `depth` tokens: the remembered prompt's rows again and again, each time turned to
        later positions. What the rows say changes no time; how many they are does."""
        self.clear()
        if depth == 0:
            return
        assert self._prompt is not None, "keep_prompt comes before fill"
        state, tokens = self._prompt
        api, memory = self._api, self._memory
        for start in range(0, depth, tokens):
            if not api.llama_state_seq_set_data(self._context, state, len(state), 1):
                raise CourseError("bench: llama.cpp does not take its KV rows back; leave --peer "
                                  "out.")
            api.llama_memory_seq_add(memory, 1, -1, -1, start)
            api.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            api.llama_memory_seq_rm(memory, 1, -1, -1)
        api.llama_memory_seq_rm(memory, 0, depth, -1)
