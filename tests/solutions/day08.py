"""Solutions of day 8: one function per A item, one model answer with its rubric per B item."""

from __future__ import annotations

import numpy as np

CANARY = np.frombuffer(b"CANARY42", np.uint8)


def kv_ledger(num_layers, num_kv_heads, head_dim, tokens):
    if min(num_layers, num_kv_heads, head_dim, tokens) < 1:
        raise ValueError("every count must be at least 1")
    rows = 2 * num_layers * num_kv_heads * tokens
    row_bytes = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim + 4}
    if head_dim % 64 == 0:
        row_bytes["q4"] = head_dim // 2 + 8 * (head_dim // 64)
    ledger = {name: (rows * size, rows * size) for name, size in row_bytes.items()}
    scan = ledger["q8"][0]
    ledger["q8 + f32 mirror"] = (scan, scan + ledger["f32"][0])
    return ledger


def row_address(table, token, head, num_kv_heads=8, head_dim=128, block_size=32):
    if not 0 <= token < len(table) * block_size:
        raise ValueError(f"token {token} is outside the table")
    if not 0 <= head < num_kv_heads:
        raise ValueError(f"head {head} does not exist")
    block, row = divmod(token, block_size)
    if table[block] is None:
        raise ValueError(f"block {block} has no memory")
    row_bytes = 4 * head_dim
    slot_bytes = 2 * num_kv_heads * block_size * row_bytes
    return table[block] * slot_bytes + (head * block_size + row) * row_bytes


def audit_cache(memory, table, tokens, block_size=32):
    if tokens < 0:
        raise ValueError("tokens must be at least 0")
    used = [slot for slot in table if slot is not None]
    if len(set(used)) != len(used):
        raise ValueError("two blocks share a slot")
    needed = -(-tokens // block_size)
    missing = [b for b in range(needed) if b >= len(table) or table[b] is None]
    damaged = []
    for block, slot in enumerate(table):
        if slot is None:
            continue
        if not np.array_equal(memory[slot, :8], CANARY):
            damaged.append([block, "front"])
        if not np.array_equal(memory[slot, -8:], CANARY):
            damaged.append([block, "back"])
    return {"needed": needed, "missing": missing, "damaged": damaged}


ANSWERS = {
    "d08.b1": """
The article's 0.52 is 2112/4096: bytes of the q8 rows that one decode step scans, against f16. It is
bandwidth. Memory is what is kept: with the float32 mirror, the engine's default, 2112 + 8192 =
10,304 bytes per token and layer, 2.52 times f16. Whoever plans a context length with 0.52 plans a
conversation 4.9 times longer (2.516 / 0.516) than fits, and runs out of memory. Ask whether the
mirror can be switched off, what still reads it (block selection probes it, says day 10), and for
the resident memory measured at a stated context.
Rubric: 1 point: traffic and memory told apart, with the mirror as the reason; 1 point: the factor
(2.52 times f16, or nearly five times the plan), and a question about the mirror or a measurement.
""",
    "d08.b2": """
KVCache keeps the rows of a head in one piece from token 0 on and can only be truncated, so the rows
that exist are exactly those below its length: one comparison of the token with the length is
enough, and views of the first n rows are all it hands out. As soon as blocks can go one by one, the
length says nothing about a block in the middle, and every way to a row must look into the table: in
row_offset and in _slot, through which rows, append and evict go.
Rubric: 2 points: contiguous rows from 0 to the length, so the length is the whole check (1 of them
if only "it has no blocks"); 1 point: with eviction a block below the length may be gone; only the
table can tell.
""",
    "d08.b3": """
np.empty hands out whatever the memory held: zeros from fresh pages, old rows from used ones.
Nothing sees it because rows() returns views of the first length tokens, and append writes rows
before it raises the length. With the capacity instead, attention would read up to a block (or an
eighth) of rows nobody wrote: a row of zeros has score 0 and takes weight e^0, beside one token of
score 0 half of it; old rows would even look like real tokens. NaN in new memory turns such a read
into an error that the kernels report; zeros turn it into a slightly wrong answer that looks right.
Rubric: 1 point: the length bounds every read and rows are written first; 1 point: score 0 is a
weight, not nothing; 1 point: NaN makes the mistake visible, zeros hide it.
""",
}
