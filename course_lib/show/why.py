"""Why a block is read or not, in words: the rule of block selection told with its own numbers."""

from __future__ import annotations

import numpy as np

from course_lib.show.style import REASON
from course_lib.show.text import fmt, plural
from course_lib.sparse import Selection


def why_block(selection: Selection, block: int, k_blocks: int) -> str:
    """Explain what became of one block in a selection made with `k_blocks`; 2–4 lines of text.

    Raises ValueError for a block that does not exist.
    """
    n = len(selection.probe)
    if not 0 <= block < n:
        raise ValueError(f"block {block} does not exist; there are {n}.")
    reason = selection.reason[block]
    lines = [_importance(selection, block, k_blocks)]
    if reason != "importance":
        lines.append(_probe(selection, block, k_blocks))
        lines.extend(_recency(selection, block))
    chosen = block in selection.ids
    meaning = REASON[reason]
    lines.append(f"So block {block} is {'read' if chosen else 'not read'}: "
                 f"{meaning.letter} ({meaning.label})."
                 + (f" k ≥ {n} leaves nothing out." if k_blocks >= n else ""))
    return "\n".join(lines)


def _importance(selection: Selection, block: int, k: int) -> str:
    sums, ranks = selection.importance, selection.importance_rank
    if sums is None or ranks is None:
        return f"Importance: off, so no place is reserved and the probe fills all {k}."
    reserved = selection.num_importance
    text = (f"Importance: sum {fmt(sums[block])}, rank {ranks[block]} of {len(sums)}; "
            f"reserved are (k+1)//2 = ({k}+1)//2 = {plural((k + 1) // 2, 'place')}")
    if ranks[block] <= reserved:
        return f"{text}, so it has one."
    last_in = int(selection.order[reserved - 1])
    tie = ", and on equal sums the lower block" if sums[last_in] == sums[block] else ""
    return f"{text}; the last one in is block {last_in} (sum {fmt(sums[last_in])}){tie}."


def _probe(selection: Selection, block: int, k: int) -> str:
    probe, reserved = selection.probe, selection.num_importance
    places = k - reserved
    sum_text = f"{k} − {reserved} = {plural(places, 'place')}" if reserved else f"{places} places"
    text = f"Probe: score {fmt(probe[block])}, rank {selection.probe_rank[block]} of {len(probe)}"
    if places == 0:
        return f"{text}, but {sum_text} are left for the probe."
    queue = _probe_queue(selection)
    number = queue.index(block) + 1
    text += f"; number {number} of the blocks not reserved, for {sum_text}"
    if number <= places:
        return f"{text}, so it gets one."
    last_in = queue[places - 1]
    tie = ", and on equal scores the lower block" if probe[last_in] == probe[block] else ""
    return f"{text}; the last one in is block {last_in} (score {fmt(probe[last_in])}){tie}."


def _probe_queue(selection: Selection) -> list[int]:
    """Blocks that importance did not reserve, best probe score first."""
    reserved = set(selection.order[: selection.num_importance].tolist())
    by_rank = np.argsort(selection.probe_rank, kind="stable").tolist()
    return [b for b in by_rank if b not in reserved]


def _recency(selection: Selection, block: int) -> list[str]:
    last = len(selection.probe) - 1
    if block == selection.recency:
        out = selection.evicted
        assert out is not None
        return [f"Recency: it is the last block, always wanted; it takes the place of block {out}, "
                f"the lowest probe score chosen ({fmt(selection.probe[out])})."]
    if block == selection.evicted:
        return [f"Recency: the last block, {last}, was not chosen and takes the probe place with "
                "the lowest score: this one."]
    if block == last and block not in selection.ids:
        return ["Recency: it is the last block, but only a probe block may make room for it, and "
                "none was chosen; importance blocks are never displaced."]
    return []
