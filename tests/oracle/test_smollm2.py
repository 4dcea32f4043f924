"""The real model SmolLM2-135M-Instruct: the same text, tokens and weights as transformers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from course_lib.known_models import install_command, locate
from course_lib.paths import ROOT

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(locate("smollm2") is None,
                       reason=f"smollm2 is not installed: {install_command('smollm2')}"),
]

from course_lib.engine import Engine  # noqa: E402
from tests.oracle.two_engines import TwoEngines, prompt_ids  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden"
CHOSEN = json.loads((GOLDEN / "smollm2_prompts.json").read_text(encoding="utf-8"))
TOKENS = json.loads((GOLDEN / "smollm2_tokens.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine():
    return Engine.load("smollm2")


@pytest.fixture(scope="module")
def pair(engine):
    return TwoEngines(engine)


@pytest.fixture(scope="module")
def their_tokenizer():
    file = locate("smollm2")
    return transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_twenty_prompts_are_chosen():
    assert len({prompt["text"] for prompt in CHOSEN["prompts"]}) == 20
    assert {prompt["kind"] for prompt in CHOSEN["prompts"]} == {"chat", "text"}


@pytest.mark.parametrize("prompt", CHOSEN["prompts"], ids=lambda prompt: prompt["text"][:30])
def test_the_same_text_greedily(pair, prompt):
    """Every choice is clear, here too, so both must write what is stored."""
    ids, most = prompt_ids(pair.engine, prompt["kind"], prompt["text"]), CHOSEN["new_tokens"]
    written = pair.ours(ids, most)
    assert written == pair.theirs(ids, most) == prompt["written"]
    found = pair.clearness(ids, written, most)
    assert found.allows_comparison, found
    slack = 2 * (found.difference + prompt["difference"])
    assert abs(found.margin - prompt["margin"]) <= slack + 1e-3 * prompt["margin"]


def test_every_weight_is_theirs(pair):
    """transformers undoes llama.cpp's order of rows and blocks by code of its own."""
    theirs = {name: tensor.numpy() for name, tensor in pair.model.state_dict().items()}
    weights = pair.engine.model.weights
    np.testing.assert_array_equal(weights.embedding, theirs["model.embed_tokens.weight"])
    assert weights.output is weights.embedding
    np.testing.assert_array_equal(weights.final_norm, theirs["model.norm.weight"])
    for number, layer in enumerate(weights.layers):
        def stacked(*names, prefix=f"model.layers.{number}."):
            return np.concatenate([theirs[f"{prefix}{name}.weight"] for name in names])

        for ours, expected in (
            (layer.input_norm, stacked("input_layernorm")),
            (layer.qkv_proj, stacked(*(f"self_attn.{part}_proj" for part in "qkv"))),
            (layer.o_proj, stacked("self_attn.o_proj")),
            (layer.post_attention_norm, stacked("post_attention_layernorm")),
            (layer.mlp.gate_up_proj, stacked("mlp.gate_proj", "mlp.up_proj")),
            (layer.mlp.down_proj, stacked("mlp.down_proj")),
        ):
            np.testing.assert_array_equal(ours, expected)
    assert len(weights.layers) == pair.model.config.num_hidden_layers


def test_the_same_numbers_of_the_model(pair):
    ours, theirs = pair.engine.config, pair.model.config
    for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
                 "num_attention_heads", "num_key_value_heads", "head_dim",
                 "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"] and ours.rope is None
    assert ours.eos_token_ids == (theirs.eos_token_id,)


@pytest.mark.parametrize("case", TOKENS["texts"], ids=lambda case: repr(case["text"][:20]))
def test_the_same_tokens(engine, their_tokenizer, case):
    """llama.cpp's, which are stored, and transformers', where that cuts numbers alike."""
    ids = engine.encode(case["text"], allow_special=False)
    assert ids == case["ids"]
    if not case["numbers_apart"]:
        assert ids == their_tokenizer.encode(
            case["text"], add_special_tokens=False, split_special_tokens=True)
    assert engine.decode(ids) == case["text"]


CONVERSATIONS = [
    [{"role": "user", "content": "Hello"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好 😀\n\n a12"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
     {"role": "user", "content": "  c "}],
]


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["default system", "system", "turns"])
@pytest.mark.parametrize("open_answer", [True, False])
def test_the_same_chat_format(engine, their_tokenizer, messages, open_answer):
    theirs = their_tokenizer.apply_chat_template(
        messages, add_generation_prompt=open_answer, return_dict=False)
    assert engine.apply_chat_template(messages, open_answer) == theirs
