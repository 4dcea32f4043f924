"""Solutions of day 14: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def merge_lse(o1, lse1, o2, lse2):
    o, lse = np.zeros_like(o1), np.full_like(lse1, -np.inf)
    only1, only2 = lse1 > -np.inf, lse2 > -np.inf
    o[only1], lse[only1] = o1[only1], lse1[only1]
    o[only2], lse[only2] = o2[only2], lse2[only2]
    both = only1 & only2
    a, b = lse1[both], lse2[both]
    largest = np.maximum(a, b)
    w1, w2 = np.exp(a - largest), np.exp(b - largest)
    total = w1 + w2
    o[both] = (w1[:, None] * o1[both] + w2[:, None] * o2[both]) / total[:, None]
    lse[both] = largest + np.log(total)
    return o, lse


def ring_plan(loads, computes, slots):
    if slots < 1 or len(loads) != len(computes):
        raise ValueError("slots must be at least 1, and every block needs both times")
    plan = []
    for i in range(len(loads)):
        loaded, computed = (plan[-1][2], plan[-1][4]) if plan else (0, 0)
        free = plan[i - slots][4] if i >= slots else 0
        start = max(loaded, free)
        end = start + loads[i]
        begin = max(end, computed)
        plan.append((i % slots, start, end, begin, begin + computes[i]))
    return plan


def bytes_read(estimate, rho, page_size=16, layers=1):
    kappa = {"none": 0.0, "kv": 1.0, "k": 0.5, "pages": 1 / page_size, "resident": 0.0}
    if estimate not in kappa or not 0 <= rho <= 1:
        raise ValueError("unknown estimate, or rho outside 0 to 1")
    return kappa[estimate] / layers + rho


ANSWERS = {
    "d14.b1": "merge_into flags the rows whose LSE is -inf before it writes: a fresh row copies "
    "the part, an absent part changes nothing, only rows with both are merged. -inf - -inf is NaN "
    "and is computed all the same, with the alarm off, then set aside. Without that the row would "
    "be NaN; NaN stays NaN in every later merge and reaches the logits, so the model would say "
    "nonsense or fail. Both sides are empty where a query sees nothing in the first part: the "
    "result begins as zeros and -inf. For example visible = [0, 1, ...], so that row 0 sees no "
    "token, or the causal mask with a block list that leaves out block 0. "
    "Rubric: 1 point: NaN would appear where both sides are empty and then never leave, because "
    "every later merge multiplies by it; 1 point: arguments with which a row sees nothing in the "
    "first part that is merged, such as a 0 in visible, or block lists without the early blocks.",
    "d14.b2": "The consumer frees the slot in the finally behind the yield, so also when the "
    "caller stops early or fails. The reader takes only free slots. If a slot were not given back, "
    "the ring would have one less for the rest of its life: after as many errors as slots the "
    "reader would wait for a free slot for ever, in a later layer that did nothing wrong. Freed "
    "before the yield, the reader could overwrite rows that are being attended: wrong numbers, "
    "no crash. "
    "Rubric: 1 point: finally runs when the caller breaks off, and the slot must come back; "
    "1 point: the next stream of the same ring would wait, or would have fewer slots.",
    "d14.b3": "The statistic counts blocks of layer 0 that at least one KV head reads, of those "
    "that were there: 4160 of 8001, 52 %. Neither the reading for the estimate nor the chunk "
    "itself is in it. In bytes the run reads 1 + 0.52 = 1.52 of full attention. A better "
    "sentence: reads every block once to choose and 52 % again to attend, 152 % of full "
    "attention's bytes; computes about half of its cells. Slow flash: watch bytes; everything in "
    "memory: watch the applied density (and the time of the estimate). "
    "Rubric: 1 point: a sentence that holds both the reading to choose and the reading to attend; "
    "1 point: bytes for slow storage and applied density in memory, with a reason.",
}
