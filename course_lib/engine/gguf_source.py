"""Tensors of a GGUF file, under Hugging Face's names and in Hugging Face's order of rows."""

from __future__ import annotations

import hashlib
import math
import re
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from course_lib.engine.config_keys import shown
from course_lib.engine.files import require_file
from course_lib.engine.fingerprint import add_sample
from course_lib.engine.gguf_header import REMEDY, GgufTensor, read_header
from course_lib.engine.gguf_types import values
from course_lib.engine.tensor_source import Stored, check_rows
from course_lib.errors import CourseError
from course_lib.weight_blocks import BLOCK_BYTES, Kind

PIECE = 1 << 18
"""Numbers that are converted at once, so that a read needs little memory besides its result."""

WHOLE_MODEL = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
IN_A_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
}
ROPE_DIVISORS = "rope_freqs.weight"
OF_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}


class _Part(NamedTuple):
    """A matrix in the file: rows `begin` … of `tensor`. `heads` is not 0 where each head's rows
    lie in the order of neighbour pairs."""

    tensor: GgufTensor
    shape: tuple[int, ...]
    begin: int
    heads: int

    @property
    def rows(self) -> int:
        """A vector is one row."""
        return math.prod(self.shape[:-1])


class GgufSource:
    """The TensorSource of a GGUF file; F32, F16, BF16, Q8_0, Q4_0 and Q4_1 tensors are read.

    The file is opened once, and rows are copied from it in pieces, not mapped: a file that another
    program cuts short gives an error, not a bus error. Raises CourseError naming the file, the
    tensor and the remedy where something is absent, damaged, of another type, NaN or infinite.
    `metadata` is what the file says about the model and its tokenizer.
    """

    def __init__(self, path: Path):
        self.path = path
        require_file(path, remedy=REMEDY)
        try:
            self._file = open(path, "rb")
            weakref.finalize(self, self._file.close)
            header = read_header(path, self._file)
        except OSError as error:
            raise self._unreadable(error) from None
        self._lock = threading.Lock()
        self._size, self.metadata = header.size, header.metadata
        parts = header.metadata.get("split.count", 1)
        if parts != 1:
            raise CourseError(f"{path} is one of {shown(parts)} parts of a model: join them with "
                              "llama-gguf-split --merge, or choose a model in one file")
        heads = _paired_heads(header.metadata)
        self._parts: dict[str, _Part] = {}
        self._rope_divisors = header.tensors.pop(ROPE_DIVISORS, None)
        for name, tensor in header.tensors.items():
            for theirs, part in _parts(name, tensor, heads).items():
                if theirs in self._parts:
                    raise CourseError(f"{path} holds the tensor {theirs} twice: {REMEDY}")
                self._parts[theirs] = part
        self.stored = {name: Stored(p.tensor.kind, p.shape) for name, p in self._parts.items()}

    def read(self, name: str) -> np.ndarray:
        part = self._parts[name]
        return self._values(name, part, 0, part.rows).reshape(part.shape)

    def read_rows(self, name: str, first: int, last: int) -> np.ndarray:
        check_rows(self.stored[name], name, first, last)
        return self._values(name, self._parts[name], first, last)

    def blocks(self, name: str, kind: Kind) -> np.ndarray | None:
        part = self._parts[name]
        if part.tensor.kind.lower() != kind or len(part.shape) != 2:
            return None
        raw = self._raw(part, 0, part.rows)
        scales = raw.reshape(-1, BLOCK_BYTES[kind])[:, :2]
        if not np.isfinite(np.ascontiguousarray(scales).view("<f2")).all():
            raise self._not_finite(name)
        return raw

    def rope_divisors(self) -> np.ndarray | None:
        """By what each frequency of RoPE is divided, float32 `[head_dim / 2]`, if the file says."""
        tensor = self._rope_divisors
        if tensor is None:
            return None
        return self._values(ROPE_DIVISORS, _Part(tensor, tensor.shape, 0, 0), 0, 1)[0]

    def fingerprint(self) -> str:
        try:
            with self._lock:
                self._file.seek(0)
                digest = hashlib.sha256(self._file.read(self._size))
                add_sample(digest, self._file)
        except OSError as error:
            raise self._unreadable(error) from None
        return digest.hexdigest()

    def _values(self, name: str, part: _Part, first: int, last: int) -> np.ndarray:
        """Rows of a part, finite float32 `[last - first, columns]`."""
        columns = part.shape[-1]
        result = np.empty((last - first, columns), np.float32)
        step = max(PIECE // columns, 1)
        for begin in range(first, last, step):
            end = min(begin + step, last)
            try:
                piece = values(self._raw(part, begin, end), part.tensor.kind)
            except ValueError:
                raise self._not_finite(name) from None
            if not np.isfinite(piece).all():
                raise self._not_finite(name)
            result[begin - first : end - first] = piece
        return result

    def _raw(self, part: _Part, first: int, last: int) -> np.ndarray:
        """The bytes of rows of a part, uint8 `[last - first, bytes]`, in Hugging Face's order."""
        if not part.heads:
            return self._read(part, first, last)
        d = part.rows // part.heads
        begin, end = first // d * d, -(-last // d) * d  # whole heads
        raw = self._read(part, begin, end)
        # In the file row 2i of a head is row i of its first half, row 2i + 1 row i of its second.
        halves = raw.reshape(-1, d // 2, 2, raw.shape[1]).swapaxes(1, 2)
        return halves.reshape(raw.shape)[first - begin : last - begin]

    def _read(self, part: _Part, first: int, last: int) -> np.ndarray:
        """The bytes of rows as the file has them, uint8 `[last - first, bytes]`."""
        row = part.tensor.nbytes * part.shape[-1] // math.prod(part.tensor.shape)
        raw = np.empty((last - first, row), np.uint8)
        try:
            with self._lock:
                self._file.seek(part.tensor.offset + (part.begin + first) * row)
                got = self._file.readinto(raw.data.cast("B")) if raw.size else 0
        except OSError as error:
            raise self._unreadable(error) from None
        if got < raw.size:
            raise CourseError(f"{self.path} became shorter while it was read: {REMEDY}")
        return raw

    def _not_finite(self, name: str) -> CourseError:
        return CourseError(f"{self.path}: tensor {name} holds NaN or infinity: {REMEDY}")

    def _unreadable(self, error: OSError) -> CourseError:
        return CourseError(f"{self.path} cannot be read ({error.strerror}): {REMEDY}")


def _paired_heads(metadata: dict[str, Any]) -> dict[str, int]:
    """Tensor of a layer -> heads, for those whose rows llama.cpp has put in another order.

    RoPE turns pairs of rows of a head. Hugging Face pairs row i with row i + d/2; for the
    architecture "llama" llama.cpp pairs neighbours, so its converter interleaves the halves. For
    Qwen it pairs halves too and leaves the rows alone.
    """
    if metadata.get("general.architecture") != "llama":
        return {}
    heads = metadata.get("llama.attention.head_count")
    kv_heads = metadata.get("llama.attention.head_count_kv", heads)
    if not isinstance(heads, int) or not isinstance(kv_heads, int):
        return {}  # what reads the config says so
    return {"attn_q": heads, "attn_k": kv_heads}


def _parts(name: str, tensor: GgufTensor, paired: dict[str, int]) -> dict[str, _Part]:
    """Hugging Face's name of a tensor -> what it is; a tensor of all experts is one for each.

    A name that is not known stays, so that it is refused as it is called in the file.
    """
    stem = name.removesuffix(".weight")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem) if stem != name else None
    if layer is None:
        theirs = WHOLE_MODEL.get(stem) if stem != name else None
        return {f"{theirs}.weight" if theirs else name: _Part(tensor, tensor.shape, 0, 0)}
    prefix, kind = f"model.layers.{int(layer[1])}.", layer[2]
    if kind in OF_EXPERTS and len(tensor.shape) == 3:
        experts, rows, columns = tensor.shape
        return {
            f"{prefix}mlp.experts.{e}.{OF_EXPERTS[kind]}.weight":
                _Part(tensor, (rows, columns), e * rows, 0)
            for e in range(experts)
        }
    if kind not in IN_A_LAYER:
        return {name: _Part(tensor, tensor.shape, 0, 0)}
    heads = paired.get(kind, 0)
    if heads and tensor.shape[0] % (2 * heads):
        heads = 0  # a wrong shape: what checks the shapes says so
    return {f"{prefix}{IN_A_LAYER[kind]}.weight": _Part(tensor, tensor.shape, 0, heads)}
