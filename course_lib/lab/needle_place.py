"""Where the needle stands: inside its block, and inside its mini-batch of sparse prefill.

Two places that no option of the engine names decide whether a fact survives: the offset of its
value from the start of a block (the probe reads every fourth key), and whether the block that the
fact stands in is read while the fact itself is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from course_lib.engine import Engine, generate_from
from course_lib.errors import CourseError
from course_lib.lab.anatomy import (
    AnatomyOptions,
    ProbeOnly,
    Record,
    Variant,
    answer_of,
    recall_of,
)
from course_lib.lab.needle import MAX_NEW_TOKENS, NeedleOptions, prompt_of, recalls
from course_lib.lab.prefill_record import PrefillRecord, record_prefill
from course_lib.lab.prompts import NeedlePrompt, find_needle, prompt_ids

BLOCK = 32
STRIDE = 4  # the probe reads every fourth key of a full block


def at_offset(tokenizer: Any, prompt: NeedlePrompt, offset: int,
              block_size: int = BLOCK) -> NeedlePrompt:
    """The prompt with its needle moved by whole lines, as few as it takes, so that its value's
    first token stands at `offset` of a block of `block_size`. The notes and their order stay.

    Raises ValueError for an offset outside the block, CourseError where no line gives it."""
    if not 0 <= offset < block_size:
        raise ValueError(f"offset must lie between 0 and {block_size - 1}, not {offset}.")
    others = list(prompt.lines)
    needle = others.pop(prompt.needle_line)
    costs = [len(tokenizer.encode(line + "\n", allow_special=False)) for line in others]
    starts = [0]  # where the needle's value would stand, from the first note on
    for cost in costs:
        starts.append(starts[-1] + cost)
    here = prompt.needle_line
    first = prompt.value_span[0] - starts[here]
    for line in sorted(range(len(starts)), key=lambda i: (abs(i - here), i)):
        if (first + starts[line]) % block_size != offset:
            continue
        lines = (*others[:line], needle, *others[line:])
        ids = prompt_ids(tokenizer, lines, prompt.question, prompt.template, prompt.fact.beginning)
        needle_span, value_span = find_needle(tokenizer, ids, prompt.fact)
        if len(ids) == len(prompt.ids) and value_span[0] % block_size == offset:
            return replace(prompt, ids=tuple(ids), lines=lines, needle_line=line,
                           needle_span=needle_span, value_span=value_span)
    raise CourseError(f"No line of this prompt puts its value at offset {offset} of a block.")


def offset_records(engine: Engine, options: AnatomyOptions, index: int) -> list[Record]:
    """One record per variant, on needle prompt index // 4 moved so that its value's first token
    stands at index % 4 modulo 4; recall, and how many tokens the value has."""
    number, rest = divmod(index, STRIDE)
    plain = prompt_of(engine, NeedleOptions(tokens=options.tokens, seed=options.seed), number)
    prompt = at_offset(engine, plain, rest, STRIDE)
    session = engine.prefill(prompt.ids)
    tokens = prompt.value_span[1] - prompt.value_span[0]
    rows = []
    for variant in options.variants:
        said, _ = answer_of(session, prompt, variant)
        rows.append({
            "index": index, "arm": variant.name, "value_position": prompt.value_span[0],
            "value_tokens": tokens, "recalled": recalls(engine, prompt, said),
        })
    return rows


def offset_summary(records: Iterable[Record]) -> list[Record]:
    """One row per variant and remainder of the value's position modulo 4."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        groups.setdefault((r["arm"], r["value_position"] % STRIDE), []).append(r)
    order = dict.fromkeys(arm for arm, _ in groups)
    return [{"arm": arm, "position_mod_4": rest, **recall_of(groups[arm, rest])}
            for arm in order for rest in range(STRIDE) if (arm, rest) in groups]


def own_block_records(engine: Engine, options: AnatomyOptions, index: int) -> list[Record]:
    """One record per variant, exact decode, on needle prompt `index` with its needle at
    positions[index % len(positions)]: recall, the needle's place in its mini-batch, and which
    heads of the first layer read the needle's own block while the needle was read ("1011": all but
    head 1; "    " where the mini-batch was exact)."""
    position = options.positions[index % len(options.positions)]
    prompt = prompt_of(engine, NeedleOptions(tokens=options.tokens, seed=options.seed,
                                             position=position), index)
    block = prompt.value_span[0] // BLOCK
    rows = []
    for variant in options.variants:
        record = record_prefill(engine, prompt.ids, importance="none",
                                prefill_k=variant.prefill_k, prefill_group=variant.group)
        ids = generate_from(record.session, MAX_NEW_TOKENS).ids
        rows.append({
            "index": index, "arm": variant.name, "position": position, "needle_block": block,
            "place": block % 8, "own": _own(record, prompt, block),
            "recalled": recalls(engine, prompt, ids),
        })
    return rows


def _own(record: PrefillRecord, prompt: NeedlePrompt, block: int) -> str:
    trace = record.trace(0)
    value = prompt.value_span[0]
    group = next(i for i, (first, end) in enumerate(trace.groups) if first <= value < end)
    chosen = [by_head[group] for by_head in trace.selections]
    return "".join(" " if c is None else "01"[int(block in c.ids)] for c in chosen)


def own_block_summary(records: Iterable[Record]) -> list[Record]:
    """One row per arm and number of first-layer heads that read the needle's own block."""
    groups: dict[tuple, list[Record]] = {}
    for r in records:
        groups.setdefault((r["arm"], r["own"].count("1")), []).append(r)
    order = dict.fromkeys(arm for arm, _ in groups)
    return [{"arm": arm, "heads_that_read_it": heads, **recall_of(groups[arm, heads])}
            for arm in order for heads in range(5) if (arm, heads) in groups]


OFFSETS = (
    Variant("k 32", decode_k=32), Variant("k 4", decode_k=4),
    ProbeOnly("probe only, k 1", decode_k=1),
    ProbeOnly("probe only, k 1, 32 probes", decode_k=1, n_probe=32),
)
OWN_BLOCK = tuple(Variant(f"prefill {k}", prefill_k=k) for k in (32, 1))
# One position for each of the eight blocks of the mini-batch that begins at token 1,280.
PLACES = tuple(round((1280 + BLOCK * place + BLOCK // 2) / 2045, 4) for place in range(8))
