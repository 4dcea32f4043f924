"""The engine against stored results of transformers: no torch needed.

`tools/make_engine_golden.py` writes the files; each names the checkpoint it belongs to.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from course_lib.engine import Engine
from tests.tiny_checkpoint import digest_of_weights, logit_tolerance, longest_path

GOLDEN = Path(__file__).parent / "golden"
SHIPPED = Path(__file__).parents[2] / "data" / "models" / "needle-qwen3"
TINY = ("engine_tiny", "tiny_qwen3_yarn", "tiny_qwen3_vl", "tiny_qwen3_moe", "tiny_qwen3_vl_moe",
        "tiny_llama")
CASES = {name: GOLDEN / name for name in TINY} | {"needle_qwen3": SHIPPED}


@pytest.fixture(scope="module", params=list(CASES))
def case(request):
    """(engine, stored results, sizes for the tolerance)."""
    folder = CASES[request.param]
    golden = np.load(GOLDEN / f"{request.param}.npz", allow_pickle=False)
    assert digest_of_weights(folder) == str(golden["sha256"]), (
        f"{request.param}.npz belongs to other weights: run tools/make_engine_golden.py"
    )
    engine = Engine.load(folder)
    return engine, golden, longest_path(engine.config)


def test_logits(case):
    engine, golden, sizes = case
    ids, positions, expected = golden["ids"], golden["positions"], golden["logits"]
    tolerance = 2 * logit_tolerance(sizes, expected)  # both sides round in float32
    got = engine.forward(ids)
    assert got.shape == (len(ids), engine.config.vocab_size) and got.dtype == np.float32
    np.testing.assert_allclose(got[positions], expected, rtol=0, atol=tolerance)
    # The same by decode: prefill up to each position but one, then one step.
    for position, logits in zip(positions, expected, strict=True):
        if position:
            session = engine.prefill(ids[:position])
            step = session.step(int(ids[position]))
            np.testing.assert_allclose(step, logits, rtol=0, atol=tolerance)


def test_generation(case):
    engine, golden, sizes = case
    expected = [t for t in golden["generated"].tolist() if t not in engine.config.eos_token_ids]
    ours = engine.generate_from(engine.prefill(golden["ids"]), 16)
    assert ours.ids == expected
    # The equality means something only where no choice was closer than rounding.
    assert min(ours.logits_margin) > 4 * logit_tolerance(sizes, golden["logits"])


def test_chat_template(case):
    engine, golden, _ = case
    messages = json.loads(str(golden["messages"]))
    assert engine.apply_chat_template(messages) == golden["chat"].tolist()
