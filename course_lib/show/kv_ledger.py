"""The byte ledger of a KV cache: what a decode step reads, and what stays in memory."""

from __future__ import annotations

from typing import Any

from course_lib.arrays import positive_int
from course_lib.engine import Engine
from course_lib.kvcache import kv_bytes_per_token
from course_lib.show.controls import dropdown, steps
from course_lib.show.explorer import Explorer
from course_lib.show.kv_ledger_picture import KVLedgerPicture
from course_lib.show.models import shipped_engine
from course_lib.show.text import fmt, size_text

FORMATS = {"f32": 32, "f16": 16, "q8": 8, "q4": 4}
"""Bits of one value; scales come on top of q8 and q4."""
ARTICLE = (8, 128)
LAYERS = (1, 3, 12, 24, 28, 36)
TOKENS = (1, 32, 256, 2061, 4096, 16384, 131072)


class KVLedgerExplorer(Explorer):
    """Bytes of a KV cache by format: choose the shape, layers, tokens, and the float32 mirror.

    engine: whose KV heads and head_dim are the shape "model" (default: the shipped model). shape:
    "model", or "article" for 8 KV heads of 128 values; layers: one of LAYERS; tokens: one of
    TOKENS; mirror: whether float32 rows are kept beside the smaller ones.
    """

    alt = "bytes by format, once as read by a decode step and once as kept in memory"
    question = ("A q8 cache keeps a float32 mirror beside its rows. Compared with f16: does one "
                "decode step read more or less? Does the cache take more or less memory?")
    drawing = KVLedgerPicture

    def __init__(self, engine: Engine | None = None, *, shape: str = "article", layers: int = 1,
                 tokens: int = 1, mirror: bool = False) -> None:
        config = (engine or shipped_engine()).config
        self._shapes = {"model": (config.num_key_value_heads, config.head_dim),
                        "article": ARTICLE}
        names = {f"{'this model' if name == 'model' else 'the article'}: {heads} × {d}": name
                 for name, (heads, d) in self._shapes.items()}
        super().__init__({
            "shape": dropdown("KV heads × d", names, shape, "KV heads and values per head"),
            "layers": steps("layers", LAYERS, layers, "every layer has a cache of its own"),
            "tokens": steps("tokens", {f"{n:,}": n for n in TOKENS}, tokens, "tokens in the cache"),
            "mirror": dropdown("float32 mirror", {"none": False, "kept": True}, mirror,
                               "float32 rows that stay beside the smaller ones"),
        })

    def compute(self, shape: str = "article", layers: int = 1, tokens: int = 1,
                mirror: bool = False) -> dict[str, Any]:
        """For every format: bytes of values, scales and mirror, and their sums; see `describe`.

        Formats whose groups do not fit the head (q4 wants 64 values) are left out.
        """
        self.check_choices(shape=shape, mirror=mirror)
        layers, tokens = positive_int(layers, "layers"), positive_int(tokens, "tokens")
        heads, d = self._shapes[shape]
        count = layers * tokens
        f16, f32 = (count * kv_bytes_per_token(heads, d, name) for name in ("f16", "f32"))
        rows = {}
        for name, bits in FORMATS.items():
            if name == "q4" and d % 64:
                continue
            scan = count * kv_bytes_per_token(heads, d, name)
            values = count * 2 * heads * d * bits // 8
            extra = f32 if mirror and name != "f32" else 0
            rows[name] = {"values": values, "scales": scan - values, "mirror": extra,
                          "scan": scan, "memory": scan + extra, "scan_vs_f16": scan / f16,
                          "memory_vs_f16": (scan + extra) / f16,
                          "bits_per_value": 8 * scan / (2 * count * heads * d)}
        return {"shape": shape, "heads": heads, "d": d, "layers": layers, "tokens": tokens,
                "mirror": mirror, "rows": rows}

    def describe(self, result: dict[str, Any]) -> str:
        return describe(result)


def describe(r: dict[str, Any]) -> str:
    """The text twin of one `compute` result."""
    lines = [f"{r['heads']} KV heads × {r['d']} values, layers: {r['layers']}, tokens: "
             f"{r['tokens']:,}, float32 mirror: {'kept' if r['mirror'] else 'none'}",
             f"{'':>4} {'bits/value':>10} {'values':>10} {'scales':>9} {'read a step':>12} "
             f"{'of f16':>7} {'in memory':>10} {'of f16':>7}"]
    for name, row in r["rows"].items():
        lines.append(f"{name:>4} {fmt(row['bits_per_value']):>10} {size_text(row['values']):>10} "
                     f"{size_text(row['scales']):>9} {size_text(row['scan']):>12} "
                     f"{'× ' + fmt(row['scan_vs_f16']):>7} {size_text(row['memory']):>10} "
                     f"{'× ' + fmt(row['memory_vs_f16']):>7}")
    return "\n".join(lines)
