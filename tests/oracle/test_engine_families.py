"""Every family against transformers, on tiny random checkpoints that transformers wrote."""

import json

import numpy as np
import pytest

from course_lib.engine import Engine
from course_lib.engine.safetensors_source import SafetensorsSource
from tests.oracle.family_models import CASES, MOE, MROPE, YARN, random_model, transpose_experts
from tests.tiny_checkpoint import logit_tolerance, longest_path, write_tokenizer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.0")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request, tmp_path_factory):
    """(the engine of a saved checkpoint, transformers' model of the same, the folder)."""
    family, changes, saving = CASES[request.param]
    folder = tmp_path_factory.mktemp("family")
    model = random_model(family, changes, seed=len(request.param))
    model.save_pretrained(folder, **saving)
    write_tokenizer(folder)
    assert (folder / "model.safetensors.index.json").exists() == bool(saving)
    return Engine.load(folder), model, folder


def their_logits(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0].numpy()


@pytest.mark.parametrize("n", [1, 40, 300])
def test_logits_of_prefill_and_of_32_steps(pair, n):
    engine, theirs, _ = pair
    ids = np.random.default_rng(n).integers(0, 300, n + 32).tolist()
    expected = their_logits(theirs, ids)
    # Both sides round in float32, hence twice the tolerance of one.
    tolerance = 2 * logit_tolerance(longest_path(engine.config), expected)
    np.testing.assert_allclose(engine.forward(ids), expected, rtol=0, atol=tolerance)
    session = engine.prefill(ids[:n])
    np.testing.assert_allclose(session.logits, expected[n - 1], rtol=0, atol=tolerance)
    for position in range(n, n + 32):
        logits = session.step(ids[position])
        np.testing.assert_allclose(logits, expected[position], rtol=0, atol=tolerance)


def test_the_file_loads_in_transformers_as_it_does_here(pair):
    """What was saved is what was meant: transformers reads back the same model."""
    engine, theirs, folder = pair
    again = type(theirs).from_pretrained(folder, dtype=torch.float32).eval()
    ids = list(range(5, 60))
    np.testing.assert_array_equal(their_logits(again, ids), their_logits(theirs, ids))


def test_fused_experts_in_both_orders_are_one_model(tmp_path):
    """Qwen3-VL-MoE is published with its experts' matrices transposed; transformers saves them as
    it uses them."""
    model = random_model("Qwen3VLMoe", MOE | {"rope_parameters": MROPE}, seed=3)
    model.save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    ids = list(range(5, 60))
    as_saved = Engine.load(tmp_path).forward(ids)
    before = SafetensorsSource(tmp_path)
    transpose_experts(tmp_path / "model.safetensors")
    after = SafetensorsSource(tmp_path)
    name = "model.layers.3.mlp.experts.5.up_proj.weight"
    assert after.stored == before.stored and after.stored[name].shape == (40, 48)
    assert after.fingerprint() != before.fingerprint()
    np.testing.assert_array_equal(Engine.load(tmp_path).forward(ids), as_saved)
    again = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    np.testing.assert_array_equal(their_logits(again, ids), their_logits(model, ids))


def test_keys_that_transformers_4_wrote_mean_the_same(tmp_path):
    """rope_theta and rope_scaling beside each other, num_experts instead of num_local_experts."""
    random_model("Qwen3Moe", MOE | {"rope_parameters": YARN}, seed=4).save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    new = Engine.load(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    scaling = raw.pop("rope_parameters")
    raw["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    raw["rope_scaling"] = scaling
    raw["num_experts"] = raw.pop("num_local_experts")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert Engine.load(tmp_path).config == new.config and new.config.rope.kind == "yarn"
