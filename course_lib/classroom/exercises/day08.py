"""Public checks of day 8: the byte ledger, addresses through a block table, an audit of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from course_lib import paged_cache
from course_lib.classroom.exercises import Case, Exercise, Reading
from course_lib.kvcache import kv_ledger

CANARY = np.frombuffer(b"CANARY42", np.uint8)

# --- d08.a1 ------------------------------------------------------------------------------------


def ledger_case(name: str, *shape: int) -> Case:
    """The library's ledger without its line of probe keys."""
    rows = {row.name: (row.scan_bytes, row.memory_bytes) for row in kv_ledger(*shape)
            if row.name != "q8 + probe keys"}
    return Case(name, shape, expect=rows)


def _ledger_cases() -> list[Case]:
    return [
        ledger_case("the article's shape, one layer, one token", 1, 8, 128, 1),
        ledger_case("the shipped model, 2,061 tokens", 3, 2, 64, 2061),
        ledger_case("a head of 80 values", 2, 4, 80, 10),
        Case("no tokens", (1, 8, 128, 0), raises=ValueError),
        Case("no layers", (0, 8, 128, 1), raises=ValueError),
    ]


# --- d08.a2 ------------------------------------------------------------------------------------


def address_case(name: str, table: Sequence[int | None], token: int, head: int,
                 *shape: int) -> Case:
    """Where a K row lies; shape: KV heads, head_dim, block size (8, 128, 32 if left out)."""
    heads, d, size = shape or (8, 128, 32)
    return Case(name, (list(table), token, head, *shape),
                expect=paged_cache.row_offset(table, token, head, heads, d, size))


def _address_cases() -> list[Case]:
    return [
        address_case("the first token", [0], 0, 0),
        address_case("block 1 in slot 0", [1, 0], 32, 0),
        address_case("2 KV heads of 4 values, blocks of 2", [2, None, 0], 5, 1, 2, 4, 2),
        address_case("block 0 in slot 2", [2, None, 0], 1, 0, 2, 4, 2),
        Case("a block without memory", ([2, None, 0], 3, 0, 2, 4, 2), raises=ValueError),
        Case("a token behind the table", ([0, 1], 64, 0), raises=ValueError),
        Case("a head that does not exist", ([0], 3, 8), raises=ValueError),
    ]


# --- d08.a3 ------------------------------------------------------------------------------------


def slots(count: int, room: int = 24) -> np.ndarray:
    """Slots in use, uint8 [count, 16 + room]: canaries at both ends, other bytes in between."""
    memory = np.random.default_rng(count).integers(0, 256, (count, 16 + room), dtype=np.uint8)
    memory[:, :8] = memory[:, -8:] = CANARY
    return memory


def broken(memory: np.ndarray, *places: tuple[int, int]) -> np.ndarray:
    """The same with one byte changed at each (slot, byte)."""
    memory = memory.copy()
    for slot, byte in places:
        memory[slot, byte] ^= 0x55
    return memory


def audit_case(name: str, memory: np.ndarray, table: Sequence[int | None], tokens: int,
               *block_size: int) -> Case:
    """What the library's audit finds."""
    found: dict[str, Any] = paged_cache.audit(memory, table, tokens, CANARY, *block_size)
    return Case(name, (memory, list(table), tokens, *block_size), expect=found)


def _audit_cases() -> list[Case]:
    three = slots(3)
    return [
        audit_case("all well", three, [2, 0, 1], 96),
        audit_case("one token more than three blocks", three, [2, 0, 1], 97),
        audit_case("a block without a slot", three, [2, None, 1], 96),
        audit_case("a write past the end of slot 0", broken(three, (0, -8)), [2, 0, 1], 70),
        audit_case("both ends of a slot", broken(three, (1, 0), (1, -1)), [2, 0, 1], 96),
        audit_case("bytes in the middle", broken(three, (1, 12)), [1], 20),
        Case("two blocks in one slot", (three, [1, None, 1], 96), raises=ValueError),
    ]


EXERCISES = [
    Exercise("d08.a1", "kv_ledger", _ledger_cases,
             replaces=("course_lib.kvcache.kv_ledger", "course_lib.kvcache.kv_bytes_per_token",
                       "course_lib.footprint.kv_bytes")),
    Reading("d08.b1", ("quoted_row", "mirror_line", "the_ratio_is", "memory_with_mirror",
                       "times_f16"), auto=2),
    Exercise("d08.a2", "row_address", _address_cases,
             replaces=("course_lib.paged_cache.row_offset",)),
    Reading("d08.b2", ("address_check", "rows_check", "engine_check", "next_token", "next_head"),
            auto=2),
    Exercise("d08.a3", "audit_cache", _audit_cases,
             replaces=("course_lib.paged_cache.audit", "course_lib.paged_cache.blocks_needed")),
    Reading("d08.b3", ("fresh_rows", "read_limit", "given_back", "fresh_value", "its_weight"),
            auto=2),
]
