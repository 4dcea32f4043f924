"""The whole XAttention policy against the stored pipelines: from keys of a store to blocks."""

import numpy as np
import pytest

from course_lib.prefill import BlockStore, XAttentionBSAPolicy
from tests.oracle.xattn_golden import inputs, load, names


def choice_of(name, threshold, **options):
    meta, (q, k, v) = load(name).meta, inputs(name)
    block, history = meta["cpu_block"], meta["hist_blocks"] * meta["cpu_block"]
    policy = XAttentionBSAPolicy(threshold=threshold, stride=meta["stride"], block_size=block,
                                 **options)
    with BlockStore(1, len(k), meta["d"], block_size=block) as store:
        for first in range(0, history, block):
            rows = k[:, first : first + block]
            store.append(0, rows, v[:, first : first + block])
            policy.on_block_written(0, first // block, rows)
        return policy.select_blocks(q, store, 0)


@pytest.mark.parametrize("estimate_from", ["f32", "kv", "int8"])
@pytest.mark.parametrize("name", [name for name in names("S") if name[:3] != "S08"])
def test_the_seeds_list(name, estimate_from):
    """Synthetic keys: as int8 rows they choose the same blocks at every threshold.

    Not S08: four of its block sums are equal up to the last bit, so a rounding decides.
    """
    for key, chosen in load(name).meta["selected"].items():
        choice = choice_of(name, int(key[1:]) / 100, compat="upstream", aggregate="majority",
                           estimate_from=estimate_from)
        assert choice.by_head[0].tolist() == chosen["majority"]
        assert [t.block for t in choice.trace if t.selected] == chosen["majority"]


def test_needles_in_different_blocks_are_kept_by_mass_and_by_own_lists():
    (name,) = names("S06")
    needles = [1, 2, 3, 4]  # KV head h looks for keys in block h + 1
    for threshold in (0.8, 0.9, 0.95):
        assert choice_of(name, threshold).by_head[0].tolist() == [0, 5]
        mean = choice_of(name, threshold, aggregate="mean_score").by_head[0]
        assert set(needles) <= set(mean.tolist())
        own = choice_of(name, threshold, aggregate="per_head").by_head
        assert all(block in ids for block, ids in zip(needles, own, strict=True))
        assert sum(map(len, own)) < 4 * 6


@pytest.mark.parametrize("name", names("S"))
def test_threshold_one_reads_everything(name):
    for rule in ("majority", "any", "mean_score", "per_head"):
        lists = choice_of(name, 1.0, aggregate=rule).by_head
        assert all(np.array_equal(ids, np.arange(load(name).meta["hist_blocks"])) for ids in lists)
