"""Solutions of day 1: one function per A item, one model answer with rubric per B item."""

from __future__ import annotations

import numpy as np


def kv_bytes(layers, kv_heads, head_dim, tokens, dtype):
    row = {"f32": 4 * head_dim, "f16": 2 * head_dim, "q8": head_dim + 4}
    if dtype not in row:
        raise ValueError(f"unknown dtype {dtype!r}")
    if min(layers, kv_heads, head_dim) < 1 or tokens < 0:
        raise ValueError("layers, KV heads and head_dim begin at 1, tokens at 0")
    return 2 * layers * kv_heads * tokens * row[dtype]


def path_in_order(shuffled, sizes, cached):
    hidden, d, rows = (sizes["hidden"],), sizes["head_dim"], cached + 1
    heads, kv_heads = sizes["heads"], sizes["kv_heads"]
    shapes = {
        "embed": hidden,
        "norm": hidden,
        "qkv": (heads + 2 * kv_heads, d),
        "rotate": (heads, d),
        "cache": (kv_heads, rows, d),
        "scores": (heads, rows),
        "weights": (heads, rows),
        "context": (heads, d),
        "attention": hidden,
        "inner": (sizes["inner"],),
        "mlp": hidden,
        "final_norm": hidden,
        "logits": (sizes["vocab"],),
    }
    names = list(shapes)

    def place(stage):
        name, layer = stage
        if name not in shapes:
            raise ValueError(f"{name!r} is no stage")
        part = 1 if layer is not None else (0 if name == "embed" else 2)
        return part, layer or 0, names.index(name)

    return [(name, layer, shapes[name]) for name, layer in sorted(shuffled, key=place)]


def softmax_test(softmax):
    third = 1 / (1 + np.e)
    known = [
        (np.log([1, 2, 5]), [1 / 8, 2 / 8, 5 / 8]),
        (np.log([5, 1, 2]), [5 / 8, 1 / 8, 2 / 8]),
        ([3], [1]),
        ([-2] * 6, [1 / 6] * 6),
        ([-10_000, 0], [0, 1]),
        ([10_000, 0, 10_000], [1 / 2, 0, 1 / 2]),
        ([10_000, 9_999], [1 - third, third]),
        ([-10_000, -9_999], [third, 1 - third]),
    ]
    for scores, wanted in known:
        weights = np.asarray(softmax(np.array(scores, np.float32)))
        assert weights.shape == (len(wanted),)
        assert (np.abs(weights - wanted) < 1e-5).all()


ANSWERS = {
    "d01.b1": "The memory of all matrices is reserved once, in load_weights, before anything is "
    "read; it does not grow and is given back when the last array of the engine is gone. The "
    "cache starts with no rows, allocates whole blocks of 32 tokens and grows with every token; "
    "it belongs to the session and goes with it. The embedding serves twice, as the table of "
    "tokens and as the last matrix, so no number of the file is stored twice: there is no "
    "lm_head. A q8 token needs 3 layers x 2 x 2 heads x (64 + 4) = 816 bytes. "
    "Rubric: 1 point: the cache grows, the model does not; 1 point: each is freed with its owner "
    "(engine or session), or that the cache grows in blocks.",
    "d01.b2": "DecodeAttention.__call__ appends the token's key and value and only then asks for "
    "the rows, so the token finds itself among 133. Prefill does the same for all tokens of the "
    "prompt at once. If anything fails, Session.step truncates the cache to the length before. "
    "Keys are stored rotated because a key's angle depends only on its own position, which never "
    "changes: rotated once, it serves every later query; otherwise all keys would be rotated "
    "again for each token. A score compares positions, a value is only averaged, so values carry "
    "no position. "
    "Rubric: 1 point: a key's position never changes, so it is rotated once; 1 point: position "
    "matters for who finds whom, not for what is passed on.",
    "d01.b3": "The loop over recorded files runs zero times: nothing is asserted at all, the "
    "weakest, for it accepts None. The cache test compares stored rows with rows of the same "
    "cache: every cache passes that returns anything twice. The condition of the mean test is "
    "False for NaN, and zeros lie between the smallest and the largest value, so an attention of "
    "zeros passes it; of the three attention tests only the one with one token notices zeros. "
    "The tolerance of 10 accepts a norm that does not divide. Repairs: assert files; compare with "
    "the numbers that were written; assert that all lie inside; rtol 1e-3 on the difference. "
    "Rubric: 1 point: the weakest with the reason that nothing is ever asserted; 1 point: a mutant "
    "that one of the others accepts; 1 point: an assertion that would kill it.",
}
