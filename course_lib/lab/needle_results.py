"""What a needle experiment found: shares and medians per arm, and the object that --json prints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from statistics import fmean, median

from course_lib import backend
from course_lib.engine import Engine
from course_lib.lab.needle import Arm, NeedleOptions, Trial, run_trials


@dataclass(frozen=True)
class ArmResult:
    """All prompts of one arm: shares in 0 … 1, milliseconds and blocks per decoded token.

    applied_density, bytes_density: of a prefill by a policy, see `DensityStats`."""

    k: int | str
    decode_k: int | str | None
    prefill_k: int | None
    recall: float
    identical_to_exact: float
    attn_ms_per_token: float
    blocks_read_per_token: float
    texts: list[str]
    policy: str | None = None
    applied_density: float | None = None
    bytes_density: float | None = None


def run_needle(engine: Engine, options: NeedleOptions) -> list[ArmResult]:
    """Run the whole experiment; errors as `needle.run_trials`."""
    return results_of(options, list(run_trials(engine, options)))


def results_of(options: NeedleOptions, prompts: list[list[Trial]]) -> list[ArmResult]:
    """One result per arm that every one of `prompts` ran. attn_ms_per_token is the median over all
    decoded tokens of selection + attention summed over the layers."""
    arms = zip(options.arms(), zip(*prompts, strict=True), strict=False)
    return [summarize(arm, list(trials)) for arm, trials in arms]


def summarize(arm: Arm, trials: list[Trial]) -> ArmResult:
    """The shares and medians of one arm's trials."""
    times = [ms for trial in trials for ms in trial.attn_ms]
    return ArmResult(
        k=arm.k,
        decode_k=arm.decode_k,
        prefill_k=arm.prefill_k,
        recall=fmean(t.recalled for t in trials),
        identical_to_exact=fmean(t.identical for t in trials),
        attn_ms_per_token=median(times) if times else 0.0,
        blocks_read_per_token=fmean(t.blocks_read for t in trials),
        texts=[t.text for t in trials],
        policy=arm.policy,
        applied_density=_mean_density(trials, "applied_density"),
        bytes_density=_mean_density(trials, "bytes_density"),
    )


def _mean_density(trials: list[Trial], which: str) -> float | None:
    found = [t.density[which] for t in trials if t.density is not None]
    return fmean(found) if found else None


def as_json(
    model: str, options: NeedleOptions, results: list[ArmResult], weights: str = "f32"
) -> dict:
    """The object that `./course needle --json` prints."""
    return {
        "model": model,
        "weights": weights,
        "backend": backend.info().name,
        "tokens": options.tokens,
        "prompts": len(results[0].texts),
        "seed": options.seed,
        "kv": options.kv,
        "importance": options.importance,
        "window": options.window,
        "prefill_group": options.prefill_group,
        "template": options.template,
        "position": options.position,
        "unseen": options.unseen,
        "max_new_tokens": options.max_new_tokens,
        "policy": None if options.policy is None else asdict(options.policy),
        "arms": [asdict(result) for result in results],
    }
