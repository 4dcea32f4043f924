"""One block of a real weight matrix in Q8_0 or Q4_0: values, errors, and every byte of it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from course_lib.engine.checkpoint import open_checkpoint
from course_lib.engine.tensor_source import TensorSource
from course_lib.paths import MODELS
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.text import fmt
from course_lib.show.weight_block_picture import WeightBlockPicture
from course_lib.weight_blocks import (
    BLOCK,
    BLOCK_BYTES,
    Kind,
    dequantize_q4_0,
    dequantize_q8_0,
    quantize_q4_0,
    quantize_q8_0,
    split_blocks,
)

KINDS: dict[str, Kind] = {"Q8_0": "q8_0", "Q4_0": "q4_0"}
MATRICES = {"embedding": "model.embed_tokens.weight",
            "q_proj": "model.layers.{}.self_attn.q_proj.weight",
            "o_proj": "model.layers.{}.self_attn.o_proj.weight",
            "gate_proj": "model.layers.{}.mlp.gate_proj.weight",
            "down_proj": "model.layers.{}.mlp.down_proj.weight"}
OUTLIERS = (1, 2, 4, 8, 16, 32)
LAYERS, BLOCKS = 3, 256  # layers of the shipped model; blocks of a matrix to choose from

_CODEC = {"q8_0": (quantize_q8_0, dequantize_q8_0), "q4_0": (quantize_q4_0, dequantize_q4_0)}


@cache
def shipped_blocks(matrix: str, layer: int) -> np.ndarray:
    """The first BLOCKS blocks of a matrix of the shipped model, float32 [BLOCKS, 32]."""
    return _source().read(MATRICES[matrix].format(layer)).reshape(-1, BLOCK)[:BLOCKS]


@cache
def _source() -> TensorSource:
    return open_checkpoint(MODELS / "needle-qwen3")[1]


def place_of(kind: Kind, element: int) -> tuple[int, str]:
    """The byte of a block that holds an element's code, and which part of it."""
    if kind == "q8_0":
        return 2 + element, "the whole byte"
    return 2 + element % 16, "the high half" if element >= 16 else "the low half"


def measure(x: Any, kind: Kind) -> dict[str, Any]:
    """A block of 32 through `kind`: bytes, d (before and after float16), codes, values, error.

    error = (value − x) / |d| in steps; codes count from −8 for Q4_0. Raises ValueError as the
    quantizers do.
    """
    x = np.asarray(x, np.float32)
    pack, unpack = _CODEC[kind]
    blocks = pack(x[None])
    scales, raw = split_blocks(blocks, kind)
    codes = (raw[0, 0].view(np.int8) if kind == "q8_0"
             else np.concatenate((raw[0, 0] & 15, raw[0, 0] >> 4)).astype(np.int8) - np.int8(8))
    extreme = x[np.abs(x).argmax()]
    d = float(abs(extreme) / np.float32(127) if kind == "q8_0" else extreme / np.float32(-8))
    values = unpack(blocks)[0]
    error = (values.astype(np.float64) - x) / abs(d) if d else np.zeros(BLOCK)
    return {"x": x, "kind": kind, "bytes": blocks[0], "d": d, "d16": float(scales[0, 0]),
            "codes": codes, "values": values, "error": error}


class WeightBlockExplorer(Explorer):
    """One block of 32 weights, packed: choose the format, the matrix, the block and an element.

    kind: "q8_0" or "q4_0"; matrix: a key of MATRICES; layer, block: which of the shipped model's;
    outlier: one of OUTLIERS, multiplies the block's largest weight; element: whose code is marked
    among the bytes.
    """

    question = ("Where is the code of element 20, in Q8_0 and in Q4_0? And what happens to the "
                "other 31 weights when the largest one grows?")
    alt = "the weights of one block and what is read back, their errors in steps, and its bytes"
    drawing = WeightBlockPicture

    def __init__(self, *, kind: str = "q8_0", matrix: str = "gate_proj", layer: int = 0,
                 block: int = 0, outlier: int = 1, element: int = 0) -> None:
        super().__init__({
            "kind": dropdown("format", KINDS, kind, "8 or 4 bits a code"),
            "matrix": dropdown("matrix", tuple(MATRICES), matrix, "where the weights come from"),
            "layer": number("layer", LAYERS - 1, layer, "of all matrices but the embedding"),
            "block": number("block", BLOCKS - 1, block, "32 neighbours in a row of the matrix"),
            "outlier": steps("outlier ×", OUTLIERS, outlier,
                             "the largest weight of the block is multiplied by this"),
            "element": number("element", BLOCK - 1, element, "whose code is marked"),
        })
        self.adjust("matrix")

    def compute(self, kind: Kind = "q8_0", matrix: str = "gate_proj", layer: int = 0,
                block: int = 0, outlier: int = 1, element: int = 0) -> dict[str, Any]:
        """The block through `measure`, with the marked element's byte and half of it."""
        x = shipped_blocks(matrix, 0 if matrix == "embedding" else layer)[block].copy()
        x[np.abs(x).argmax()] *= np.float32(outlier)
        byte, half = place_of(kind, element)
        where = "" if matrix == "embedding" else f" of layer {layer}"
        return {**measure(x, kind), "element": element, "byte": byte, "half": half,
                "outlier": outlier, "name": f"{matrix}{where}, block {block}"}

    def adjust(self, name: str) -> None:
        if name == "matrix":
            self.controls["layer"].disabled = self.controls["matrix"].value == "embedding"

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    e, size = r["element"], np.abs(r["error"])
    kind = str(r["kind"]).upper()
    stored = r["codes"] + (8 if r["kind"] == "q4_0" else 0)  # as they stand in the bytes
    zero = "8, for 0" if r["kind"] == "q4_0" else "0"
    return "\n".join([
        f"{kind}: {r['name']}; largest weight × {r['outlier']}",
        f"{BLOCK_BYTES[r['kind']]} bytes: " + " ".join(f"{b:02x}" for b in r["bytes"]),
        f"d = {fmt(r['d'])}, as float16 {r['d16']:.6g}",
        "codes: " + " ".join(str(c) for c in stored),
        f"element {e}: {fmt(r['x'][e])} is code {stored[e]} in byte {r['byte']}, {r['half']}; "
        f"read back {fmt(r['values'][e])}, error {r['error'][e] + 0.0:.2f} steps",
        f"error: largest {size.max():.2f} steps, mean magnitude {size.mean():.2f} steps; codes "
        f"that are {zero}: {int((r['codes'] == 0).sum())} of {BLOCK}",
    ])
