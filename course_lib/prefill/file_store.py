"""Blocks offloaded to a file, so that a context may be larger than the memory for it.

The file is a page of header, then [layer][block][K then V]. A part, K or V of a block, begins at a
multiple of 4,096 bytes and holds [num_kv_heads, block_size, d] float32, so that K, and one KV head
of it, is read alone. Reads go into memory that is there already. What is read back must be what was
written: a sum of its words is kept for every KV head of a part.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import numpy as np

from course_lib.arrays import F32, LayerRows, positive_int, real_number
from course_lib.errors import CourseError
from course_lib.prefill.offload_file import HEADER, PAGE, OffloadFile
from course_lib.prefill.store import BlockStore, Slot


class BlockFile(BlockStore):
    """A BlockStore whose blocks lie in a file of ``folder``, which is removed at ``close``.

    capacity: the most tokens a layer may hold; the file is made for them at once, so that a full
    disk is noticed at the start. ram_budget: bytes of K and V that may be in memory: the slots of a
    ring, and blocks, the first ones written, for what is left; None means the slots alone. One more
    slot is needed to write. throttle: bytes per second that reads are slowed down to, to show slow
    storage on a fast machine. A read or write that fails is a CourseError; it closes the store.
    """

    def __init__(self, num_layers: int, num_kv_heads: int, head_dim: int, *, capacity: int,
                 folder: str | Path | None = None, block_size: int = 128,
                 ram_budget: int | None = None, throttle: float | None = None) -> None:
        super().__init__(num_layers, num_kv_heads, head_dim, block_size=block_size)
        self.capacity = positive_int(capacity, "capacity")
        self.ram_budget = None if ram_budget is None else positive_int(ram_budget, "ram_budget")
        if throttle is not None and not real_number(throttle, "throttle") > 0:
            raise ValueError(f"throttle must be above 0 bytes per second, not {throttle}.")
        if ram_budget is not None and ram_budget < self.block_bytes:
            raise CourseError(
                f"A RAM budget of {ram_budget:,} bytes is smaller than one block, "
                f"{self.block_bytes:,} bytes; give a larger budget or a smaller block size.")
        self.throttle = throttle
        self._due = 0.0
        self._blocks: dict[tuple[int, int], Slot] = {}  # kept in memory as well
        self._slots: list[Slot] = []
        self._most_blocks = -(-self.capacity // self.block_size)
        self._part_bytes = self.block_bytes // 2
        self._part_stride = -(-self._part_bytes // PAGE) * PAGE
        self._padding = memoryview(bytearray(self._part_stride - self._part_bytes))
        self._words = np.dtype(np.uint64 if self._part_bytes // num_kv_heads % 8 == 0
                               else np.uint32)
        self._sums = np.zeros((num_layers, self._most_blocks, 2, num_kv_heads), np.uint64)
        self._staging = Slot(-1, self.block_shape)
        self.peak_resident_bytes = self.resident_bytes
        size = HEADER + num_layers * self._most_blocks * 2 * self._part_stride
        self._file = OffloadFile(folder, size)

    @property
    def path(self) -> Path:
        """The file, as long as the store is open."""
        return self._file.path

    @property
    def resident_bytes(self) -> int:
        """Bytes of K and V that are in memory now: kept blocks, slots, and the one for writing."""
        return (len(self._blocks) + len(self._slots) + 1) * self.block_bytes

    def append_checked(self, layer: int, k: np.ndarray, v: np.ndarray) -> None:
        have = self.length(layer)
        if have + k.shape[1] > self.capacity:
            raise ValueError(f"{k.shape[1]} tokens do not fit: layer {layer} holds {have} of at "
                             f"most {self.capacity}.")
        super().append_checked(layer, k, v)

    def make_slots(self, count: int) -> tuple[Slot, ...]:
        """Up to ``count`` slots for a ring, as many as the budget holds, at least one.

        Blocks that are kept in memory give way to them. A second ring gets slots of its own.
        """
        self._require_open()
        made = Slot.side_by_side(max(self._room(count), 0), self.block_shape, len(self._slots))
        if not made:
            raise CourseError(f"The RAM budget of {self.ram_budget:,} bytes is used up by "
                              f"{len(self._slots)} slots; give a larger one.")
        self._slots += made
        while self._blocks and self._over_budget(0):
            self._blocks.popitem()
        self._note_peak()
        return made

    def close(self) -> None:
        """Remove the file and give the memory back."""
        super().close()
        self._blocks.clear()
        self._file.close()

    def span(self, layer: int) -> LayerRows | None:
        """None: the rows are in a file."""
        self._require_open()
        return None

    def _room(self, wanted: int) -> int:
        """How many of so many slots the budget has room for."""
        if self.ram_budget is None:
            return wanted
        return min(wanted, self.ram_budget // self.block_bytes - len(self._slots))

    def _over_budget(self, more: int) -> bool:
        """Whether slots, kept blocks and so many more take more than the budget."""
        held = len(self._slots) + len(self._blocks) + more
        return held * self.block_bytes > (self.ram_budget or 0)

    def _note_peak(self) -> None:
        self.peak_resident_bytes = max(self.peak_resident_bytes, self.resident_bytes)

    def _offset(self, layer: int, block: int, part: int, head: int = 0) -> int:
        place = (layer * self._most_blocks + block) * 2 + part
        return HEADER + place * self._part_stride + head * (self._part_bytes // self.num_kv_heads)

    def _write(self, layer: int, first: int, k: np.ndarray, v: np.ndarray) -> None:
        done = 0
        while done < k.shape[1]:
            block, start = divmod(first + done, self.block_size)
            part = slice(done, done + min(self.block_size - start, k.shape[1] - done))
            self._write_block(layer, block, start, k[:, part], v[:, part])
            done = part.stop

    def _write_block(self, layer: int, block: int, first: int, k: np.ndarray,
                     v: np.ndarray) -> None:
        """Write the whole block anew, with its earlier tokens, from the slot for writing."""
        slot, kept = self._staging, self._blocks.get((layer, block))
        if first and kept is not None:
            slot.both[:, :, :first] = kept.both[:, :, :first]
        elif first:
            self._load(layer, block, slot, None)
        tokens = slice(first, first + k.shape[1])
        slot.k[:, tokens], slot.v[:, tokens] = k, v
        with self._closing_on_error():
            self._sums[layer, block] = self._sum(slot.both)
            self._file.write(self._buffers(slot), self._offset(layer, block, 0))
        if kept is None and not self._over_budget(1):
            kept = self._blocks[layer, block] = Slot(-1, self.block_shape)
            self._note_peak()
        if kept is not None:
            kept.both[...] = slot.both

    def _buffers(self, slot: Slot) -> list[memoryview]:
        """A slot's bytes as the file has them."""
        padding = [self._padding] if self._padding.nbytes else []
        return [*slot.parts[0], *padding, *slot.parts[1]]

    def _resident(self, layer: int, block: int, tokens: int) -> LayerRows | None:
        kept = self._blocks.get((layer, block))
        return None if kept is None else kept.rows(tokens)

    def _keys(self, layer: int, block: int, tokens: int) -> np.ndarray:
        if (kept := self._blocks.get((layer, block))) is not None:
            return kept.rows(tokens).k
        k = np.empty(self.block_shape, F32)
        with self._closing_on_error():
            self._read([k.reshape(-1).view(np.uint8).data], self._offset(layer, block, 0))
            self._check(k, self._sums[layer, block, 0], layer, block)
        return k[:, :tokens]

    def _load(self, layer: int, block: int, slot: Slot, heads: np.ndarray | None) -> None:
        with self._closing_on_error():
            if heads is None:
                self._read(self._buffers(slot), self._offset(layer, block, 0))
                self._check(slot.both, self._sums[layer, block], layer, block)
                return
            for part in (0, 1):
                for run in _runs(heads):
                    self._read(slot.parts[part][run], self._offset(layer, block, part, run.start))
                    self._check(slot.both[part, run], self._sums[layer, block, part, run], layer,
                                block)

    def _read(self, buffers: list[memoryview], offset: int) -> None:
        start = time.perf_counter()
        self._file.read_into(buffers, offset)
        if self.throttle is not None:  # a schedule, so that one late wake-up is made up for
            size = sum(buffer.nbytes for buffer in buffers)
            self._due = max(self._due, start) + size / self.throttle
            time.sleep(max(0.0, self._due - time.perf_counter()))

    def _sum(self, array: np.ndarray) -> np.ndarray:
        """The sum, modulo 2^64, of the words of each KV head of [..., block_size, d]: uint64."""
        words = array.reshape(*array.shape[:-2], -1).view(self._words)
        return np.add.reduce(words, axis=-1, dtype=np.uint64)

    def _check(self, read: np.ndarray, sums: np.ndarray, layer: int, block: int) -> None:
        """Raise CourseError unless the words of what was read have these sums."""
        if (self._sum(read) != sums).any():
            raise CourseError(
                f"{self.path} no longer holds what was written: block {block} of layer {layer} has "
                "been changed by something else; run the prompt again with another offload folder.")

    @contextlib.contextmanager
    def _closing_on_error(self):
        """A store that cannot read or write is of no use: its file goes."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _runs(heads: np.ndarray) -> list[slice]:
    """Neighbouring True of bool [n] as slices."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], heads, [False])).astype(np.int8)))
    return [slice(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
