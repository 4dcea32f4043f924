"""The flagship experiment: one needle in a long prompt, exact against block-sparse decode.

Article 10-2, section 3. `k` is the decode k; prefill is exact unless `prefill_k` or `one_flag`
says otherwise (design of 10-2: the published run drove both phases with one flag).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, median

from course_lib import backend
from course_lib.engine import Engine, generate_from
from course_lib.engine.generate import Generation
from course_lib.engine.session import Session
from course_lib.lab.prompts import ARTICLE_FACT, NeedlePrompt, build_needle_prompt

MAX_NEW_TOKENS = 32


@dataclass(frozen=True)
class NeedleOptions:
    """What an experiment runs; the defaults are those of `./course needle`."""

    tokens: int = 2061
    prompts: int = 1
    ks: tuple[int, ...] = (32, 1)
    position: float = 0.5
    prefill_k: int | None = None
    one_flag: bool = False
    template: str = "chat"
    importance: str = "all_queries"
    kv: str = "f32"
    seed: int = 0
    unseen: bool = False
    max_new_tokens: int = MAX_NEW_TOKENS

    def arms(self) -> list[Arm]:
        """Exact first, then one arm per k."""
        arms = [Arm("exact", None, None)]
        for k in self.ks:
            arms.append(Arm(k, k, k if self.one_flag else self.prefill_k))
        return arms


@dataclass(frozen=True)
class Arm:
    """One way to run a prompt: name, decode k and prefill k (None = exact)."""

    k: int | str
    decode_k: int | None
    prefill_k: int | None


@dataclass(frozen=True)
class Trial:
    """One prompt run through one arm."""

    ids: tuple[int, ...]
    text: str
    recalled: bool
    identical: bool
    attn_ms: tuple[float, ...]
    blocks_read: float


@dataclass(frozen=True)
class ArmResult:
    """All prompts of one arm: shares in 0 … 1, milliseconds and blocks per decoded token."""

    k: int | str
    decode_k: int | None
    prefill_k: int | None
    recall: float
    identical_to_exact: float
    attn_ms_per_token: float
    blocks_read_per_token: float
    texts: list[str]


def prompt_of(engine: Engine, options: NeedleOptions, index: int) -> NeedlePrompt:
    """Prompt number `index` of an experiment; number 0 of seed 0 hides the article's own fact."""
    article = options.seed == 0 and index == 0 and not options.unseen
    return build_needle_prompt(
        engine,
        f"{options.seed}-{index}" + ("-unseen" if options.unseen else ""),
        tokens=options.tokens,
        position=options.position,
        template=options.template,
        fact=ARTICLE_FACT if article else None,
        unseen=options.unseen,
    )


def holds_value(text: str, value: str) -> bool:
    """Whether `text` holds `value` as a whole word."""
    return re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text) is not None


def recalls(engine: Engine, prompt: NeedlePrompt, ids: Sequence[int]) -> bool:
    """Whether decode produced the needle's value: the first of `ids` comes from prefill and does
    not count."""
    return holds_value(engine.decode(ids[1:]), prompt.fact.value)


def prefilled(
    engine: Engine, prompt: NeedlePrompt, options: NeedleOptions, prefill_k: int | None
) -> Session:
    """The prompt's session under the options' KV rows, importance rule and this prefill k."""
    return engine.prefill(
        prompt.ids, kv=options.kv, importance=options.importance, prefill_k=prefill_k
    )


def run_prompt(
    engine: Engine,
    prompt: NeedlePrompt,
    options: NeedleOptions,
    sessions: dict[int | None, Session] | None = None,
) -> Iterable[tuple[Arm, Trial]]:
    """Every arm on one prompt; arms with the same prefill k share the session in `sessions`."""
    sessions = {} if sessions is None else sessions
    exact: Generation | None = None
    for arm in options.arms():
        if arm.prefill_k not in sessions:
            sessions[arm.prefill_k] = prefilled(engine, prompt, options, arm.prefill_k)
        made = generate_from(sessions[arm.prefill_k], options.max_new_tokens, arm.decode_k)
        exact = exact or made
        yield arm, trial_of(engine, prompt, made, exact)


def trial_of(
    engine: Engine, prompt: NeedlePrompt, made: Generation, exact: Generation
) -> Trial:
    """What one arm's generation shows, beside that of the exact arm."""
    return Trial(
        ids=tuple(made.ids),
        text=engine.decode(made.ids),
        recalled=recalls(engine, prompt, made.ids),
        identical=made.ids == exact.ids,
        attn_ms=tuple(made.attn_ms),
        blocks_read=fmean(made.blocks_read) if made.blocks_read else 0.0,
    )


def run_trials(
    engine: Engine,
    options: NeedleOptions,
    on_trial: Callable[[int, Arm, Trial], None] | None = None,
) -> Iterator[list[Trial]]:
    """Run the experiment prompt by prompt; each item holds one prompt's trials, arm by arm.

    `on_trial(index, arm, trial)` is called as each arm of a prompt ends. Raises CourseError when a
    prompt does not fit the model's context, ValueError for an unknown option.
    """
    for index in range(options.prompts):
        prompt = prompt_of(engine, options, index)
        trials = []
        for arm, trial in run_prompt(engine, prompt, options):
            trials.append(trial)
            if on_trial is not None:
                on_trial(index, arm, trial)
        yield trials


def run_needle(engine: Engine, options: NeedleOptions) -> list[ArmResult]:
    """Run the whole experiment; errors as `run_trials`."""
    return results_of(options, list(run_trials(engine, options)))


def results_of(options: NeedleOptions, prompts: list[list[Trial]]) -> list[ArmResult]:
    """One result per arm over the finished prompts. attn_ms_per_token is the median over all
    decoded tokens of selection + attention summed over the layers."""
    arms = zip(options.arms(), zip(*prompts, strict=True), strict=True)
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
    )


def as_json(model: str, options: NeedleOptions, results: list[ArmResult]) -> dict:
    """The object that `./course needle --json` prints."""
    return {
        "model": model,
        "backend": backend.info().name,
        "tokens": options.tokens,
        "prompts": len(results[0].texts),
        "seed": options.seed,
        "kv": options.kv,
        "importance": options.importance,
        "template": options.template,
        "position": options.position,
        "unseen": options.unseen,
        "max_new_tokens": options.max_new_tokens,
        "arms": [asdict(result) for result in results],
    }
