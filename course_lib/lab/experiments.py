"""The experiments behind the lessons' claims: what runs, record by record.

tools/record_runs.py writes them to data/runs; a test re-runs some records and compares. Each
experiment is a function of (engine, prompt index), so any record can be made again alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from statistics import fmean
from typing import Any

from course_lib.engine import Engine, generate_from
from course_lib.lab import anatomy, importance_ranks, needle_place
from course_lib.lab.anatomy import AnatomyOptions
from course_lib.lab.exp_walk import ExpWalk, exp_records, exp_summary
from course_lib.lab.held_out import Cost, world_window
from course_lib.lab.needle import NeedleOptions, prompt_of, run_prompt
from course_lib.lab.perplexity import (
    Arm,
    ArmPerplexity,
    PerplexityOptions,
    results_of,
    window_costs,
)
from course_lib.lab.policy_needle import (
    PolicyNeedleOptions,
    policy_needle_records,
    policy_needle_summary,
)
from course_lib.lab.ruler_run import RulerRunOptions, ruler_records, ruler_summary
from course_lib.paths import MODELS

Record = dict[str, Any]
DIGITS = 6  # decimals kept of a log-probability: below the differences between backends


@dataclass(frozen=True)
class Experiment:
    """`records(engine, options, index)` gives the records of one prompt; `summarize` the table.

    options: NeedleOptions, PerplexityOptions or ExpWalk, which `records` takes too; how many
    prompts (or stretches) there are, and which arms each has: `options.prompts`,
    `options.arms()`.
    """

    options: Any
    records: Callable[[Engine, Any, int], list[Record]]
    summarize: Callable[[list[Record]], Any]
    about: str
    exact_keys: tuple[str, ...] = field(default=())  # compared exactly when re-run
    close_keys: tuple[str, ...] = field(default=())  # compared within `close` when re-run
    close: float = 1e-2  # relative; below an absolute 1e-3 nothing counts
    reruns: int = 3  # prompts that a test makes again; fewer where one prompt has many arms


def needle_records(engine: Engine, options: NeedleOptions, index: int) -> list[Record]:
    """One record per arm: recall, identity, text, and the right answer's mean nats per token."""
    prompt = prompt_of(engine, options, index)
    answer = engine.encode(prompt.fact.sentence, allow_special=False)
    sessions: dict[int | str | None, Any] = {}
    rows = []
    for arm, trial in run_prompt(engine, prompt, options, sessions):
        scores = sessions[arm.prefill_k].score(answer, decode_k=arm.decode_k)
        rows.append({
            "index": index,
            "k": arm.k,
            "recalled": trial.recalled,
            "identical": trial.identical,
            "answer_nll": round(-float(scores.mean()), DIGITS),
            "blocks_read": round(trial.blocks_read, 3),
            "value": prompt.fact.value,
            "value_position": prompt.value_span[0],
            "needle_block": prompt.value_span[0] // 32,
            "text": trial.text,
        })
    return rows


def needle_summary(records: list[Record]) -> list[Record]:
    """One row per arm over all prompts."""
    rows = []
    for k in dict.fromkeys(r["k"] for r in records):
        arm = [r for r in records if r["k"] == k]
        rows.append({
            "k": k,
            "prompts": len(arm),
            "recall": fmean(r["recalled"] for r in arm),
            "identical_to_exact": fmean(r["identical"] for r in arm),
            "answer_perplexity": round(math.exp(fmean(r["answer_nll"] for r in arm)), 4),
            "blocks_read": round(fmean(r["blocks_read"] for r in arm), 2),
        })
    return rows


def kv_records(engine: Engine, options: NeedleOptions, index: int) -> list[Record]:
    """q8 against f32 KV rows on one prompt: the text both generate and the text they score.

    Held-out text: the last HELD_OUT_TOKENS tokens of the prompt (notes and question, which no
    training document holds) and the right answer, scored by decode steps over the cache.
    """
    prompt = prompt_of(engine, options, index)
    answer = engine.encode(prompt.fact.sentence, allow_special=False)
    cut = len(prompt.ids) - HELD_OUT_TOKENS
    generated, scores = {}, {}
    for kv in ("f32", "q8"):
        whole = engine.prefill(prompt.ids, kv=kv, importance="none")
        generated[kv] = generate_from(whole, options.max_new_tokens).ids
        start = engine.prefill(prompt.ids[:cut], kv=kv, importance="none")
        scores[kv] = start.score([*prompt.ids[cut:], *answer])
    same = sum(a == b for a, b in zip(generated["f32"], generated["q8"], strict=False))
    longest = max(len(ids) for ids in generated.values())
    return [{
        "index": index,
        "tokens_same": same,
        "tokens": longest,
        "identical": generated["f32"] == generated["q8"],
        "tokens_scored": len(scores["f32"]),
        "nll_f32": round(-float(scores["f32"].sum()), DIGITS),
        "nll_q8": round(-float(scores["q8"].sum()), DIGITS),
        "answer_nll_f32": round(-float(scores["f32"][-len(answer):].sum()), DIGITS),
        "answer_nll_q8": round(-float(scores["q8"][-len(answer):].sum()), DIGITS),
        "answer_tokens": len(answer),
        "text": engine.decode(generated["q8"]),
    }]


HELD_OUT_TOKENS = 96


def kv_summary(records: list[Record]) -> Record:
    """Token agreement and perplexities of q8 and f32 KV over all prompts."""
    def total(key: str) -> float:
        return sum(r[key] for r in records)

    scored, answers = total("tokens_scored"), total("answer_tokens")
    f32, q8 = (math.exp(total(f"nll_{kv}") / scored) for kv in ("f32", "q8"))
    answer_f32, answer_q8 = (
        math.exp(total(f"answer_nll_{kv}") / answers) for kv in ("f32", "q8")
    )
    return {
        "prompts": len(records),
        "token_agreement": total("tokens_same") / total("tokens"),
        "identical_share": fmean(r["identical"] for r in records),
        "tokens_scored": int(scored),
        "perplexity_f32": round(f32, DIGITS),
        "perplexity_q8": round(q8, DIGITS),
        "perplexity_ratio": round(q8 / f32, DIGITS),
        "answer_perplexity_f32": round(answer_f32, DIGITS),
        "answer_perplexity_q8": round(answer_q8, DIGITS),
        "answer_perplexity_ratio": round(answer_q8 / answer_f32, DIGITS),
    }


@lru_cache
def packed_engine(weights: str) -> Engine:
    """The shipped model with its weights packed; a model so small is packed in memory."""
    return Engine.load(MODELS / "needle-qwen3", weights)


def perplexity_records(engine: Engine, options: PerplexityOptions, index: int) -> list[Record]:
    """One record per arm: the nats that the second half of a held-out conversation costs."""
    window = world_window(engine, f"{options.seed}-{index}", options.window)
    rows = []
    for weights in options.weights:
        model = engine if weights == "f32" else packed_engine(weights)
        costs = window_costs(model, window, options.kvs, options.ks)
        arms = (arm for arm in options.arms() if arm.weights == weights)
        for arm, cost in zip(arms, costs, strict=True):
            rows.append({
                "index": index, **asdict(arm), "tokens": cost.tokens,
                "nll": round(cost.nll, DIGITS), "answer_tokens": cost.answer_tokens,
                "answer_nll": round(cost.answer_nll, DIGITS),
            })
    return rows


def perplexity_summary(records: list[Record]) -> list[Record]:
    """One row per arm: perplexities over all windows, and divided by the first arm's."""
    found: dict[Arm, list[Cost]] = {}
    for r in records:
        cost = Cost(r["tokens"], r["nll"], r["answer_tokens"], r["answer_nll"])
        found.setdefault(Arm(r["weights"], r["kv"], r["k"]), []).append(cost)
    return [perplexity_row(result) for result in results_of(found)]


def perplexity_row(result: ArmPerplexity) -> Record:
    """One arm's perplexities as plain values."""
    row: Record = {**asdict(result.arm), "windows": result.windows, "tokens": result.cost.tokens,
                   "perplexity": round(result.perplexity, DIGITS),
                   "ratio": round(result.ratio, DIGITS)}
    if result.answer_perplexity is not None and result.answer_ratio is not None:
        row |= {"answer_tokens": result.cost.answer_tokens,
                "answer_perplexity": round(result.answer_perplexity, DIGITS),
                "answer_ratio": round(result.answer_ratio, DIGITS)}
    return row


SWEEP = (32, 16, 8, 4, 2, 1)
SWEEP_SEED = 1  # seed 0 is the terminal's default; lessons use another set of prompts

_NEEDLE_KEYS: dict[str, Any] = {
    "exact_keys": ("recalled", "identical", "value", "value_position", "text"),
    "close_keys": ("answer_nll", "blocks_read"),
}


def _needle(about: str, **options: Any) -> Experiment:
    return Experiment(
        NeedleOptions(seed=SWEEP_SEED, **options), needle_records, needle_summary, about,
        **_NEEDLE_KEYS,
    )


_ANATOMY_KEYS: dict[str, Any] = {
    "exact_keys": ("arm", "recalled", "identical", "value", "value_position", "text"),
    "close_keys": ("answer_nll",),
    "reruns": 1,
}

EXPERIMENTS: dict[str, Experiment] = {
    "needle_k_sweep": _needle(
        "exact prefill, every decode k", prompts=200, ks=SWEEP),
    "needle_unseen": _needle(
        "made-up names and values that training never used", prompts=200, ks=(32,), unseen=True),
    "needle_no_importance": _needle(
        "exact prefill, selection without importance", prompts=60, ks=SWEEP, importance="none"),
    "needle_last_window": _needle(
        "exact prefill, importance of the last window only", prompts=60, ks=SWEEP,
        importance="last_window"),
    "needle_one_flag": _needle(
        "prefill k = decode k, the published set-up", prompts=60, ks=SWEEP, one_flag=True),
    "needle_phases": Experiment(
        AnatomyOptions(anatomy.PHASES, prompts=100), anatomy.variant_records,
        anatomy.variant_summary, "prefill and decode broken one at a time; the needle forced",
        **_ANATOMY_KEYS,
    ),
    "needle_probe_only": Experiment(
        AnatomyOptions(anatomy.PROBE_ONLY, prompts=100), anatomy.variant_records,
        anatomy.variant_summary, "blocks by the probe alone, no importance, no recency",
        **_ANATOMY_KEYS,
    ),
    "needle_groups": Experiment(
        AnatomyOptions(anatomy.GROUPS, prompts=100, positions=(0.5, 0.8)),
        anatomy.variant_records, anatomy.variant_summary,
        "sparse prefill with smaller groups, exact decode or both sparse", **_ANATOMY_KEYS,
    ),
    "needle_windows": Experiment(
        AnatomyOptions(anatomy.WINDOWS, prompts=150, positions=(0.25, 0.5, 0.75)),
        anatomy.variant_records, anatomy.variant_summary,
        "exact prefill, small k, importance counted in six ways", **_ANATOMY_KEYS,
    ),
    "needle_ranks": Experiment(
        AnatomyOptions(importance_ranks.RANK_RULES, prompts=50),
        importance_ranks.rank_records, importance_ranks.rank_summary,
        "the needle's block by importance, by whose queries count",
        exact_keys=("arm", "position", "needle_block"), close_keys=("rank",), close=0.05,
    ),
    "needle_own_block": Experiment(
        AnatomyOptions(needle_place.OWN_BLOCK, prompts=160, positions=needle_place.PLACES),
        needle_place.own_block_records, needle_place.own_block_summary,
        "sparse prefill by the needle's place in its mini-batch",
        exact_keys=("arm", "needle_block", "place", "own", "recalled"),
    ),
    "needle_offsets": Experiment(
        AnatomyOptions(needle_place.OFFSETS, prompts=50 * needle_place.STRIDE),
        needle_place.offset_records, needle_place.offset_summary,
        "the needle's value at positions 0, 1, 2, 3 modulo 4",
        exact_keys=("arm", "value_position", "value_tokens", "recalled"),
    ),
    "kv_quality": Experiment(
        NeedleOptions(prompts=200, ks=(), seed=SWEEP_SEED), kv_records, kv_summary,
        "q8 against f32 KV rows",
        exact_keys=("tokens_same", "tokens", "identical", "tokens_scored", "text"),
        close_keys=("nll_f32", "nll_q8", "answer_nll_f32", "answer_nll_q8"),
    ),
    "perplexity": Experiment(
        PerplexityOptions(windows=24), perplexity_records, perplexity_summary,
        "held-out text under f32, Q8_0 and Q4_0 weights, f32 and q8 KV rows",
        exact_keys=("weights", "kv", "k", "tokens", "answer_tokens"),
        close_keys=("nll", "answer_nll"), close=1e-4,
    ),
    "exp_all_floats": Experiment(
        ExpWalk(), exp_records, exp_summary,
        "every float32 from -87 to 88 through the kernels' exponential function",
        exact_keys=("from", "to", "floats", "digest"),
        close_keys=("max_ulp", "correct"), close=1e-4,
    ),
    "prefill_policies": Experiment(
        PolicyNeedleOptions(), policy_needle_records, policy_needle_summary,
        "needles that prefill itself must find, under every policy and vote",
        exact_keys=("arm", "recalled", "value"),
        close_keys=("mask_density", "applied_density"),
    ),
    "prefill_ruler": Experiment(
        RulerRunOptions(), ruler_records, ruler_summary,
        "RULER's tasks under prefill policies",
        exact_keys=("task", "length", "policy", "threshold", "references", "score"),
        close_keys=("applied_density",),
    ),
}


def options_record(experiment: Experiment) -> dict[str, Any]:
    """The options as plain values for the file."""
    return asdict(experiment.options)
