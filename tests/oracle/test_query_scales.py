"""What one query scale per row costs on the shipped model: the numbers of docs/kernels.md."""

from __future__ import annotations

import numpy as np
import pytest

from course_lib.attention import single_pass_q8, two_pass
from course_lib.engine import decode
from course_lib.lab.captured import captured
from course_lib.lab.needle import NeedleOptions
from course_lib.lab.needle_results import run_needle
from course_lib.quant import quantize_rows

TOKENS = 1024
KINDS = ("group", "row")


def relative_errors(layers):
    """|out - float out| / |float out| of each layer, head and 16th query from 256 on: of int8 K and
    V with a float query ("kv"), and with an int8 query of each kind."""
    found: dict[str, list[float]] = {name: [] for name in ("kv", *KINDS)}
    for q, k, v in layers:
        (kq, k_scale), (vq, v_scale) = quantize_rows(k), quantize_rows(v)
        for p in range(256, q.shape[1], 16):
            seen = slice(p + 1)
            own = np.ascontiguousarray(q[:, p])
            rows = kq[:, seen], k_scale[:, seen], vq[:, seen], v_scale[:, seen]
            want = two_pass(own, k[:, seen], v[:, seen])
            outs = {kind: single_pass_q8(own, *rows, query_scales=kind) for kind in KINDS}
            outs["kv"] = two_pass(own, rows[0], rows[2], rows[1], rows[3])
            for name, out in outs.items():
                found[name] += list(np.linalg.norm(out - want, axis=1)
                                    / np.linalg.norm(want, axis=1))
    return found


def test_the_errors_of_attention_that_the_documentation_states(shipped_engine):
    found = relative_errors(captured(shipped_engine, TOKENS))
    percent = {name: (100 * np.mean(e), 100 * np.max(e)) for name, e in found.items()}
    print(percent)  # pytest -s
    assert percent["kv"] == pytest.approx((0.46, 2.2), rel=0.03)
    assert percent["group"] == pytest.approx((0.55, 2.9), rel=0.03)
    assert percent["row"] == pytest.approx((0.56, 2.5), rel=0.03)


def test_answers_are_those_of_the_float_query(shipped_engine, monkeypatch):
    options = NeedleOptions(tokens=TOKENS, prompts=20, ks=(), kv="q8")
    usual, = run_needle(shipped_engine, options)
    assert usual.recall == 1.0
    for kind in KINDS:
        def attend(q, rows, kind=kind):
            return single_pass_q8(q, rows.k, rows.k_scale, rows.v, rows.v_scale,
                                  query_scales=kind)

        monkeypatch.setattr(decode, "two_pass_rows", attend)
        assert run_needle(shipped_engine, options)[0].texts == usual.texts
