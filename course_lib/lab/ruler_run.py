"""RULER's three tasks as a recorded run: the same prompts under several prefill policies."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean
from typing import Any

from course_lib.engine import Engine
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.ruler import RulerOptions, run_sample
from course_lib.lab.ruler_tasks import TASKS, build_ruler_prompt


@dataclass(frozen=True)
class RulerArm:
    """One cell of the table: a task at a length under a policy."""

    task: str
    length: int
    policy: str
    threshold: float | None


@dataclass(frozen=True)
class RulerRunOptions:
    """thresholds: xattn runs once with each; all else as `./course ruler`'s defaults."""

    prompts: int = 50
    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (512, 2048)
    policies: tuple[str, ...] = ("full", "quest", "xattn")
    thresholds: tuple[float, ...] = (0.9, 0.5)
    aggregate: str = "majority"
    chunk: int = RulerOptions.chunk
    block_size: int = RulerOptions.block_size
    max_new_tokens: int = RulerOptions.max_new_tokens
    seed: int = 1

    def arms(self) -> list[RulerArm]:
        """Every cell, in the order of the table."""
        return [RulerArm(task, length, policy, threshold)
                for task in self.tasks for length in self.lengths for policy in self.policies
                for threshold in (self.thresholds if policy == "xattn" else (None,))]


def ruler_records(engine: Engine, options: RulerRunOptions, index: int) -> list[dict[str, Any]]:
    """One record per cell; all policies meet the same prompt."""
    rows = []
    for arm in options.arms():
        prompt = build_ruler_prompt(engine, arm.task, arm.length, f"{options.seed}-{index}")
        policy = PolicyOptions(arm.policy, threshold=arm.threshold or 1.0,
                               aggregate=options.aggregate, chunk=options.chunk,
                               block_size=options.block_size)
        sample = run_sample(engine, prompt, policy, options.max_new_tokens)
        rows.append({
            "index": index, "task": arm.task, "length": arm.length, "policy": arm.policy,
            "threshold": arm.threshold, "score": round(sample.score, 4),
            "recalled": sample.score == 1, "applied_density":
            round(sample.density["applied_density"], 4),
            "references": list(sample.references), "text": sample.text,
        })
    return rows


def ruler_summary(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row per cell: "all" (mean share of references), "any", and exactly right answers."""
    cells: dict[tuple, list[dict[str, Any]]] = {}
    for r in records:
        cells.setdefault((r["task"], r["length"], r["policy"], r["threshold"]), []).append(r)
    return [{
        "task": task, "length": length, "policy": policy, "threshold": threshold,
        "prompts": len(cell), "all": round(fmean(r["score"] for r in cell), 4),
        "any": round(fmean(r["score"] > 0 for r in cell), 4),
        "applied_density": round(fmean(r["applied_density"] for r in cell), 4),
    } for (task, length, policy, threshold), cell in cells.items()]
