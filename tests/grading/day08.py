"""Hidden cases of day 8."""

from __future__ import annotations

import numpy as np

from course_lib.classroom.exercises import Case
from course_lib.classroom.exercises.day08 import (
    CANARY,
    address_case,
    audit_case,
    broken,
    ledger_case,
    slots,
)
from course_lib.classroom.hidden import Group, Hidden
from course_lib.classroom.sealed import Lines

# --- d08.a1 ------------------------------------------------------------------------------------


def _ledger_groups() -> list[Group]:
    return [
        Group("bytes", 2, "A row has a scale or two besides its values, and there are K and V, "
              "in every layer, KV head and token.",
              [ledger_case("36 layers, 8 heads, 128 values", 36, 8, 128, 4096),
               ledger_case("one head of 64", 1, 1, 64, 1),
               ledger_case("one head of 256", 28, 2, 256, 131072)]),
        Group("two ledgers", 1, "A mirror is kept but not scanned: it changes the second number "
              "only.",
              [ledger_case("17 layers, 3 heads", 17, 3, 192, 33)]),
        Group("edges", 1, "q4 needs whole groups of 64, and a count below 1 is refused.",
              [ledger_case("96 values", 2, 2, 96, 7), ledger_case("32 values", 2, 2, 32, 7),
               ledger_case("160 values", 2, 2, 160, 7),
               Case("no heads", (1, 0, 64, 1), raises=ValueError),
               Case("negative tokens", (1, 1, 64, -5), raises=ValueError),
               Case("no values", (1, 1, 0, 1), raises=ValueError),
               Case("two below 1", (-1, 1, 64, -5), raises=ValueError)]),
    ]


def _ledger_with(num_layers, num_kv_heads, head_dim, tokens, *, both=2, q8_scale=4, q4_scale=8,
                 group=64, mirror="memory", guard=True, layers=True, leave_out=True):
    """The right answer with one part replaced."""
    if guard and min(num_layers, num_kv_heads, head_dim, tokens) < 1:
        raise ValueError("a count is below 1")
    rows = both * (num_layers if layers else 1) * num_kv_heads * tokens
    size = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim + q8_scale}
    if head_dim % group == 0 or not leave_out:
        size["q4"] = head_dim // 2 + q4_scale * (head_dim // 64)
    found = {name: (rows * n, rows * n) for name, n in size.items()}
    scan, kept = found["q8"][0], found["q8"][0] + found["f32"][0]
    found["q8 + f32 mirror"] = {"memory": (scan, kept), "both": (kept, kept), "none": (scan, scan),
                                "instead": (scan, found["f32"][0])}[mirror]
    return found


def _ledger_variant(**change):
    def answer(num_layers, num_kv_heads, head_dim, tokens):
        return _ledger_with(num_layers, num_kv_heads, head_dim, tokens, **change)
    return answer


def _product_guarded(num_layers, num_kv_heads, head_dim, tokens):
    if num_layers * num_kv_heads * head_dim * tokens < 1:
        raise ValueError("a count is below 1")
    return _ledger_with(num_layers, num_kv_heads, head_dim, tokens, guard=False)


def _ledger_floats(num_layers, num_kv_heads, head_dim, tokens):
    found = _ledger_with(num_layers, num_kv_heads, head_dim, tokens)
    return {name: (a * 1.0, b * 1.0) for name, (a, b) in found.items()}


def _ledger_alternative(num_layers, num_kv_heads, head_dim, tokens):
    for count in (num_layers, num_kv_heads, head_dim, tokens):
        if count <= 0:
            raise ValueError("every count must be positive")
    values = num_layers * num_kv_heads * tokens * head_dim * 2
    heads = values // head_dim
    f32, q8 = 4 * values, values + 4 * heads
    out = {"q8 + f32 mirror": [q8, q8 + f32], "f32": [f32, f32], "f16": [2 * values] * 2,
           "q8": [q8, q8]}
    if not head_dim & 63:
        q4 = values // 2 + values // 8
        out["q4"] = [q4, q4]
    return out


# --- d08.a2 ------------------------------------------------------------------------------------


def _address_groups() -> list[Group]:
    rng = np.random.default_rng(82)
    table = rng.permutation(9).tolist()
    table[4] = None
    return [
        Group("through the table", 3, "A token's block gives the slot, by the table; in the slot "
              "come K's heads one after the other, then V's.",
              [address_case(f"token {t}, head {h}", table, t, h)
               for t, h in ((0, 0), (31, 7), (32, 0), (63, 3), (287, 7), (100, 5))]
              + [address_case("3 heads of 5 values, blocks of 7", table, 20, 2, 3, 5, 7),
                 address_case("one head, blocks of 1", table, 8, 0, 1, 1, 1)]),
        Group("no memory", 1, "A block without a slot must be refused; slot 0 is a slot.",
              [Case("evicted", (table, 4 * 32 + 9, 1), raises=ValueError),
               address_case("the block in slot 0", table, 32 * table.index(0) + 1, 1),
               Case("nothing yet", ([], 0, 0), raises=ValueError)]),
        Group("outside", 1, "Tokens and heads that do not exist must be refused, negative ones "
              "too.",
              [Case("behind the table", (table, 9 * 32, 0), raises=ValueError),
               Case("token -1", (table, -1, 0), raises=ValueError),
               Case("head -1", (table, 3, -1), raises=ValueError),
               Case("head 8", (table, 3, 8), raises=ValueError),
               Case("behind a table of small blocks", ([2, None, 0], 6, 0, 2, 4, 2),
                    raises=ValueError),
               Case("head 2 of 2", ([2, None, 0], 5, 2, 2, 4, 2), raises=ValueError)]),
    ]


def _address_with(table, token, head, num_kv_heads=8, head_dim=128, block_size=32, *, both=2,
                  itemsize=4, through=True, head_major=True, null="check", low=True, heads=True,
                  block=None, whole=None, below=None):
    """The right answer with one part replaced."""
    if (low and token < 0) or token >= len(table) * (whole or block_size):
        raise ValueError("token outside")
    if heads and not 0 <= head < (below or num_kv_heads):
        raise ValueError("no such head")
    b, row = divmod(token, block_size)
    b = b if block is None else block(token, block_size)
    slot = table[b] if through else b
    if null == "falsy" and not slot:
        raise ValueError("no memory")
    if null == "check" and table[b] is None:
        raise ValueError("no memory")
    place = head * block_size + row if head_major else row * num_kv_heads + head
    slot_rows = both * num_kv_heads * block_size
    return ((slot or 0) * slot_rows + place) * head_dim * itemsize


def _address_variant(**change):
    def answer(table, token, head, num_kv_heads=8, head_dim=128, block_size=32):
        return _address_with(table, token, head, num_kv_heads, head_dim, block_size, **change)
    return answer


def _address_alternative(table, token, head, num_kv_heads=8, head_dim=128, block_size=32):
    """By the strides of an array that has the layout."""
    whole = range(len(table) * block_size)
    if token not in whole or head not in range(num_kv_heads):
        raise ValueError("no such row")
    slot = table[token // block_size]
    if slot is None:
        raise ValueError("no memory")
    layout = np.empty((0, 2, num_kv_heads, block_size, head_dim), np.float32)
    place = np.array([slot, 0, head, token % block_size, 0])
    shape = layout.shape[1:]
    strides = [4 * int(np.prod(shape[i:])) for i in range(len(shape) + 1)]
    return int(place @ np.array(strides))


# --- d08.a3 ------------------------------------------------------------------------------------


def _swapped(memory):
    memory = memory.copy()
    memory[0, [2, 3]] = memory[0, [3, 2]]
    return memory


def _audit_groups() -> list[Group]:
    memory = slots(8)
    table = [5, 0, None, 7, 1]
    return [
        Group("blocks", 2, "Count blocks by rounding up, and name the needed ones that have no "
              "slot, also behind the table's end.",
              [audit_case("160 tokens", memory, table, 160), audit_case("161", memory, table, 161),
               audit_case("300", memory, table, 300), audit_case("none", memory, table, 0),
               audit_case("an empty table", memory, [], 40),
               audit_case("blocks of 7", memory, table, 22, 7)]),
        Group("canaries", 3, "Both ends of every slot in use must hold the whole canary; look it "
              "up by the slot and report the block.",
              [audit_case("each byte of the front", broken(memory, (0, 7)), table, 160),
               audit_case("last byte", broken(memory, (7, -1)), table, 160),
               audit_case("several", broken(memory, (5, 0), (5, -8), (1, -3), (0, 3)), table, 160),
               audit_case("a slot in use by nobody", broken(memory, (2, 0), (6, -1)), table, 160),
               audit_case("next to the canary", broken(memory, (0, 8), (0, -9)), table, 160),
               audit_case("a block that is not needed", broken(memory, (1, 0)), table, 10),
               audit_case("two bytes change places", _swapped(memory), table, 160),
               audit_case("larger slots", broken(slots(8, 200), (0, -3)), table, 160)]),
        Group("refused", 1, "Negative tokens, and two blocks in one slot, are errors; two blocks "
              "without a slot are not.",
              [Case("negative", (memory, table, -1), raises=ValueError),
               Case("slot 5 twice", (memory, [5, 1, 5], 90), raises=ValueError),
               Case("slot 5 twice, one not needed", (memory, [5, 1, 5], 40), raises=ValueError),
               audit_case("two without a slot", memory, [None, None, 3], 96)]),
    ]


def _audit_with(memory, table, tokens, block_size=32, *, rounding="up", sides=("front", "back"),
                length=8, by="slot", past_end=True, all_blocks=True, negative=True, shared="slots",
                unused=False, null=True, same=np.array_equal):
    """The right answer with one part replaced."""
    if negative and tokens < 0:
        raise ValueError("negative")
    held = table[:-(-tokens // block_size)] if shared == "needed" else table
    used = [slot for slot in held if slot is not None or shared == "entries"]
    if shared and len(set(used)) != len(used):
        raise ValueError("shared slot")
    needed = {"up": -(-tokens // block_size), "down": tokens // block_size,
              "one more": tokens // block_size + 1}[rounding]
    missing = [b for b in range(needed)
               if (b >= len(table) and past_end) or (b < len(table) and table[b] is None)]
    damaged = []
    entries = list(enumerate(table[:None if all_blocks else needed]))
    if unused:
        entries = [(slot, slot) for slot in range(len(memory))]
    for block, slot in entries:
        if (slot is None) if null else (not slot):
            continue
        at = slot if by == "slot" else block
        for side in sides:
            piece = memory[at, :length] if side == "front" else memory[at, -length:]
            wanted = CANARY[:length] if side == "front" else CANARY[-length:]
            if not same(piece, wanted):
                damaged.append([block, side])
    return {"needed": needed, "missing": missing, "damaged": damaged}


def _audit_variant(**change):
    def answer(memory, table, tokens, block_size=32):
        return _audit_with(memory, table, tokens, block_size, **change)
    return answer


def _repairs(memory, table, tokens, block_size=32):
    found = _audit_with(memory, table, tokens, block_size)
    memory[:, :8] = memory[:, -8:] = CANARY
    return found


def _audit_alternative(memory, table, tokens, block_size=32):
    """All slots at once, as 64-bit words."""
    used = np.array([-1 if slot is None else slot for slot in table], np.int64)
    if tokens < 0 or np.unique(used[used >= 0]).size != (used >= 0).sum():
        raise ValueError("not a cache")
    word = CANARY.tobytes()
    needed = (tokens + block_size - 1) // block_size
    padded = [*table, *[None] * max(0, needed - len(table))]
    ends = {"front": [m[:8].tobytes() for m in memory], "back": [m[-8:].tobytes() for m in memory]}
    return {"damaged": [(b, side) for b, slot in enumerate(table) if slot is not None
                        for side in ("front", "back") if ends[side][slot] != word],
            "missing": [b for b in range(needed) if padded[b] is None], "needed": needed}


HIDDEN = [
    Hidden("d08.a1", _ledger_groups, alternative=_ledger_alternative, mutants={
        "K only": _ledger_variant(both=1),
        "q8 without a scale": _ledger_variant(q8_scale=0),
        "q8 with a half-precision scale": _ledger_variant(q8_scale=2),
        "q4 with one scale": _ledger_variant(q4_scale=4),
        "q4 for every head": _ledger_variant(leave_out=False),
        "q4 in groups of 32": _ledger_variant(group=32),
        "mirror scanned": _ledger_variant(mirror="both"),
        "mirror costs nothing": _ledger_variant(mirror="none"),
        "mirror instead of q8": _ledger_variant(mirror="instead"),
        "one layer": _ledger_variant(layers=False),
        "accepts 0": _ledger_variant(guard=False),
        "only the product is checked": _product_guarded,
        "floats": _ledger_floats,
    }),
    Hidden("d08.a2", _address_groups, alternative=_address_alternative, mutants={
        "block number for slot": _address_variant(through=False),
        "slot of K only": _address_variant(both=1),
        "token-major slot": _address_variant(head_major=False),
        "values, not bytes": _address_variant(itemsize=1),
        "half precision": _address_variant(itemsize=2),
        "slot 0 is no slot": _address_variant(null="falsy"),
        "no check for NULL": _address_variant(null="none"),
        "negative tokens wrap around": _address_variant(low=False),
        "any head": _address_variant(heads=False),
        "blocks of 32 in the check of the token": _address_variant(whole=32),
        "8 heads in the check of the head": _address_variant(below=8),
        "blocks of 32 always": _address_variant(block=lambda token, size: token // 32),
    }),
    Hidden("d08.a3", _audit_groups, alternative=_audit_alternative, mutants={
        "rounds down": _audit_variant(rounding="down"),
        "one block more": _audit_variant(rounding="one more"),
        "front only": _audit_variant(sides=("front",)),
        "back first": _audit_variant(sides=("back", "front")),
        "four bytes of the canary": _audit_variant(length=4),
        "looks at the block's number": _audit_variant(by="block"),
        "only blocks of the table are missing": _audit_variant(past_end=False),
        "only needed blocks looked at": _audit_variant(all_blocks=False),
        "slots in use by nobody too": _audit_variant(unused=True),
        "slot 0 is no slot": _audit_variant(null=False),
        "negative tokens": _audit_variant(negative=False),
        "shared slots": _audit_variant(shared=None),
        "shared slots among needed blocks only": _audit_variant(shared="needed"),
        "sums of the canaries": _audit_variant(same=lambda a, b: a.sum() == b.sum()),
        "slots of 40 bytes": lambda memory, *rest: _audit_with(memory[:, :40], *rest),
        "two None are shared": _audit_variant(shared="entries"),
        "repairs what it finds": _repairs,
    }),
]

READINGS = {
    "d08.b1": {
        "quoted_row": Lines("data/published/quoted.csv", "q8_bandwidth,scan_ratio_vs_f16"),
        "mirror_line": Lines("course_lib/kvcache.py", 'lines.append(("q8 + f32 mirror"',
                             symbol="kv_ledger"),
        "the_ratio_is": "bandwidth",
        "memory_with_mirror": 10304,
        "times_f16": 10304 / 4096,
    },
    "d08.b2": {
        "address_check": Lines("course_lib/paged_cache.py", "if slot is None:",
                               "raise BlockNotStoredError", symbol="row_offset"),
        "rows_check": Lines("course_lib/paged_cache.py", "if slot is None:",
                            "raise BlockNotStoredError", symbol="PagedCache._slot"),
        "engine_check": Lines("course_lib/kvcache.py",
                              "if not 0 <= token < self.layer_length(layer):",
                              symbol="KVCache.row_address"),
        "next_token": 512,
        "next_head": 32 * 512,
    },
    "d08.b3": {
        "fresh_rows": Lines("course_lib/kvcache.py",
                            "return LayerRows(np.empty(shape, F32), np.empty(shape, F32))",
                            symbol="KVCache._allocate"),
        "read_limit": Lines("course_lib/kvcache.py", "rows = array[:, :n]", symbol="KVCache.rows"),
        "given_back": Lines("course_lib/paged_cache.py", "self._mapping.madvise(mmap.MADV_DONTNEED",
                            symbol="PagedCache.evict"),
        "fresh_value": 0,
        "its_weight": 0.5,
    },
}
