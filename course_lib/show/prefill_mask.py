"""What a prefill policy keeps: the block mask of one layer and head of the shipped model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from course_lib.engine import Engine
from course_lib.lab.block_mass import LayerMasses, layer_masses
from course_lib.lab.policy_masks import HeadMask, full_mask, quest_masks, xattn_masks
from course_lib.lab.policy_needle import answer_begun, place_of
from course_lib.lab.prompts import NeedlePrompt
from course_lib.show.controls import dropdown, number, steps
from course_lib.show.explorer import Explorer
from course_lib.show.models import shipped_engine
from course_lib.show.prefill_mask_picture import PrefillMaskPicture
from course_lib.show.style import PREFILL
from course_lib.show.text import percent

POLICIES = ("full", "quest", "xattn")
THRESHOLDS = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0)
SHARES = (0.125, 0.25, 0.5, 0.75)
STRIDES = (4, 8, 16, 32)
BLOCK_SIZES = (32, 64, 128)
COMPATS = ("exact", "upstream")
KEYS = ("f32", "int8")
PROMPTS = 4
LARGEST = 4  # blocks of the last row that the text tells about


class PrefillMaskExplorer(Explorer):
    """Which blocks each query block of one head keeps, and what exact attention says about it.

    engine: default the shipped model. prompts: default the first four of the recorded run
    prefill_policies, TOKENS long, which end with the beginning of the answer: their last query
    looks for the needle's value. The other arguments are where the controls start. layer and
    head left out: the ones whose last query looks at the needle most. threshold, stride, compat and
    keys (of the estimate) are xattn's, share is Quest's.
    """

    alt = ("two squares of blocks, queries downwards and keys to the right: exact attention's "
           "weight as grey, and the policy's mask with a letter for why a block is kept")
    drawing = PrefillMaskPicture
    question = ("Which cells will a threshold keep in every row, whatever the head looks at? And "
                "will the last row keep the needle's block?")

    def __init__(
        self, engine: Engine | None = None, *, prompts: Sequence[NeedlePrompt] | None = None,
        tokens: int = 2048, prompt: int = 0, layer: int | None = None, head: int | None = None,
        policy: str = "xattn", threshold: float = 0.9, share: float = 0.5, stride: int = 8,
        block_size: int = 64, compat: str = "exact", keys: str = "f32",
    ) -> None:
        self.engine = engine or shipped_engine()
        self.prompts = tuple(prompts) if prompts is not None else asking_prompts(
            self.engine, tokens)
        names = {f"{i}: {p.fact.name}'s {p.fact.attribute}": i
                 for i, p in enumerate(self.prompts)}
        choose = dropdown("prompt", names, prompt, "which needle is hidden in the notes")
        layer, head = self._place(prompt, layer, head)
        config = self.engine.config
        super().__init__({
            "prompt": choose,
            "layer": number("layer", config.num_hidden_layers - 1, layer, "layer of the model"),
            "head": number("query head", config.num_attention_heads - 1, head,
                           "every query head has its own mask"),
            "policy": dropdown("policy", POLICIES, policy, "who chooses the blocks"),
            "threshold": steps("threshold τ", THRESHOLDS, threshold,
                               "xattn: the share of estimated mass to keep"),
            "stride": steps("stride", STRIDES, stride, "xattn: one score in so many is computed"),
            "share": steps("share", SHARES, share, "quest: the share of blocks to read"),
            "block_size": steps("block", BLOCK_SIZES, block_size, "tokens of a block"),
            "compat": dropdown("rules", COMPATS, compat, "xattn: the rule, or the original's code"),
            "keys": dropdown("keys", KEYS, keys, "xattn: what the estimate reads"),
        })

    def record(self, prompt: int) -> LayerMasses:
        """The exact prefill of a prompt; shared with other explorers of this engine."""
        return layer_masses(self.engine, self.prompts[prompt])

    def _place(self, prompt: int, layer: int | None, head: int | None) -> tuple[int, int]:
        """The head that looks for the needle, where none is given."""
        asking = self.record(prompt).asking_head(self.prompts[prompt].value_span[0], 64)
        return asking[0] if layer is None else layer, asking[1] if head is None else head

    def compute(
        self, prompt: int = 0, layer: int | None = None, head: int | None = None,
        policy: str = "xattn", threshold: float = 0.9, share: float = 0.5, stride: int = 8,
        block_size: int = 64, compat: str = "exact", keys: str = "f32",
    ) -> dict[str, Any]:
        """The mask of one head beside exact attention; defaults as the class's.

        mass: exact attention's share of each row, float64 [blocks, blocks]; weight: the rows'
        numbers of queries; mask, reason, estimate as HeadMask.
        """
        record = self.record(prompt)
        layer, head = self._place(prompt, layer, head)
        totals = record.block_mass(layer, block_size)[head]
        weight = totals.sum(axis=1)
        mass = totals / weight[:, None]
        if policy == "full":
            made = full_mask(len(mass))
        elif policy == "quest":
            made = _quest(record, layer, block_size, share)[head]
        else:
            made = _xattn(record, layer, block_size, threshold, stride, compat, keys)[head]
        asked = self.prompts[prompt]
        first, end = asked.value_span
        needles = list(range(first // block_size, (end - 1) // block_size + 1))
        return {
            "prompt": prompt, "question": asked.question, "needle": asked.fact.sentence,
            "n": len(asked.ids), "layer": layer, "head": head, "policy": policy,
            "threshold": threshold, "share": share, "stride": stride, "block_size": block_size,
            "compat": compat, "keys": keys, "n_blocks": len(mass), "mask": made.mask,
            "reason": made.reason, "estimate": made.estimate, "mass": mass, "weight": weight,
            "density": made.density, "kept": made.kept(totals), "needle_blocks": needles,
            "needle_block": needles[0],
            "asking": float(record.last_query_mass(layer, block_size)[head, needles[0]]),
            "needle_mass": float(mass[-1, needles[0]]),
            "needle_kept": bool(made.mask[-1, needles[0]]),
            "last_row_kept": float((mass[-1] * made.mask[-1]).sum()),
        }

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


@lru_cache(maxsize=4)
def asking_prompts(engine: Engine, tokens: int) -> tuple[NeedlePrompt, ...]:
    """Prompts 0 to 3 of the recorded run prefill_policies, at any length."""
    return tuple(answer_begun(engine, f"1-{i}", tokens, place_of(i)) for i in range(PROMPTS))


@lru_cache(maxsize=16)
def _quest(record: LayerMasses, layer: int, block_size: int, share: float) -> list[HeadMask]:
    return quest_masks(record.layers[layer], block_size=block_size, share=share)


@lru_cache(maxsize=64)
def _xattn(record: LayerMasses, layer: int, block_size: int, threshold: float, stride: int,
           compat: str, keys: str) -> list[HeadMask]:
    return xattn_masks(record.layers[layer], block_size=block_size, threshold=threshold,
                       stride=stride, compat=compat, keys=keys)


def policy_words(r: dict[str, Any]) -> str:
    """The policy with what it takes."""
    if r["policy"] == "full":
        return "full"
    if r["policy"] == "quest":
        return f"quest, share {r['share']:g}"
    return (f"xattn, τ = {r['threshold']:g}, stride {r['stride']}"
            + (", upstream rules" if r["compat"] == "upstream" else "")
            + (", int8 keys" if r["keys"] == "int8" else ""))


def counts(r: dict[str, Any]) -> dict[str, int]:
    """How many cells each reason has, in the order of PREFILL."""
    found = {name: int((r["reason"] == name).sum()) for name in PREFILL}
    return {name: count for name, count in found.items() if count}


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    row, needle = r["n_blocks"] - 1, r["needle_block"]
    letters = "  ".join(f"{PREFILL[name].letter} {PREFILL[name].label} {count}"
                        for name, count in counts(r).items())
    lines = [
        f"{r['question']}  {r['n']} tokens in {r['n_blocks']} blocks of {r['block_size']}; needle "
        f"{r['needle']!r} in block {needle}",
        f"{policy_words(r)}; layer {r['layer']}, query head {r['head']}",
        letters,
        f"mask density {percent(r['density'])}; exact attention's weight: {percent(r['kept'])} "
        f"kept, {percent(1 - r['kept'])} lost",
        f"the last query gives {percent(r['asking'])} of its weight to the needle's block; the "
        f"last row of {r['weight'][row]:.0f} queries {percent(r['needle_mass'])}: "
        f"{'kept' if r['needle_kept'] else 'LOST'}",
        f"the largest blocks of the last row, of which {percent(r['last_row_kept'])} is kept:",
    ]
    for block in np.argsort(-r["mass"][row], kind="stable")[:LARGEST].tolist():
        guess = "" if r["estimate"] is None else f", estimated {percent(r['estimate'][row, block])}"
        lines.append(f"  block {block:2d}: exact {percent(r['mass'][row, block])}{guess}, "
                     f"{PREFILL[r['reason'][row, block]].label}")
    return "\n".join(lines)
