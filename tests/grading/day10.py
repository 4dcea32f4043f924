"""Hidden cases of day 10."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

# 10-1: the cost of a decoded token


def _counted(n, k_blocks, head_dim, block_size=32, n_probe=8):
    """The definition: walk through every block, as the engine's loop does."""
    probed, start = 0, 0
    while start < n:
        length = min(block_size, n - start)
        step = max(1, length // n_probe)
        position = 0
        while position < length:
            probed, position = probed + 1, position + step
        start += block_size
    if n <= 2 * block_size or n <= k_blocks * block_size:
        return {"dense": 2 * n * head_dim, "probe": 0, "attend": 2 * n * head_dim}
    return {"dense": 2 * n * head_dim, "probe": probed * head_dim,
            "attend": 2 * k_blocks * block_size * head_dim}


def _cost_case(name, *args, **kwargs) -> Case:
    return Case(name, args, kwargs, expect=_counted(*args, **kwargs))


def _decode_cost_groups() -> list[Group]:
    return [
        Group("full blocks", 1, "Exact attention multiplies every key and every value once; so do "
              "the chosen blocks.",
              [_cost_case("2B shape", 8192, 32, 128), _cost_case("shipped shape", 2048, 1, 64)]),
        Group("last block", 1, "A short last block has its own step: its length // n_probe, but at "
              "least 1.",
              [_cost_case(f"n = {n}", n, 1, 64) for n in (2061, 95, 2063, 65)]),
        Group("probe step", 1, "The step is rounded down, so a block can give more samples than "
              "n_probe, or all of its keys.",
              [_cost_case("5 probes", 960, 2, 8, n_probe=5),
               _cost_case("more probes than keys", 70, 1, 8, block_size=16, n_probe=40),
               _cost_case("one probe", 990, 3, 8, block_size=48, n_probe=1)]),
        Group("gate", 1, "With two blocks or fewer, or nothing to prune, decode is exact and does "
              "not probe.",
              [_cost_case("one above", 65, 1, 4), _cost_case("at k blocks", 1024, 32, 4),
               _cost_case("below k blocks", 700, 32, 4), _cost_case("very short", 5, 3, 4),
               _cost_case("one above k blocks", 1025, 32, 4)]),
        Group("arguments", 1, "Arguments below 1 have no cost: raise ValueError.",
              [Case("k = 0", (100, 0, 4), raises=ValueError),
               Case("n_probe = 0", (100, 1, 4), {"n_probe": 0}, raises=ValueError)]),
    ]


def _checked(*values):
    if min(values) < 1:
        raise ValueError("below 1")


def _eight_probes_in_every_block(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    cost = _counted(n, k_blocks, head_dim, block_size, n_probe)
    return {**cost, "probe": cost["probe"] and -(-n // block_size) * n_probe * head_dim}


def _a_quarter_of_the_keys(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    cost = _counted(n, k_blocks, head_dim, block_size, n_probe)
    return {**cost, "probe": cost["probe"] and n * n_probe // block_size * head_dim}


def _no_gate(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    full, rest = divmod(n, block_size)
    sizes = [block_size] * full + [rest] * (rest > 0)
    probed = sum(len(range(0, size, max(1, size // n_probe))) for size in sizes)
    return {"dense": 2 * n * head_dim, "probe": probed * head_dim,
            "attend": 2 * k_blocks * block_size * head_dim}


def _keys_but_no_values(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    cost = _counted(n, k_blocks, head_dim, block_size, n_probe)
    return {**cost, "dense": cost["dense"] // 2, "attend": cost["attend"] // 2}


def _gate_of_two_blocks_only(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    if n <= 2 * block_size:
        return _counted(n, k_blocks, head_dim, block_size, n_probe)
    return _no_gate(n, k_blocks, head_dim, block_size, n_probe)


def _accepts_k_0(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, head_dim, block_size)
    return _counted(n, k_blocks, head_dim, block_size, max(1, n_probe))


def _cost_by_ceiling(n, k_blocks, head_dim, block_size=32, n_probe=8):
    _checked(n, k_blocks, head_dim, block_size, n_probe)
    if n <= max(2, k_blocks) * block_size:
        return dict(dense=2 * n * head_dim, probe=0, attend=2 * n * head_dim)
    ends = np.minimum(np.arange(block_size, n + block_size, block_size), n)
    sizes = np.diff(ends, prepend=0)
    steps = np.maximum(sizes // n_probe, 1)
    return {"dense": 2 * n * head_dim, "probe": int((-(-sizes // steps)).sum()) * head_dim,
            "attend": k_blocks * block_size * 2 * head_dim}


# 10-2: the choice of blocks


def _greedy(probe, importance, k_blocks, *, ties=min, budget=None, worst=min, victim=min,
            recency="probe"):
    """The definition, one block at a time; the options are the mistakes of the mutants."""
    if k_blocks < 1:
        raise ValueError("k_blocks")
    count = len(probe)
    chosen = []

    def add(scores, letter):
        left = [b for b in range(count) if b not in [c for c, _ in chosen]]
        top = max(scores[b] for b in left)
        chosen.append((ties(b for b in left if scores[b] == top), letter))

    if importance is not None:
        for _ in range(min(count, (k_blocks + 1) // 2 if budget is None else budget(k_blocks))):
            add(importance, "I")
    while len(chosen) < min(k_blocks, count):
        add(probe, "P")
    ids = [b for b, _ in chosen]
    slots = [s for s, (_, letter) in enumerate(chosen) if letter == "P" or recency == "any"]
    if recency != "never" and slots and len(chosen) < count and count - 1 not in ids:
        low = worst(probe[ids[s]] for s in slots)
        chosen[victim(s for s in slots if probe[ids[s]] == low)] = (count - 1, "R")
    return chosen


def _mutant(**changes):
    return lambda probe, importance, k_blocks: _greedy(probe, importance, k_blocks, **changes)


def _zeros_count_as_no_importance(probe, importance, k_blocks):
    if importance is not None and not np.any(importance):
        importance = None
    return _greedy(probe, importance, k_blocks)


def _ascending(probe, importance, k_blocks):
    return sorted(_greedy(probe, importance, k_blocks))


def _marks_what_it_took(probe, importance, k_blocks):
    chosen = _greedy(probe, importance, k_blocks)
    for block, _ in chosen:
        probe[block] = -1e30
    return chosen


def _negative_scores_lose_to_zero(probe, importance, k_blocks):
    return _greedy(np.maximum(probe, 0), importance, k_blocks)


def _by_sorting(probe, importance, k_blocks):
    if k_blocks < 1:
        raise ValueError("k_blocks")
    n, last = len(probe), len(probe) - 1
    order, letters = [], []
    if importance is not None:
        order = np.argsort(-np.asarray(importance), kind="stable")[: (k_blocks + 1) // 2].tolist()
        letters = ["I"] * len(order)
    start = len(order)
    rest = [b for b in np.argsort(-np.asarray(probe), kind="stable").tolist() if b not in order]
    order += rest[: k_blocks - start]
    letters += ["P"] * (len(order) - start)
    if len(order) > start and len(order) < n and last not in order:
        slot = start + int(np.argmin(np.asarray(probe)[order[start:]]))
        order[slot], letters[slot] = last, "R"
    return [[b, letter] for b, letter in zip(order, letters, strict=True)]


def _select_case(name, probe, importance, k) -> Case:
    args = (np.array(probe, np.float32),
            None if importance is None else np.array(importance, np.float32), k)
    return Case(name, args, expect=_greedy(*args))


def _select_groups() -> list[Group]:
    rng = np.random.default_rng(10)

    def some(n, low, high):
        return rng.integers(low, high, n)

    ks = (2, 3, 4, 5, 8, 16)
    return [
        Group("65 blocks", 2, "The chain is importance, then probe, then recency; check each step "
              "against the toy.",
              [_select_case(f"k = {k}", rng.normal(size=65), rng.random(65), k)
               for k in (1, 2, 3, 4, 7, 32, 64, 65, 80)]),
        Group("ties", 2, "Equal scores go to the lower block; recency throws out the earliest "
              "chosen of equals.",
              [_select_case(f"k = {k}", some(24, 0, 3), some(24, 0, 3), k) for k in ks]
              + [_select_case("all equal", np.ones(9), np.ones(9), 6)]),
        Group("without importance", 1, "No importance array: no reservation, and recency acts even "
              "at k = 1.",
              [_select_case(f"k = {k}", some(20, -9, 9), None, k) for k in (1, 2, 5, 19, 20)]),
        Group("importance of zeros", 1, "An array of zeros is an array: its ties reserve the first "
              "blocks.",
              [_select_case(f"k = {k}", some(12, -9, -1), np.zeros(12), k) for k in (1, 4)]),
        Group("recency", 1, "Recency replaces the weakest probe block, never one that importance "
              "reserved, and leaves the last block alone where it is chosen already.",
              [_select_case("last by importance", [5, 4, 3, 1], [0, 0, 0, 9], 2),
               _select_case("last by probe", [5, 4, 3, 9], [9, 0, 0, 0], 2),
               _select_case("weak importance block", [-5, 4, 3, 1], [9, 0, 0, 0], 2)]),
        Group("k", 1, "k below 1 is an error; above the number of blocks every block is taken.",
              [Case("k = -1", (np.ones(3, np.float32), None, -1), raises=ValueError),
               _select_case("one block", [3], [1], 4), _select_case("k = n", [1, 2], [2, 1], 2)]),
    ]


# 10-3: the change of a whole token


def _amdahl(profile, cost):
    """The definition: sum the parts before and after."""
    if "attention" not in profile or any(t < 0 for t in profile.values()):
        raise ValueError("profile")
    before = sum(profile.values())
    if before <= 0:
        raise ValueError("profile")
    factor = (cost["probe"] + cost["attend"]) / cost["dense"]
    after = sum(t * factor if part == "attention" else t for part, t in profile.items())
    without = sum(t for part, t in profile.items() if part != "attention")
    return {"change": 100 * (after / before - 1), "ceiling": 100 * (without / before - 1)}


def _change_case(name, profile, cost) -> Case:
    # The two ways to write it differ by a few float64 roundings of numbers below 1000.
    return Case(name, (profile, cost), expect=_amdahl(profile, cost), rtol=1e-9, atol=1e-9)


def _end_to_end_groups() -> list[Group]:
    at_4k, at_2k = _counted(4096, 32, 128), _counted(2061, 32, 128)
    return [
        Group("gain", 2, "Only the attention part shrinks; the change is counted from the whole "
              "token.",
              [_change_case("board-like", {"attention": 110.7, "rest": 43.4}, at_4k),
               _change_case("ms and µs", {"attention": 9e-6, "mlp": 2e-6, "norm": 1e-7}, at_2k),
               _change_case("no attention time", {"attention": 0.0, "mlp": 2.0}, at_4k)]),
        Group("probes", 1, "The probes are work too: they belong to what is left of attention.",
              [_change_case("only probes", {"attention": 3.0, "rest": 5.0},
                            {"dense": 100, "probe": 12, "attend": 1}),
               _change_case("a loss", {"attention": 3.0, "rest": 5.0}, _counted(1030, 32, 64))]),
        Group("shut gate", 1, "Where nothing is pruned the change is 0, the ceiling is not.",
              [_change_case("exact anyway", {"attention": 3.0, "rest": 5.0},
                            _counted(1000, 32, 64))]),
        Group("profiles", 1, "A profile without attention, with a negative time or with no time at "
              "all has no answer: raise ValueError.",
              [Case("negative", ({"attention": 3.0, "rest": -1.0}, at_4k), raises=ValueError),
               Case("no time", ({"attention": 0.0}, at_4k), raises=ValueError)]),
    ]


def _forgets_the_probes(profile, cost):
    return _amdahl(profile, {**cost, "probe": 0})


def _change_of_attention_alone(profile, cost):
    right = _amdahl(profile, cost)
    factor = (cost["probe"] + cost["attend"]) / cost["dense"]
    return {**right, "change": 100 * (factor - 1)}


def _shares_not_percent(profile, cost):
    return {key: value / 100 for key, value in _amdahl(profile, cost).items()}


def _gain_is_positive(profile, cost):
    return {key: -value for key, value in _amdahl(profile, cost).items()}


def _ceiling_keeps_the_probes(profile, cost):
    right = _amdahl(profile, cost)
    return {**right, "ceiling": _amdahl(profile, {**cost, "attend": 0})["change"]}


def _believes_every_profile(profile, cost):
    return _amdahl({part: abs(time) for part, time in profile.items()}, cost)


def _change_by_shares(profile, cost):
    total = sum(profile.values())
    if total <= 0 or any(t < 0 for t in profile.values()):
        raise ValueError("profile")
    try:
        share = profile["attention"] / total
    except KeyError:
        raise ValueError("profile") from None
    saved = 1 - cost["attend"] / cost["dense"] - cost["probe"] / cost["dense"]
    return {"ceiling": -share * 100, "change": -share * saved * 100}


HIDDEN = [
    Hidden("d10.a1", groups=_decode_cost_groups, alternative=_cost_by_ceiling, mutants={
        "n_probe samples in every block": _eight_probes_in_every_block,
        "a smooth quarter": _a_quarter_of_the_keys,
        "no gate": _no_gate,
        "only the two-block gate": _gate_of_two_blocks_only,
        "QK without PV": _keys_but_no_values,
        "accepts k = 0": _accepts_k_0,
    }),
    Hidden("d10.a2", groups=_select_groups, alternative=_by_sorting, mutants={
        "ties to the higher block": _mutant(ties=max),
        "budget k // 2": _mutant(budget=lambda k: k // 2),
        "budget k / 2, at least 1": _mutant(budget=lambda k: max(1, k // 2)),
        "all of k by importance": _mutant(budget=lambda k: k),
        "recency throws out importance": _mutant(recency="any"),
        "no recency": _mutant(recency="never"),
        "recency evicts the best": _mutant(worst=max),
        "recency evicts the latest of equals": _mutant(victim=max),
        "zeros are no importance": _zeros_count_as_no_importance,
        "ascending, not in order of choice": _ascending,
        "changes its input": _marks_what_it_took,
        "scores start at zero": _negative_scores_lose_to_zero,
    }),
    Hidden("d10.a3", groups=_end_to_end_groups, alternative=_change_by_shares, mutants={
        "probes forgotten": _forgets_the_probes,
        "attention alone": _change_of_attention_alone,
        "shares, not percent": _shares_not_percent,
        "positive gain": _gain_is_positive,
        "ceiling with probes": _ceiling_keeps_the_probes,
        "accepts negative times": _believes_every_profile,
    }),
]

SPARSE, DECODE = "course_lib/sparse.py", "course_lib/engine/decode.py"
GENERATE = "course_lib/engine/generate.py"

READINGS = {
    "d10.b1": {
        "decode_gate": Lines(SPARSE, first="return n > 2 * block_size",
                             symbol="sparse_decode_gate"),
        "asked_in": Lines(DECODE, first="sparse.sparse_decode_gate("),
        "prefill_gate": Lines("course_lib/sparse_prefill.py", first="<= 2 * block_size"),
        "first_n_k1": 65,
        "first_n_k32": 1025,
        "break_even_k16": 592,
    },
    "d10.b2": {
        "probe": Lines(SPARSE, first="step = _probe_step(length, n_probe)",
                       last="by_sample.max(axis=0)", symbol="_block_maxima"),
        "importance": Lines(SPARSE, first="first = _descending(importance)",
                            last="reserved = len(first)", symbol="select_heads"),
        "top_k": Lines(SPARSE, first="fill = rest[", symbol="select_heads"),
        "recency": Lines(SPARSE, first="if reserved < order.shape[1] < count",
                         last="order[h, slot] = last", symbol="select_heads"),
        "ties": Lines(SPARSE, first='kind="stable"', symbol="_descending"),
        "only_probe_blocks": Lines(SPARSE, first="chosen = order[h, reserved:]",
                                   symbol="select_heads"),
        "budget_k1": 1,
        "budget_k32": 16,
    },
    "d10.b3": {
        "reads_all_anyway": Lines(DECODE, first="self.blocks_read += [self.n_blocks]"),
        "first_token": [Lines(GENERATE, first="greedy(session.logits)"),
                        Lines(GENERATE, first="next_token, gap = _choose(sampler, session)")],
        "evaluation": Lines("course_lib/engine/engine.py",
                            first="run_prompt(self.model, self._prompt(ids))",
                            symbol="Engine.forward"),
        "same_blocks": True,
        "probe_is_cheap": False,
        "tail_block": False,
        "no_probe_at_k1": True,
        "always_recent": False,
    },
}
