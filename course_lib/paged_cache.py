"""A KV cache in blocks that are found through a table and take memory when their tokens arrive.

The engine's own cache (kvcache.py) keeps all rows of a head in one piece; serving engines that
share memory among many conversations use a table instead. Source: Kwon et al. 2023
(PagedAttention); the guard words are as old as memory errors.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from course_lib.arrays import (
    F32,
    LayerRows,
    as_float32,
    positive_int,
    require_finite,
    whole_number,
)
from course_lib.errors import CourseError

GUARD = 64  # bytes at both ends of a slot that nobody may write: a cache line
CANARY = np.frombuffer(b"CANARY42" * (GUARD // 8), np.uint8)
PAGE = mmap.PAGESIZE
_PRESENT, _OWN = np.uint64(63), np.uint64(56)  # bits of an entry of /proc/self/pagemap


class BlockNotStoredError(ValueError):
    """A row was asked for whose block has no memory: never written, or evicted."""


def blocks_needed(tokens: int, block_size: int = 32) -> int:
    """Blocks that hold so many tokens, the last one perhaps in part: ceil(tokens / block_size).

    Raises ValueError for tokens below 0 and a block_size below 1.
    """
    tokens, block_size = whole_number(tokens, "tokens"), positive_int(block_size, "block_size")
    if tokens < 0:
        raise ValueError(f"tokens must be at least 0, not {tokens}.")
    return -(-tokens // block_size)


def row_offset(table: Sequence[int | None], token: int, head: int, num_kv_heads: int,
               head_dim: int, block_size: int = 32, *, guard: int = 0,
               slot_bytes: int | None = None) -> int:
    """Byte offset of a K row: token -> block -> slot (by the table) -> head -> row.

    A slot holds, behind `guard` bytes, K and then V as float32 [num_kv_heads, block_size,
    head_dim]; slots follow each other every `slot_bytes` (default: no gap). Raises
    BlockNotStoredError where the table has no slot for the block, ValueError for a token outside
    the table and a head that does not exist.
    """
    token, head = whole_number(token, "token"), whole_number(head, "head")
    if not 0 <= token < len(table) * block_size:
        raise ValueError(f"token {token} is outside the table of {len(table)} blocks.")
    if not 0 <= head < num_kv_heads:
        raise ValueError(f"head {head} does not exist; the cache has {num_kv_heads}.")
    block, row = divmod(token, block_size)
    slot = table[block]
    if slot is None:
        raise BlockNotStoredError(f"block {block} of token {token} has no memory: it was never "
                                  "written, or it was evicted.")
    row_bytes = 4 * head_dim
    if slot_bytes is None:
        slot_bytes = 2 * num_kv_heads * block_size * row_bytes + 2 * guard
    return slot * slot_bytes + guard + (head * block_size + row) * row_bytes


class Damage(NamedTuple):
    """A block whose guard bytes were overwritten, before its rows ("front") or behind ("back")."""

    block: int
    side: str


def audit(memory: np.ndarray, table: Sequence[int | None], tokens: int, canary: np.ndarray,
          block_size: int = 32) -> dict[str, Any]:
    """What a cache of so many tokens needs, lacks, and which guards are broken.

    memory: uint8 [slots, bytes]; a slot in use begins and ends with `canary`, uint8 [c]. Returns
    "needed", the blocks that hold the tokens; "missing", those of them without a slot; "damaged",
    [block, "front" or "back"] of every block that has a slot, in order. Raises ValueError for
    tokens below 0 and for a slot that two blocks share.
    """
    used = [slot for slot in table if slot is not None]
    if len(set(used)) != len(used):
        raise ValueError("two blocks share a slot; each would overwrite the other's rows.")
    needed, size = blocks_needed(tokens, block_size), len(canary)
    missing = [b for b in range(needed) if b >= len(table) or table[b] is None]
    damaged = []
    for block, slot in enumerate(table):
        if slot is None:
            continue
        for side, guard in (("front", memory[slot, :size]), ("back", memory[slot, -size:])):
            if not np.array_equal(guard, canary):
                damaged.append([block, side])
    return {"needed": needed, "missing": missing, "damaged": damaged}


class PagedCache:
    """K and V rows of one layer and one sequence, float32, with room for `max_tokens`.

    The room is reserved as addresses; memory is taken page by page, when rows are written. `table`
    has one entry per block so far: its slot, or None after eviction; `memory` is the room as uint8,
    for those who look under the table. Raises ValueError for counts below 1, MemoryError where
    there are no addresses left.
    """

    def __init__(self, num_kv_heads: int, head_dim: int, max_tokens: int, *,
                 block_size: int = 32) -> None:
        self.num_kv_heads = positive_int(num_kv_heads, "num_kv_heads")
        self.head_dim = positive_int(head_dim, "head_dim")
        self.block_size = positive_int(block_size, "block_size")
        self.max_tokens = positive_int(max_tokens, "max_tokens")
        self.table: list[int | None] = []
        self.length = 0
        rows = 2 * 4 * self.num_kv_heads * self.block_size * self.head_dim
        self._back = GUARD + rows  # where the guard behind the rows begins
        # Whole pages, so that a slot can be given back alone.
        self.slot_bytes = -(-(self._back + GUARD) // PAGE) * PAGE
        slots = blocks_needed(self.max_tokens, self.block_size)
        self._free = list(range(slots - 1, -1, -1))
        try:
            self._mapping = mmap.mmap(-1, slots * self.slot_bytes,
                                      flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{slots * self.slot_bytes} bytes of addresses are not "
                              "there") from error
        if hasattr(mmap, "MADV_NOHUGEPAGE"):
            try:
                self._mapping.madvise(mmap.MADV_NOHUGEPAGE)  # else 2 MB come at the first touch
            except OSError:  # a system without large pages
                pass
        self.memory = np.frombuffer(self._mapping, np.uint8)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of addresses, from the beginning on."""
        return len(self.memory)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slots that blocks have now."""
        return self.slot_bytes * sum(slot is not None for slot in self.table)

    def append(self, k: Any, v: Any) -> None:
        """Append rows of t >= 0 tokens; slots are taken as blocks begin.

        k, v: real numbers [num_kv_heads, t, head_dim]. Raises ValueError for another shape, NaN or
        infinity, CourseError beyond max_tokens, BlockNotStoredError where the block that is to be
        continued was evicted; then nothing is written.
        """
        k, v = as_float32(k, "k", 3), as_float32(v, "v", 3)
        want = (self.num_kv_heads, k.shape[1], self.head_dim)
        if k.shape != want or v.shape != want:
            raise ValueError(f"k and v must both have shape [{self.num_kv_heads}, t, "
                             f"{self.head_dim}], not {k.shape}, {v.shape}.")
        require_finite(k, "k", first_token=self.length)
        require_finite(v, "v", first_token=self.length)
        end = self.length + k.shape[1]
        if end > self.max_tokens:
            raise CourseError(f"{end} tokens do not fit this cache, which has room for "
                              f"{self.max_tokens}; make a larger one.")
        if self.length % self.block_size and k.shape[1]:
            self._slot(len(self.table) - 1)
        while len(self.table) < blocks_needed(end, self.block_size):
            self.table.append(self._take_slot())
        done = 0
        while done < k.shape[1]:
            block, first = divmod(self.length + done, self.block_size)
            count = min(self.block_size - first, k.shape[1] - done)
            for rows, new in zip(self._rows(block), (k, v), strict=True):
                rows[:, first : first + count] = new[:, done : done + count]
            done += count
        self.length = end

    def rows(self, block: int) -> LayerRows:
        """The rows of a block's tokens so far, as read-only views [num_kv_heads, tokens, head_dim].

        Raises ValueError for a block that was never begun, BlockNotStoredError after eviction.
        """
        block = whole_number(block, "block")
        if not 0 <= block < len(self.table):
            raise ValueError(f"block {block} was never begun; the cache has {len(self.table)}.")
        tokens = min(self.block_size, self.length - block * self.block_size)
        k, v = (rows[:, :tokens] for rows in self._rows(block))
        k.flags.writeable = v.flags.writeable = False
        return LayerRows(k, v)

    def gather(self) -> LayerRows:
        """All rows in one piece, copied in the order of the tokens, for attention."""
        blocks = [self.rows(b) for b in range(len(self.table))]
        empty = np.empty((self.num_kv_heads, 0, self.head_dim), F32)
        return LayerRows(np.concatenate([empty, *(b.k for b in blocks)], axis=1),
                         np.concatenate([empty, *(b.v for b in blocks)], axis=1))

    def row_address(self, token: int, head: int) -> int:
        """Byte offset of a stored K row in the reserved room; ValueError as row_offset."""
        if not 0 <= token < self.length:
            raise ValueError(f"token {token} is not stored; the cache holds {self.length}.")
        return row_offset(self.table, token, head, self.num_kv_heads, self.head_dim,
                          self.block_size, guard=GUARD, slot_bytes=self.slot_bytes)

    def evict(self, block: int) -> None:
        """Give a block's memory back to the system; its table entry becomes None.

        Raises ValueError for a block that was never begun, BlockNotStoredError for one that is
        already gone.
        """
        block = whole_number(block, "block")
        if not 0 <= block < len(self.table):
            raise ValueError(f"block {block} was never begun; the cache has {len(self.table)}.")
        slot = self._slot(block)
        # The pages go back to the system, and read as zeros when they come again.
        self._mapping.madvise(mmap.MADV_DONTNEED, slot * self.slot_bytes, self.slot_bytes)
        self.table[block] = None
        self._free.append(slot)

    def damaged(self) -> list[Damage]:
        """The blocks whose guard bytes are no longer what was written there, front before back."""
        slots = self.memory.reshape(-1, self.slot_bytes)[:, : self._back + GUARD]
        found = audit(slots, self.table, self.length, CANARY, self.block_size)
        return [Damage(block, side) for block, side in found["damaged"]]

    def own_pages(self) -> int | None:
        """Pages of the reserved room that are memory of this process; None if it is not known.

        As Linux's page table says (/proc/self/pagemap). A page that was only ever read is the
        system's shared page of zeros, and is not counted.
        """
        first = self.memory.ctypes.data // PAGE
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(8 * first)
                entries = np.frombuffer(file.read(8 * (self.reserved_bytes // PAGE)), np.uint64)
        except OSError:
            return None
        return int(((entries >> _PRESENT) & (entries >> _OWN) & np.uint64(1)).sum())

    def _slot(self, block: int) -> int:
        slot = self.table[block]
        if slot is None:
            raise BlockNotStoredError(f"block {block} was evicted; its rows must be computed or "
                                      "loaded again.")
        return slot

    def _take_slot(self) -> int:
        slot = self._free.pop()  # there are as many as max_tokens can need
        memory = self.memory[slot * self.slot_bytes :]
        memory[:GUARD] = memory[self._back : self._back + GUARD] = CANARY
        return slot

    def _rows(self, block: int) -> np.ndarray:
        """K and V of a block's slot: float32 [2, num_kv_heads, block_size, head_dim]."""
        memory = self.memory[self._slot(block) * self.slot_bytes :][GUARD : self._back]
        return memory.view(F32).reshape(2, self.num_kv_heads, self.block_size, self.head_dim)
