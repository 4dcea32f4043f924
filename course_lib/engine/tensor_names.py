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

    Stored are both tensors of a layer as `[experts, out, in]` (transformers), or both as
    `[experts, in, out]` (Qwen3-VL-MoE as published). A square one may be either: the other tells.
    (transformers 5.24 takes a square one for the former even then; no published model has one.)
    """
    layer = tensor.removesuffix(GATE_UP).removesuffix(DOWN)
    shapes = [stored[key].shape if key in stored else ()
              for key in (layer + GATE_UP, layer + DOWN, layer + "mlp.gate.weight")]
    if [len(shape) for shape in shapes] != [3, 3, 2]:
        return None
    gate_up, down, (_, hidden) = shapes
    transposed = not gate_up[2] == down[1] == hidden
    if transposed:
        gate_up, down = (gate_up[0], gate_up[2], gate_up[1]), (down[0], down[2], down[1])
    experts, inner = down[0], down[2]
    if gate_up != (experts, 2 * inner, hidden) or down != (experts, hidden, inner):
        return None
    if not (0 < experts <= MOST_EXPERTS and inner and hidden):
        return None
    projections = ("gate_proj", "up_proj") if name.endswith(GATE_UP) else ("down_proj",)
    height, columns = (inner, hidden) if name.endswith(GATE_UP) else (hidden, inner)
    rows = height * len(projections)
    step = height if transposed else height * columns
    prefix = name.removesuffix(GATE_UP).removesuffix(DOWN) + "mlp.experts."
    return {
        f"{prefix}{expert}.{projection}.weight":
            Part(tensor, (height, columns), expert * rows * columns + i * step,
                 rows if transposed else None)
        for expert in range(experts)
        for i, projection in enumerate(projections)
    }
