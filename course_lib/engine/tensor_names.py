"""What the tensors of a Hugging Face folder are called, brought to the names of Qwen3 and Llama.

Qwen3-VL keeps its language model under `model.language_model.` and its vision tower, which a text
never passes, under `model.visual.`. A mixture of experts has one matrix per expert
(`mlp.experts.7.gate_proj.weight`), or all of a layer's experts in two tensors. Source: the
checkpoints that transformers 5.24 and Qwen publish and save.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from course_lib.engine.tensor_source import Stored

LANGUAGE_MODEL, VISION_TOWER = "model.language_model.", "model.visual."
FREQUENCIES = ".rotary_emb.inv_freq"  # old Llama checkpoints hold what config.json says anyway
GATE_UP, DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
# Bounds the list of names that a lying shape could ask for; Qwen3 has 128 experts.
MOST_EXPERTS = 4096


class Part(NamedTuple):
    """The numbers of one tensor within a stored one.

    They are the `shape` numbers from number `start` on; or, where `stride` is given, a matrix
    that is stored transposed: its row r is the column r of rows of `stride` numbers.
    """

    tensor: str
    shape: tuple[int, ...]
    start: int = 0
    stride: int | None = None


def parts_of(stored: Mapping[str, Stored]) -> dict[str, Part]:
    """Name as in Qwen3 and Llama -> where its numbers are; one without such a name keeps its own.

    Raises ValueError where two tensors would have one name.
    """
    parts: dict[str, Part] = {}
    nested = any(name.startswith(LANGUAGE_MODEL) for name in stored)
    for tensor in stored:
        if (nested and tensor.startswith(VISION_TOWER)) or tensor.endswith(FREQUENCIES):
            continue
        for name, part in _named(tensor, stored):
            if name in parts:
                raise ValueError(f"{tensor} and {parts[name].tensor} are the same tensor")
            parts[name] = part
    return parts


def _named(tensor: str, stored: Mapping[str, Stored]) -> Iterator[tuple[str, Part]]:
    name = tensor
    if tensor.startswith(LANGUAGE_MODEL):
        name = "model." + tensor.removeprefix(LANGUAGE_MODEL)
    experts = None
    if name.endswith((GATE_UP, DOWN)):
        experts = _experts(tensor, name, stored)
    if experts is None:
        yield name, Part(tensor, stored[tensor].shape)
    else:
        yield from experts.items()


def _experts(tensor: str, name: str, stored: Mapping[str, Stored]) -> dict[str, Part] | None:
    """One part per expert's matrix of a tensor that holds them all; None for a strange shape.

    Stored are `[experts, out, in]` (transformers) or `[experts, in, out]` (Qwen3-VL-MoE as
    published); where both fit it is the former, as transformers reads it.
    """
    shape = stored[tensor].shape
    layer = tensor.removesuffix(GATE_UP).removesuffix(DOWN)
    router = stored.get(layer + "mlp.gate.weight")
    if router is None or len(router.shape) != 2 or len(shape) != 3 or 0 in shape:
        return None
    experts, rows, columns = shape
    hidden = router.shape[1]
    gate_up = name.endswith(GATE_UP)
    transposed = (columns if gate_up else rows) != hidden
    if transposed:
        rows, columns = columns, rows
    if (columns if gate_up else rows) != hidden or experts > MOST_EXPERTS or (gate_up and rows % 2):
        return None
    projections = ("gate_proj", "up_proj") if gate_up else ("down_proj",)
    height = rows // len(projections)
    step = height if transposed else height * columns
    return {
        f"{name.removesuffix(GATE_UP).removesuffix(DOWN)}mlp.experts.{expert}.{projection}.weight":
            Part(tensor, (height, columns), expert * rows * columns + i * step,
                 rows if transposed else None)
        for expert in range(experts)
        for i, projection in enumerate(projections)
    }
