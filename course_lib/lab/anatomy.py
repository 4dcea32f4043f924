"""Day 11's arms: one change at a time between the published set-up and its repairs.

The published run drove prefill and decode with one flag. A Variant sets each part alone, so that
an outcome belongs to one of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from course_lib.engine import Engine, Session
from course_lib.engine.sampling import greedy
from course_lib.engine.session import log_softmax
from course_lib.lab.intervals import wilson
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of, recalls
from course_lib.lab.probe_only import ProbeOnlyModel
from course_lib.lab.prompts import NeedlePrompt
from course_lib.selection import ranks
from course_lib.sparse import importance_sums

Record = dict[str, Any]
DIGITS = 6


FORCE = ("needle", "last")
"""The needle's blocks; the block that the token just being fed stands in."""


@dataclass(frozen=True)
class Variant:
    """One way to read a prompt and answer it; None is exact, or the engine's default.

    prefill_k, group, importance, window: as Engine.prefill (group is its prefill_group).
    decode_k: blocks of decode. force: what every decode step reads as well, of FORCE.
    """

    name: str
    prefill_k: int | None = None
    group: int | None = None
    decode_k: int | None = None
    importance: str = "all_queries"
    window: int | None = None
    force: tuple[str, ...] = ()

    @property
    def prefill_options(self) -> dict[str, Any]:
        """For Engine.prefill."""
        return {"prefill_k": self.prefill_k, "prefill_group": self.group,
                "importance": self.importance, "window": self.window}


@dataclass(frozen=True)
class ProbeOnly(Variant):
    """Its decode_k blocks are those of best probe score: no importance, no recency."""

    n_probe: int = 8


@dataclass(frozen=True)
class AnatomyOptions:
    """Prompt `index` is needle prompt index // len(positions) with its needle at position
    index % len(positions); `prompts` counts the indices. variants: the arms, each with a name."""

    variants: tuple[Any, ...]
    prompts: int
    positions: tuple[float, ...] = (0.5,)
    tokens: int = 2061
    seed: int = 1

    def arms(self) -> tuple[Any, ...]:
        return self.variants

    def placed(self, engine: Engine, index: int) -> tuple[float, NeedlePrompt]:
        """The position and the prompt of one index."""
        number, place = divmod(index, len(self.positions))
        position = self.positions[place]
        options = NeedleOptions(tokens=self.tokens, seed=self.seed, position=position)
        return position, prompt_of(engine, options, number)


def blocks_of_needle(prompt: NeedlePrompt, block_size: int = 32) -> tuple[int, ...]:
    """The blocks that hold tokens of the needle, ascending."""
    first, end = prompt.needle_span
    return tuple(range(first // block_size, (end - 1) // block_size + 1))


def answer_of(
    session: Session, prompt: NeedlePrompt, variant: Variant, ids: Sequence[int] | None = None
) -> tuple[list[int], float]:
    """The variant's answer on a prefilled session, which is left as it is: (ids, nats per token).

    ids None: greedy, at most MAX_NEW_TOKENS, as generate_from. Given ids are fed in their place:
    then the nats are those of a text that somebody else wrote.
    """
    session = session.fork()
    n_probe = 8
    if isinstance(variant, ProbeOnly):
        session.model = ProbeOnlyModel(session.model, variant.decode_k or 1)
        n_probe = variant.n_probe
    said: list[int] = []
    nats = 0.0
    steps = MAX_NEW_TOKENS if ids is None else len(ids)
    for place in range(steps):
        token = greedy(session.logits)[0] if ids is None else ids[place]
        if ids is None and token in session.model.config.eos_token_ids:
            break
        nats -= float(log_softmax(session.logits)[token])
        said.append(token)
        if place + 1 < steps:
            session.step(token, decode_k=variant.decode_k, n_probe=n_probe,
                         force_blocks=_forced(session, prompt, variant))
    return said, nats / len(said) if said else 0.0


def _forced(session: Session, prompt: NeedlePrompt, variant: Variant) -> tuple[int, ...]:
    blocks = {"needle": blocks_of_needle(prompt, session.block_size),
              "last": (len(session) // session.block_size,)}
    return tuple(b for what in variant.force for b in blocks[what])


def variant_records(engine: Engine, options: AnatomyOptions, index: int) -> list[Record]:
    """One record per variant: recall, identity with the first variant's answer, text, the right
    answer's mean nats per token, and the rank of the needle's block by importance."""
    position, prompt = options.placed(engine, index)
    right = engine.encode(prompt.fact.sentence, allow_special=False)
    block = prompt.value_span[0] // 32
    sessions: dict[tuple, Session] = {}
    rows: list[Record] = []
    first: list[int] | None = None
    for variant in options.variants:
        key = tuple(variant.prefill_options.values())
        if key not in sessions:
            sessions[key] = engine.prefill(prompt.ids, **variant.prefill_options)
        session = sessions[key]
        said, _ = answer_of(session, prompt, variant)
        _, nats = answer_of(session, prompt, variant, right)
        first = said if first is None else first
        rank = None
        if session.importance is not None:
            rank = int(ranks(importance_sums(session.importance))[block])
        rows.append({
            "index": index, "arm": variant.name, "position": position,
            "recalled": recalls(engine, prompt, said), "identical": said == first,
            "answer_nll": round(nats, DIGITS),
            "value": prompt.fact.value, "value_position": prompt.value_span[0],
            "importance_rank": rank, "text": engine.decode(said),
        })
    return rows


def variant_summary(records: Iterable[Record]) -> list[Record]:
    """One row per arm and position over all prompts, with Wilson's 95 % interval of the recall."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        groups.setdefault((r["position"], r["arm"]), []).append(r)
    rows = []
    for (position, arm), group in groups.items():
        found = [r["importance_rank"] for r in group if r["importance_rank"] is not None]
        rows.append({
            "arm": arm, "position": position, **recall_of(group),
            "identical_to_exact": fmean(r["identical"] for r in group),
            "answer_perplexity": round(math.exp(fmean(r["answer_nll"] for r in group)), 4),
            "median_importance_rank": median(found) if found else None,
        })
    return rows


def recall_of(records: list[Record]) -> Record:
    """How many of the records recalled, the share, and its 95 % interval."""
    hits = sum(bool(r["recalled"]) for r in records)
    low, high = wilson(hits, len(records))
    return {"prompts": len(records), "recalled": hits, "recall": hits / len(records),
            "low": round(low, 4), "high": round(high, 4)}


KS = (32, 16, 8, 4, 2, 1)

PHASES = (
    Variant("exact"),
    *(Variant(f"prefill {k}", prefill_k=k) for k in KS),
    Variant("decode 1", decode_k=1),
    Variant("decode 1, importance off", decode_k=1, importance="none"),
    Variant("decode 1 + needle", decode_k=1, force=("needle",)),
    Variant("decode 1 + last block", decode_k=1, force=("last",)),
    Variant("decode 1 + needle + last block", decode_k=1, force=("needle", "last")),
    Variant("both 1", prefill_k=1, decode_k=1),
    Variant("both 1 + needle + last block", prefill_k=1, decode_k=1, force=("needle", "last")),
    Variant("both 32", prefill_k=32, decode_k=32),
    Variant("both 32 + needle", prefill_k=32, decode_k=32, force=("needle",)),
)

PROBE_ONLY = (
    Variant("exact"),
    *(ProbeOnly(f"probe only, k {k}", decode_k=k) for k in (4, 2, 1)),
    ProbeOnly("probe only, k 1, 32 probes", decode_k=1, n_probe=32),
    ProbeOnly("prefill 1, probe only, k 1", prefill_k=1, decode_k=1),
)

GROUPS = (
    Variant("exact"),
    *(Variant(f"prefill 32, group {group or 256}", prefill_k=32, group=group)
      for group in (None, 64, 32, 8)),
    *(Variant(f"prefill 1, group {group or 256}", prefill_k=1, group=group)
      for group in (None, 32)),
    *(Variant(f"both 32, group {group or 256}", prefill_k=32, decode_k=32, group=group)
      for group in (None, 8)),
)

RULES: dict[str, dict[str, Any]] = {
    "all queries": {"importance": "all_queries"},
    "off": {"importance": "none"},
    **{f"last {w}": {"importance": "last_window", "window": w} for w in (1, 13, 64, 256)},
}

WINDOWS = (
    Variant("exact"),
    *(Variant(f"{rule}, k {k}", decode_k=k, **how) for rule, how in RULES.items()
      for k in (4, 2, 1)),
)
