"""The flagship experiment: one needle in a long prompt, exact against block-sparse decode.

Article 10-2, section 3. `k` is the decode k; prefill is exact unless `prefill_k` or `one_flag`
says otherwise (the published run drove both phases with one flag).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean

from course_lib.engine import Engine, generate_from
from course_lib.engine.generate import Generation
from course_lib.engine.session import Session
from course_lib.engine.tokenizer import Tokenizer
from course_lib.lab.policy_options import PolicyOptions
from course_lib.lab.prompts import ARTICLE_FACT, NeedlePrompt, build_needle_prompt

MAX_NEW_TOKENS = 32
Progress = Callable[[str, int, int], None]
"""Called as a run goes on: phase ("prefill" or "decode"), and how much of how much is done."""


@dataclass(frozen=True)
class NeedleOptions:
    """What an experiment runs; the defaults are those of `./course needle` on the shipped model.

    A k is a number of blocks, or "auto". prefill_group: prompt tokens that share one selection of
    sparse prefill, None for the mini-batch of 256; window: queries that importance counts under
    "last_window". Both as `Engine.prefill`. policy: prefill in chunks by a policy, for every arm
    but exact, which has no importance; the first of them decodes exactly.
    """

    tokens: int = 2061
    prompts: int = 1
    ks: tuple[int | str, ...] = (32, 1)
    position: float = 0.5
    prefill_k: int | None = None
    prefill_group: int | None = None
    one_flag: bool = False
    template: str = "chat"
    importance: str = "all_queries"
    window: int | None = None
    kv: str = "f32"
    seed: int = 0
    unseen: bool = False
    max_new_tokens: int = MAX_NEW_TOKENS
    policy: PolicyOptions | None = None

    def arms(self) -> list[Arm]:
        """Exact first, then one arm per k. ValueError for "auto" under one_flag."""
        arms = [Arm("exact", None, None)]
        if self.policy is not None:
            name = self.policy.name
            arms.append(Arm("exact", None, None, name))
            return arms + [Arm(k, k, None, name) for k in self.ks]
        for k in self.ks:
            if self.one_flag and isinstance(k, str):
                raise ValueError(f"one_flag needs a number as k, not {k!r}")
            arms.append(Arm(k, k, k if self.one_flag else self.prefill_k))  # type: ignore[arg-type]
        return arms


@dataclass(frozen=True)
class Arm:
    """One way to run a prompt: name, decode k and prefill k (None = exact), prefill policy."""

    k: int | str
    decode_k: int | str | None
    prefill_k: int | None
    policy: str | None = None

    @property
    def prefill(self) -> int | str | None:
        """What its prefill has in common with that of other arms: k or policy, None if exact."""
        return self.prefill_k if self.policy is None else self.policy


@dataclass(frozen=True)
class Trial:
    """One prompt run through one arm."""

    ids: tuple[int, ...]
    text: str
    recalled: bool
    identical: bool
    attn_ms: tuple[float, ...]
    blocks_read: float
    density: dict | None = None  # of its prefill, by a policy


def prompt_of(
    tokenizer: Engine | Tokenizer, options: NeedleOptions, index: int
) -> NeedlePrompt:
    """Prompt number `index` of an experiment; number 0 of seed 0 hides the article's own fact."""
    article = options.seed == 0 and index == 0 and not options.unseen
    return build_needle_prompt(
        tokenizer,
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
    engine: Engine,
    prompt: NeedlePrompt,
    options: NeedleOptions,
    prefill: int | str | None,
    on_progress: Progress | None = None,
) -> Session:
    """The prompt's session under the options' KV rows and `prefill`: None for exact prefill, a
    prefill k, or the name of the options' policy, which records no importance."""
    if isinstance(prefill, str):
        if options.policy is None or options.policy.name != prefill:
            raise ValueError(f"the options name no policy {prefill!r}")
        return engine.prefill(
            prompt.ids, kv=options.kv, **options.policy.for_prefill(),
            on_progress=None if on_progress is None else partial(on_progress, "prefill"),
        )
    return engine.prefill(
        prompt.ids,
        kv=options.kv,
        importance=options.importance,
        window=options.window,
        prefill_k=prefill,
        prefill_group=None if prefill is None else options.prefill_group,
        on_progress=None if on_progress is None else partial(on_progress, "prefill"),
    )


def run_prompt(
    engine: Engine,
    prompt: NeedlePrompt,
    options: NeedleOptions,
    sessions: dict[int | str | None, Session] | None = None,
    on_progress: Progress | None = None,
) -> Iterator[tuple[Arm, Trial]]:
    """Every arm on one prompt; arms with the same prefill share the session in `sessions`.

    A session that no later arm needs is dropped when the next arm is asked for.
    """
    sessions = {} if sessions is None else sessions
    exact: Generation | None = None
    arms = options.arms()
    for number, arm in enumerate(arms, 1):
        if arm.prefill not in sessions:
            sessions[arm.prefill] = prefilled(engine, prompt, options, arm.prefill, on_progress)
        session = sessions[arm.prefill]
        made = generate_from(
            session,
            options.max_new_tokens,
            arm.decode_k,
            on_step=_counting(options.max_new_tokens, on_progress),
        )
        exact = exact or made
        density = None if session.policy is None else session.policy.get_density_stats()
        yield arm, replace(trial_of(engine, prompt, made, exact), density=density)
        if arm.prefill not in {later.prefill for later in arms[number:]}:
            del sessions[arm.prefill]


def _counting(total: int, on_progress: Progress | None) -> Callable[[int, Session], None] | None:
    """An `on_step` for generation that reports the tokens decoded."""
    if on_progress is None:
        return None
    steps = count(1)

    def on_step(token: int, session: Session) -> None:
        on_progress("decode", next(steps), total)

    return on_step


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
    on_progress: Progress | None = None,
) -> Iterator[list[Trial]]:
    """Run the experiment prompt by prompt; each item holds one prompt's trials, arm by arm.

    `on_trial(index, arm, trial)` is called as each arm of a prompt ends. Raises CourseError when a
    prompt does not fit the model's context, ValueError for an unknown option.
    """
    for index in range(options.prompts):
        prompt = prompt_of(engine, options, index)
        trials = []
        for arm, trial in run_prompt(engine, prompt, options, on_progress=on_progress):
            trials.append(trial)
            if on_trial is not None:
                on_trial(index, arm, trial)
        yield trials
