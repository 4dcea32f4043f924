"""RULER at small lengths: which prefill policies still find what a prompt hides.

Scored by RULER's string match: a reference counts if it stands anywhere in the answer, in upper or
lower case. "all" is the mean share of a sample's references found, RULER's score of these tasks;
"any" the share of samples with at least one. Source: Hsieh et al. 2024.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import fmean, median

from course_lib.engine import Engine, generate_from
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.ruler_tasks import TASKS, RulerPrompt, build_ruler_prompt

RULE = "a reference counts where it stands in the answer, in upper or lower case; " \
    "all: mean share of a sample's references; any: samples with at least one"


@dataclass(frozen=True)
class RulerOptions:
    """What is run; the defaults are those of `./course ruler`.

    threshold, aggregate, block_size: of the policies that have them. chunk: tokens of a prefill
    chunk; what a chunk holds it always reads, so lengths up to chunk tell nothing of a policy.
    """

    tasks: tuple[str, ...] = TASKS
    lengths: tuple[int, ...] = (512, 1024, 2048)
    policies: tuple[str, ...] = ("full", "quest", "xattn")
    samples: int = 10
    seed: int = 0
    threshold: float = 0.9
    aggregate: str = "majority"
    chunk: int = 256
    block_size: int = 64
    template: str = "chat"
    max_new_tokens: int = 48

    def cells(self) -> list[tuple[str, int, str]]:
        """Every (task, length, policy), in the order of the table."""
        return [(task, length, policy) for task in self.tasks for length in self.lengths
                for policy in self.policies]

    def policy(self, name: str) -> PolicyOptions:
        """How a policy is run under these options."""
        return PolicyOptions(name, threshold=self.threshold, aggregate=self.aggregate,
                             chunk=self.chunk, block_size=self.block_size)


@dataclass(frozen=True)
class Sample:
    """One prompt under one policy. score: share of its references found."""

    text: str
    references: tuple[str, ...]
    score: float
    density: dict
    prefill_s: float


@dataclass
class Cell:
    """The samples of one (task, length, policy)."""

    task: str
    length: int
    policy: str
    samples: list[Sample] = field(default_factory=list)

    def as_row(self) -> dict:
        """What --json prints of it; of no sample, no numbers."""
        row: dict = {"task": self.task, "length": self.length, "policy": self.policy,
                     "samples": len(self.samples)}
        if self.samples:
            row |= {
                "all": fmean(s.score for s in self.samples),
                "any": fmean(s.score > 0 for s in self.samples),
                "mask_density": fmean(s.density["mask_density"] for s in self.samples),
                "applied_density": fmean(s.density["applied_density"] for s in self.samples),
                "bytes_density": fmean(s.density["bytes_density"] for s in self.samples),
                "prefill_s": median(s.prefill_s for s in self.samples),
                "texts": [s.text for s in self.samples],
            }
        return row


def match(text: str, references: tuple[str, ...]) -> float:
    """Share of `references` that stand in `text`, in upper or lower case."""
    return fmean(reference.lower() in text.lower() for reference in references)


def run_sample(
    engine: Engine, prompt: RulerPrompt, policy: PolicyOptions, max_new_tokens: int
) -> Sample:
    """Prefill by `policy`, exact greedy decode."""
    options = policy.for_prefill()
    begin = time.perf_counter()
    session = engine.prefill(list(prompt.ids), **options)
    seconds = time.perf_counter() - begin
    text = engine.decode(generate_from(session, max_new_tokens).ids)
    return Sample(text, prompt.references, match(text, prompt.references),
                  options["policy"].get_density_stats(), seconds)


def run_ruler(
    engine: Engine, options: RulerOptions,
    on_sample: Callable[[Cell], None] | None = None,
) -> Iterator[Cell]:
    """Run task by task and length by length; each item is a finished cell.

    All policies meet the same prompts. `on_sample(cell)` is called after every sample. Errors as
    `build_ruler_prompt`, of every task and length before the first run, and `Engine.prefill`.
    """
    def prompt_of(task: str, length: int, index: int) -> RulerPrompt:
        return build_ruler_prompt(engine, task, length, f"{options.seed}-{index}",
                                  options.template)

    for task in options.tasks:  # a length that is too short shows now, not after hours
        for length in options.lengths:
            prompt_of(task, length, 0)
    for task in options.tasks:
        for length in options.lengths:
            prompts = [prompt_of(task, length, index) for index in range(options.samples)]
            for name in options.policies:
                cell = Cell(task, length, name)
                for prompt in prompts:
                    cell.samples.append(
                        run_sample(engine, prompt, options.policy(name), options.max_new_tokens))
                    if on_sample is not None:
                        on_sample(cell)
                yield cell
