"""What sparse prefill does to a prompt: which positions see nothing, and what selection costs."""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.arrays import positive_int
from course_lib.sparse import n_blocks, probe_positions
from course_lib.sparse_prefill import prefill_groups


def blind_fraction(
    selections: Sequence[Sequence[int] | None], batch: int, n: int, block_size: int = 32
) -> float:
    """The share of prompt positions that attend to nothing, for one head.

    selections: for every mini-batch of `batch` tokens the blocks that all its queries may read,
    in any order, or None where it is exact. The set is clipped causally: the query at position p
    reads the tokens 0 … p of these blocks. Raises ValueError where the number of selections is
    not that of the mini-batches of n tokens, and for sizes below 1.
    """
    batch, n = positive_int(batch, "batch"), positive_int(n, "n")
    block_size = positive_int(block_size, "block_size")
    groups = prefill_groups(0, n, batch)
    if len(selections) != len(groups):
        raise ValueError(f"{n} tokens have {len(groups)} mini-batches of {batch}, but there are "
                         f"{len(selections)} selections.")
    blind = 0
    for (first, end), blocks in zip(groups, selections, strict=True):
        if blocks is not None:
            seen_from = min((b * block_size for b in blocks), default=end)
            blind += min(max(seen_from - first, 0), end - first)
    return blind / n


def prefill_work(
    n: int, k_blocks: int | None = None, group: int = 256, head_dim: int = 128,
    block_size: int = 32, n_probe: int = 8,
) -> dict[str, int]:
    """Multiply-adds of one head for a prompt of n tokens: {"probe", "attend"}.

    k_blocks None: exact, every query reads the tokens up to its own. Else one selection per
    `group` tokens inside each mini-batch of 256: its last query probes every block so far, and
    each query reads min(k_blocks, blocks so far) blocks, clipped at its own position as if they
    were the last ones. That is an upper bound: a block behind the query costs nothing. Contexts of
    at most two blocks are exact. Raises ValueError for a size below 1.
    """
    n, head_dim = positive_int(n, "n"), positive_int(head_dim, "head_dim")
    exact = n * (n + 1) // 2
    if k_blocks is None:
        return {"probe": 0, "attend": 2 * exact * head_dim}
    k_blocks = positive_int(k_blocks, "k_blocks")
    probed = attended = 0
    for first, end in prefill_groups(0, n, group=group):
        exact_here = end <= 2 * block_size
        if not exact_here:
            last = n_blocks(end, block_size) - 1
            probed += last * len(probe_positions(0, end, block_size, n_probe)) if last else 0
            probed += len(probe_positions(last, end, block_size, n_probe))
        most = end if exact_here else k_blocks * block_size
        attended += sum(min(p + 1, most) for p in range(first, end))
    return {"probe": probed * head_dim, "attend": 2 * attended * head_dim}
