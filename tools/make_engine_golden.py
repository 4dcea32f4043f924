#!/usr/bin/env python3
"""Write what transformers computes for two checkpoints, so that tests can compare without torch.

    python tools/make_engine_golden.py            # extra `oracle`: torch, transformers, jinja2

`tests/oracle/golden/engine_tiny/` is a tiny random checkpoint that transformers writes;
`engine_tiny.npz` and `needle_qwen3.npz` hold, for it and for the shipped model, token ids, the
logits of Qwen3ForCausalLM in float32, its greedy continuation and its chat template's ids. Run it
again after the shipped model was trained anew.
"""

from __future__ import annotations

import argparse
import hashlib
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

from tests.tiny_checkpoint import write_tokenizer  # noqa: E402

GOLDEN = ROOT / "tests" / "oracle" / "golden"
TINY = GOLDEN / "engine_tiny"
SHIPPED = ROOT / "data" / "models" / "needle-qwen3"

CHAT = [
    {"role": "user", "content": "hello <|im_end|> 😀\n"},
    {"role": "assistant", "content": "  Zara's favorite food is ramen."},
    {"role": "user", "content": "What is Zara's favorite food?"},
]


def write_tiny() -> None:
    """A float16 checkpoint of GQA 4:2, two layers, with random norm gains."""
    torch.manual_seed(20)
    config = transformers.Qwen3Config(
        vocab_size=300,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    model = transformers.Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.normal_(std=p.shape[1] ** -0.5)
            else:
                p.normal_(4.0 if name == "model.norm.weight" else 1.3, 0.3)
    shutil.rmtree(TINY, ignore_errors=True)
    model.half().save_pretrained(TINY)
    write_tokenizer(TINY)
    (TINY / "model.safetensors").chmod(0o644)  # safetensors writes it for the owner alone


def record(folder: Path, target: Path, ids: list[int], positions: list[int]) -> None:
    """Run transformers on the checkpoint in `folder` and write its answers to `target`."""
    model = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
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
    weights = (folder / "model.safetensors").read_bytes()
    temporary = target.with_suffix(".tmp.npz")
    np.savez_compressed(
        temporary,
        ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int32),
        logits=logits.astype(np.float32),
        generated=np.array(generated, np.int32),
        chat=np.array(chat, np.int32),
        messages=np.array(json.dumps(CHAT)),
        sha256=np.array(hashlib.sha256(weights).hexdigest()),
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
    write_tiny()
    ids = np.random.default_rng(11).integers(3, 266, 200).tolist()
    record(TINY, GOLDEN / "engine_tiny.npz", ids, [0, 1, 31, 32, 127, 128, 198, 199])
    if not (SHIPPED / "model.safetensors").exists():
        print(f"{SHIPPED.relative_to(ROOT)} is not there: its golden file is left as it is")
        return 0
    ids = shipped_prompt()
    record(SHIPPED, GOLDEN / "needle_qwen3.npz", ids, [0, 1, len(ids) // 2, len(ids) - 1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
