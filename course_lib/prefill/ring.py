"""A ring of slots: one thread reads the next blocks of a store while the last one is attended.

A slot is free, being loaded, ready, or in use. The reader takes only free slots, and a slot is free
again only after the computation on it has ended, so nothing is overwritten that is still needed.
With one slot reading and computing take turns; the results do not depend on the number of slots.

Handing a block over costs a few calls of Python, whatever its size. Where reading is the faster of
the two, several blocks are ready by the time they are asked for, and can be handed over as one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Sequence
from itertools import takewhile, zip_longest
from typing import NamedTuple

import numpy as np

from course_lib.arrays import LayerRows, positive_int
from course_lib.prefill.store import BlockStore, Slot

Wanted = tuple[int, np.ndarray | None]
"""A block, and the KV heads of it that are read: bool [num_kv_heads], None for all."""


class Event(NamedTuple):
    """A bar of the timeline: what a slot was busy with, in seconds since the ring was made."""

    slot: int
    what: str  # "load" or "compute"
    layer: int
    block: int
    start: float
    end: float


class _Ready(NamedTuple):
    slot: Slot
    tokens: int


class _Mark:
    """Sent to the reader and back: what comes behind it was asked behind it."""


_Answer = _Ready | BaseException | _Mark | None


class Ring:
    """Streams blocks of a store through up to ``slots`` slots; blocks in memory need none.

    together: how many blocks may be handed over as one, if so many are ready; never more than half
    of the slots. ``timeline`` collects Events if ``trace``. load_seconds, compute_seconds and
    wait_seconds add up reading, what the caller did between two blocks, and how long it waited for
    a block. One caller at a time; `close` ends the thread.
    """

    def __init__(self, store: BlockStore, slots: int = 2, *, together: int = 1,
                 trace: bool = False) -> None:
        self.store, self.slots = store, store.make_slots(positive_int(slots, "slots"))
        # Into the other half of the slots blocks are read meanwhile.
        self.together = min(positive_int(together, "together"), max(len(self.slots) // 2, 1))
        self.timeline: list[Event] | None = [] if trace else None
        self.load_seconds = self.compute_seconds = self.wait_seconds = 0.0
        self._began = time.perf_counter()
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        for slot in self.slots:
            self._free.put(slot)
        # The ring's slots, as far as they are ready, and the None behind the last of them.
        self._ready: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._behind: list[_Answer] = []  # taken from _ready too early: the one to take next
        self._requests: queue.SimpleQueue[tuple[int, list[Wanted]] | _Mark | None]
        self._requests = queue.SimpleQueue()
        self._stop = False  # for the reader
        self._streaming = False
        self._certain = True  # which slots are free: Ctrl-C may strike between any two lines
        self._reader: threading.Thread | None = None

    def stream(
        self, layer: int, wanted: Sequence[Wanted], meanwhile: Callable[[], None] | None = None
    ) -> Generator[tuple[list[int], LayerRows], None, None]:
        """Yield (blocks, rows) in the order of ``wanted``: one block or, up to ``together``, those
        that are ready, one behind the other. Rows hold until the next are asked for.

        ``meanwhile`` is called once, when the reader has begun and no block is waited for yet.
        Raises what the store raises for a block that cannot be read, in that block's place; the
        ring can be used again afterwards, if the store can. RuntimeError while another stream of
        the ring is not ended: their blocks would be mixed up.
        """
        if self._streaming and self._certain:
            raise RuntimeError("the ring has another stream, which is not ended: close it first")
        if not self._certain:
            self._make_certain()
        rows = [self.store.resident(layer, block) for block, _ in wanted]
        away = [want for want, kept in zip(wanted, rows, strict=True) if kept is None]
        ended, known = not away, False
        try:
            self._streaming = True
            if away:
                self._start()
                self._stop = False
                self._requests.put((layer, away))
            if meanwhile is not None:
                meanwhile()
            at = 0
            while at < len(wanted):
                slots: list[Slot] = []
                if (kept := rows[at]) is None:
                    ready = self._wait()
                    if not isinstance(ready, _Ready):
                        ended = ready is None
                        raise ready if isinstance(ready, BaseException) else RuntimeError(
                            "the reader ended early")
                    away_too = takewhile(lambda kept: kept is None, rows[at : at + self.together])
                    slots, kept = self._with_those_behind(ready, len(list(away_too)))
                else:
                    self.store.count_read(kept.k.shape[1], wanted[at][1])
                blocks = [block for block, _ in wanted[at : at + max(len(slots), 1)]]
                at += len(blocks)
                start = time.perf_counter()
                try:
                    yield blocks, kept
                finally:
                    end = time.perf_counter()
                    self.compute_seconds += end - start
                    for block, slot in zip_longest(blocks, slots):
                        self._note(slot, "compute", layer, block, start, end)
                    for slot in slots:
                        self._free.put(slot)  # only now may the reader overwrite it
            self._certain, known = False, True
        except GeneratorExit:  # the caller has had enough
            self._certain, known = False, True
            raise
        except BaseException:
            self._certain = False
            raise
        finally:
            self._streaming = False
            self._stop = True
            if not known:
                self._make_certain()
            while not ended and known:  # also after an error: every slot must come back
                left = self._take()
                ended = left is None
                if isinstance(left, _Ready):
                    self._free.put(left.slot)
            self._certain = True

    def close(self) -> None:
        """End the reader; the ring cannot be used any more."""
        if self._reader is not None:
            self._stop = True
            self._free.put(None)
            self._requests.put(None)
            self._reader.join()
            self._reader = None

    def __enter__(self) -> Ring:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._reader is None:
            reader = threading.Thread(target=self._read, name="prefetch", daemon=True)
            reader.start()
            self._reader = reader

    def _make_certain(self) -> None:
        """After a stream that ended nobody knows where: nothing is being read, all slots are
        free."""
        self._stop = True
        self._free.put(None)  # the reader may wait for a slot that was lost on its way here
        if self._reader is not None:
            mark = _Mark()
            self._requests.put(mark)
            while self._take() is not mark:
                pass
        while not self._free.empty():
            self._free.get()
        for slot in self.slots:
            self._free.put(slot)
        self._streaming, self._certain = False, True

    def _wait(self) -> _Answer:
        start = time.perf_counter()
        ready = self._take()
        self.wait_seconds += time.perf_counter() - start
        return ready

    def _take(self) -> _Answer:
        return self._behind.pop() if self._behind else self._ready.get()

    def _with_those_behind(self, first: _Ready, most: int) -> tuple[list[Slot], LayerRows]:
        """The slots of a ready block and of those behind it, as far as they are ready and lie side
        by side; and the rows of all."""
        slots, tokens = [first.slot], first.tokens
        while len(slots) < most and tokens == len(slots) * self.store.block_size:
            if self._ready.empty():  # nobody else takes anything out
                break
            self._behind.append(self._ready.get())
            behind = self._behind[0]
            if not isinstance(behind, _Ready) or not behind.slot.is_behind(slots[-1]):
                break
            slots.append(behind.slot)
            tokens += behind.tokens
            self._behind.clear()
        return slots, first.slot.rows(tokens)

    def _read(self) -> None:
        """The thread: request after request, each answered by its blocks and a None."""
        while (request := self._requests.get()) is not None:
            if isinstance(request, _Mark):
                self._ready.put(request)
                continue
            layer, away = request
            try:
                for block, heads in away:
                    slot = self._free.get()
                    if slot is None or self._stop:
                        self._free.put(slot)
                        break
                    try:
                        start = time.perf_counter()
                        tokens = self.store.load(layer, block, slot, heads)
                        end = time.perf_counter()
                    except BaseException:
                        self._free.put(slot)
                        raise
                    self.load_seconds += end - start
                    self._note(slot, "load", layer, block, start, end)
                    self._ready.put(_Ready(slot, tokens))
            except BaseException as error:  # the caller is told, in the block's place
                self._ready.put(error)
            self._ready.put(None)

    def _note(self, slot: Slot | None, what: str, layer: int, block: int, start: float,
              end: float) -> None:
        if self.timeline is not None:
            number = -1 if slot is None else slot.number
            self.timeline.append(Event(number, what, layer, block, start - self._began,
                                       end - self._began))
