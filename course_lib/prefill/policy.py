"""What a prefill policy is: for a chunk of queries it chooses the blocks of history that are read.

The history is kept in blocks of a store; the chunk itself is always read as a whole. Every choice
says for each block why.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from course_lib.arrays import positive_int
from course_lib.attention_common import check_query
from course_lib.prefill.density import DensityStats
from course_lib.prefill.trace import BlockTrace, Trace, reason_codes

if TYPE_CHECKING:
    from course_lib.prefill.store import BlockStore

@dataclass(frozen=True, eq=False)
class BlockChoice:
    """The blocks of history that a chunk reads in one layer.

    by_head: ascending int64 block numbers; one array that all KV heads share, or one per KV head.
    trace: a BlockTrace of every block of history (for each KV head, where each has its own list).
    mask_cells: of the policy's own mask, before heads were joined: how many cells (query head,
    query block, block) it keeps of how many; None where the lists are all there is.
    """

    by_head: tuple[np.ndarray, ...]
    trace: Sequence[BlockTrace] = ()
    mask_cells: tuple[int, int] | None = None

    def of_head(self, kv_head: int) -> np.ndarray:
        """The blocks that a KV head reads."""
        return self.by_head[kv_head if len(self.by_head) > 1 else 0]

    @property
    def union(self) -> np.ndarray:
        """The blocks that at least one KV head reads, ascending int64."""
        return np.unique(np.concatenate(self.by_head)) if self.by_head else np.empty(0, np.int64)


class PrefillPolicy(ABC):
    """Chooses blocks chunk by chunk; may keep notes of the keys it has seen, until `reset`.

    block_size: tokens of a block of the store that it chooses from. `density` counts what was
    chosen and read; see `get_density_stats`.
    """

    name: str
    supports_prefill = True
    supports_decode = False

    def __init__(self, block_size: int = 128) -> None:
        self.block_size = positive_int(block_size, "block_size")
        self.density = DensityStats()

    def on_block_written(self, layer: int, block: int, k: np.ndarray) -> None:  # noqa: B027
        """Take notes of a block while its keys are near.

        k: float32 [num_kv_heads, up to block_size, d], rotated. A block that was written in part
        is given again when it has grown.
        """

    @abstractmethod
    def select_blocks(self, q_chunk: np.ndarray, store: BlockStore, layer: int) -> BlockChoice:
        """Choose among the blocks that `store` holds of `layer`, all before the chunk.

        q_chunk: float32 [num_heads, tokens, d], rotated.
        """

    def reset(self) -> None:
        """Forget everything about the request before; the next one is as on a new policy."""
        self.density.reset()

    def get_density_stats(self) -> dict:
        """What was chosen and read since the last reset; see `DensityStats`."""
        return self.density.get_density_stats()

    def print_density_stats(self) -> None:
        """Print `get_density_stats` in a few lines."""
        self.density.print_density_stats()

    def reset_stats(self) -> None:
        """Count anew; what the policy knows of the keys stays."""
        self.density.reset()


POLICIES: dict[str, Callable[..., PrefillPolicy]] = {}


def register(policy: type[PrefillPolicy]) -> type[PrefillPolicy]:
    """Make a policy known under its name; a decorator."""
    POLICIES[policy.name] = policy
    return policy


def make_policy(name: str, **options) -> PrefillPolicy:
    """A new policy of that name; ValueError, listing the names, if there is none."""
    if not isinstance(name, str) or name not in POLICIES:
        raise ValueError(f"unknown prefill policy {name!r}; there are {', '.join(POLICIES)}")
    return POLICIES[name](**options)


def check_chunk(q_chunk: Any, store: BlockStore) -> np.ndarray:
    """Return the queries of a chunk, finite float32 [num_heads, tokens, d]; ValueError unless they
    fit the store's keys."""
    q = check_query(q_chunk, ndim=3)
    if len(q) % store.num_kv_heads or q.shape[2] != store.head_dim:
        raise ValueError(f"q {q.shape} does not fit a store of {store.num_kv_heads} KV heads with "
                         f"{store.head_dim} numbers a row.")
    return q


def everything(blocks: int, reason: str) -> BlockChoice:
    """All blocks, for one reason; there is nothing to rank."""
    chosen, none = np.ones((1, blocks), bool), np.full((1, blocks), np.nan)
    trace = Trace(none, none, reason_codes(chosen, reason), sums=False)
    return BlockChoice((np.arange(blocks, dtype=np.int64),), trace)
