"""Needle prompts that prefill itself must answer: what a prefill policy can lose.

A question at the end of a prompt is answered by decode, which reads everything: whatever a prefill
policy left out, decode finds. Here the prompt ends with the beginning of the answer, so that the
next token is the fact's value and the last query of prefill has to find it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from course_lib.engine import Engine, generate_from
from course_lib.lab.prompts import NeedlePrompt, build_needle_prompt
from course_lib.prefill import AGGREGATORS, BlockChoice, PrefillPolicy, make_policy

STRIDE = 8
VALUE_TOKENS = 8  # generated after the beginning: the longest value and the stop


@dataclass(frozen=True)
class PolicyArm:
    """One way to prefill: a policy and what it takes; rule and threshold are xattn's."""

    policy: str
    rule: str = ""
    threshold: float = 0.0
    block_size: int = 64

    @property
    def name(self) -> str:
        """As tables show it."""
        if self.policy != "xattn":
            return self.policy
        return f"{self.rule} {self.threshold:g}" + (
            "" if self.block_size == 64 else f" block {self.block_size}")

    def make(self, chunk: int) -> PrefillPolicy:
        """A new policy, for chunks of so many tokens."""
        if self.policy != "xattn":
            return make_policy(self.policy, block_size=self.block_size)
        return make_policy("xattn", threshold=self.threshold, aggregate=self.rule, stride=STRIDE,
                           block_size=self.block_size, short_query=chunk)


@dataclass(frozen=True)
class PolicyNeedleOptions:
    """tokens: of a prompt, a multiple of chunk, so that the last chunk is not a short one.

    one_row_thresholds: of further arms whose block is the chunk, as in the policy's design
    document: one query block, so that only KV heads vote.
    """

    prompts: int = 56
    tokens: int = 2048
    chunk: int = 256
    seed: int = 1
    rules: tuple[str, ...] = tuple(AGGREGATORS)
    thresholds: tuple[float, ...] = (0.5, 0.8, 0.9)
    one_row_thresholds: tuple[float, ...] = (0.5, 0.8)

    def arms(self) -> list[PolicyArm]:
        """Full, Quest, every rule at every threshold, majority over KV heads alone."""
        arms = [PolicyArm("full"), PolicyArm("quest")]
        arms += [PolicyArm("xattn", rule, t) for rule in self.rules for t in self.thresholds]
        return arms + [PolicyArm("xattn", "majority", t, self.chunk)
                       for t in self.one_row_thresholds]


def answer_begun(engine: Engine, seed: str, tokens: int, position: float = 0.5) -> NeedlePrompt:
    """A needle prompt whose ids, `tokens` together, end with the beginning of the answer.

    A seed's fact does not depend on the length. Raises CourseError as build_needle_prompt.
    """
    fact = build_needle_prompt(engine, seed, tokens=tokens, position=position).fact
    begun = engine.encode(fact.beginning, allow_special=False)
    prompt = build_needle_prompt(engine, seed, tokens=tokens - len(begun), position=position)
    return replace(prompt, ids=(*prompt.ids, *begun))


def place_of(index: int) -> float:
    """Where prompt `index` hides its needle: eight places in turn."""
    return (index % 8 + 0.5) / 8


class Watched(PrefillPolicy):
    """A policy that keeps the last choice of every layer; the numbers are the inner one's."""

    def __init__(self, inner: PrefillPolicy) -> None:
        super().__init__(inner.block_size)
        self.inner, self.name, self.density = inner, inner.name, inner.density
        self.choices: dict[int, BlockChoice] = {}

    def on_block_written(self, layer: int, block: int, k: np.ndarray) -> None:
        self.inner.on_block_written(layer, block, k)

    def select_blocks(self, q_chunk: np.ndarray, store: Any, layer: int) -> BlockChoice:
        self.choices[layer] = self.inner.select_blocks(q_chunk, store, layer)
        return self.choices[layer]

    def reset(self) -> None:
        self.inner.reset()
        self.choices.clear()


def policy_prompt(engine: Engine, options: PolicyNeedleOptions, index: int) -> NeedlePrompt:
    """Prompt `index` of the experiment."""
    return answer_begun(engine, f"{options.seed}-{index}", options.tokens, place_of(index))


def run_arm(engine: Engine, prompt: NeedlePrompt, arm: PolicyArm, chunk: int) -> dict[str, Any]:
    """Prefill by one arm and let decode, which is exact, go on from the value.

    readers: of each layer, the share of KV heads that read the block of the needle's value for the
    last chunk (1 where it lies in the chunk); votes: the share of (KV head, query block) pairs
    that kept it, None where the policy does not vote.
    """
    policy = Watched(arm.make(chunk))
    session = engine.prefill(prompt.ids, policy=policy, chunk=chunk)
    text = engine.decode(generate_from(session, VALUE_TOKENS).ids)
    stats = policy.get_density_stats()
    block = prompt.value_span[0] // arm.block_size
    readers, votes = [], []
    for layer in range(engine.config.num_hidden_layers):
        choice = policy.choices[layer]
        heads = engine.config.num_key_value_heads
        seen = block >= (len(prompt.ids) - chunk) // arm.block_size
        readers.append(fmean(seen or block in choice.of_head(h) for h in range(heads)))
        cast = [t.votes for t in choice.trace if t.block == block]
        votes.append(round(fmean(cast), 4) if cast and not np.isnan(cast).any() else None)
    return {
        "arm": arm.name, "recalled": text.removeprefix(" ").startswith(prompt.fact.value),
        "mask_density": round(stats["mask_density"], 4),
        "applied_density": round(stats["applied_density"], 4),
        "readers": readers, "votes": votes, "value": prompt.fact.value, "text": text,
    }


def policy_needle_records(engine: Engine, options: PolicyNeedleOptions, index: int) -> list[dict]:
    """One record per arm."""
    prompt = policy_prompt(engine, options, index)
    return [{"index": index, "place": place_of(index),
             **run_arm(engine, prompt, arm, options.chunk)} for arm in options.arms()]


def policy_needle_summary(records: list[dict]) -> list[dict]:
    """One row per arm: recall, the two densities, and in how many prompts no layer's last chunk
    read the needle's block."""
    rows = []
    for arm in dict.fromkeys(r["arm"] for r in records):
        of_arm = [r for r in records if r["arm"] == arm]
        rows.append({
            "arm": arm, "prompts": len(of_arm),
            "recall": round(fmean(r["recalled"] for r in of_arm), 4),
            "mask_density": round(fmean(r["mask_density"] for r in of_arm), 4),
            "applied_density": round(fmean(r["applied_density"] for r in of_arm), 4),
            "read_nowhere": sum(not any(r["readers"]) for r in of_arm),
        })
    return rows
