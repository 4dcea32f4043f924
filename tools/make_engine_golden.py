#!/usr/bin/env python3
"""Write what transformers computes for some checkpoints, so that tests can compare without torch.

    python tools/make_engine_golden.py            # extra `oracle`: torch, transformers, jinja2

`tests/oracle/golden/` has a tiny random checkpoint of every family, as transformers writes it, and
for each and for the shipped model an .npz: token ids, transformers' logits in float32, its greedy
continuation and its chat template's ids. Run it again after the shipped model was trained anew.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.launcher.extras import need  # noqa: E402

if __name__ == "__main__":  # before what needs the extra
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    need("oracle", "torch", "transformers")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

from tests.oracle.family_models import (  # noqa: E402
    LLAMA3,
    MROPE,
    YARN,
    random_model,
    transpose_experts,
)
from tests.tiny_checkpoint import digest_of_weights, write_tokenizer  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden"
SHIPPED = ROOT / "data" / "models" / "needle-qwen3"

CHAT = [
    {"role": "user", "content": "hello <|im_end|> 😀\n"},
    {"role": "assistant", "content": "  Zara's favorite food is ramen."},
    {"role": "user", "content": "What is Zara's favorite food?"},
]


TINY_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
TINY_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
            "mlp_only_layers": [0]}
# Golden file -> family, changes to TINY_TEXT, size of a shard, seed of the weights. The seeds are
# chosen so that no greedy choice is closer than rounding.
FAMILIES: dict[str, tuple[str, dict, str, int]] = {
    "engine_tiny": ("Qwen3", {}, "1GB", 20),
    "tiny_qwen3_yarn": ("Qwen3", {"rope_parameters": YARN}, "1GB", 21),
    "tiny_qwen3_vl": ("Qwen3VL", {"rope_parameters": MROPE}, "30KB", 22),
    "tiny_qwen3_moe": ("Qwen3Moe", TINY_MOE | {"norm_topk_prob": True}, "1GB", 23),
    "tiny_qwen3_vl_moe": ("Qwen3VLMoe", TINY_MOE | {"rope_parameters": MROPE}, "1GB", 24),
    "tiny_llama": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": False}, "1GB", 25),
}


def write_tiny(name: str) -> type:
    """Write a float16 checkpoint of GQA 4:2 with random norm gains; its class in transformers."""
    family, changes, shard, seed = FAMILIES[name]
    model = random_model(family, TINY_TEXT | changes, seed)
    folder = GOLDEN / name
    shutil.rmtree(folder, ignore_errors=True)
    model.half().save_pretrained(folder, max_shard_size=shard)
    if family == "Qwen3VLMoe":
        transpose_experts(folder / "model.safetensors")
    write_tokenizer(folder)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors writes it for the owner alone
    return type(model)


def record(
    kind: type, folder: Path, target: Path, ids: list[int], positions: list[int]
) -> None:
    """Run transformers' `kind` on the checkpoint in `folder`; write its answers to `target`."""
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, positions].numpy()
    generated = model.generate(
        torch.tensor([ids]),
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        max_new_tokens=16,
        do_sample=False,
    )[0, len(ids) :].tolist()
    chat = tokenizer.apply_chat_template(
        CHAT, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    temporary = target.with_suffix(".tmp.npz")
    np.savez_compressed(
        temporary,
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        logits=logits.astype(np.float32),
        generated=np.array(generated, np.int32),
        chat=np.array(chat, np.int32),
        messages=np.array(json.dumps(CHAT)),
        sha256=np.array(digest_of_weights(folder)),
        made_with=np.array(f"transformers {transformers.__version__}"),
    )
    os.replace(temporary, target)
    print(f"{target.relative_to(ROOT)}: {target.stat().st_size} bytes")


def shipped_prompt() -> list[int]:
    """Seeded sentences of the model's own world, then a question in chat form; about 700 tokens."""
    from course_lib.lab import world

    tokenizer = transformers.AutoTokenizer.from_pretrained(SHIPPED)
    rng = random.Random(7)
    facts = [
        f"{rng.choice(world.NAMES)}'s {attribute} is {rng.choice(values)}.\n"
        for attribute, values in rng.choices(list(world.ATTRIBUTES.items()), k=90)
        if values
    ]
    subject = facts[len(facts) // 3].split(" is ")[0]
    messages = [{"role": "user", "content": "".join(facts) + f"What is {subject}?"}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def main() -> int:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(11).integers(3, 266, 200).tolist()
    for name in FAMILIES:
        positions = [0, 1, 31, 32, 127, 128, 198, 199]
        record(write_tiny(name), GOLDEN / name, GOLDEN / f"{name}.npz", ids, positions)
    if not (SHIPPED / "model.safetensors").exists():
        print(f"{SHIPPED.relative_to(ROOT)} is not there: its golden file is left as it is")
        return 0
    ids = shipped_prompt()
    positions = [0, 1, len(ids) // 2, len(ids) - 1]
    record(transformers.Qwen3ForCausalLM, SHIPPED, GOLDEN / "needle_qwen3.npz", ids, positions)
    return 0


if __name__ == "__main__":
    sys.exit(main())
