#!/usr/bin/env python3
"""Write the numbers of the recorded runs into the model card and the README.

    python tools/write_results.py     # data/models/needle-qwen3/README.md, README.md

The card is written whole; in the README only the table between its two markers changes.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.lab.runs import load_run  # noqa: E402
from course_lib.paths import MODELS  # noqa: E402

MODEL = MODELS / "needle-qwen3"


def card() -> str:
    """The text of the card; every number in it is read from a file."""
    config = json.loads((MODEL / "config.json").read_text())
    log = training_log()
    last = log[-1]
    sizes = {p.name: p.stat().st_size for p in MODEL.iterdir() if p.name != "README.md"}
    weights = sizes["model.safetensors"]
    sweep, unseen, kv = (
        load_run(name)["summary"] for name in ("needle_k_sweep", "needle_unseen", "kv_quality")
    )
    return TEXT.format(
        hidden=config["hidden_size"], layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"], kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"], mlp=config["intermediate_size"], vocab=config["vocab_size"],
        theta=config["rope_theta"], context=config["max_position_embeddings"],
        mb=weights / 1e6, total_mb=sum(sizes.values()) / 1e6,
        steps=last["step"], tokens=int(last["tokens"]) / 1e6,
        minutes=float(last["seconds"]) / 60,
        hint_steps=sum(float(r["hint_weight"]) > 0 for r in log),
        probe_from=next(r["step"] for r in log if r["probe_loss"]),
        chain=float(next(r["eval_chain"] for r in reversed(log) if r["eval_chain"])),
        prompts=sweep[0]["prompts"], sweep=table(sweep), unseen=table(unseen), kv=kv,
        evaluations=evaluation_table(log),
        sha256=hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest(),
    )


def training_log() -> list[dict[str, str]]:
    """Rows of the training log that ships beside the card."""
    with (MODEL / "training_log.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def table(rows: list[dict]) -> str:
    """One line per arm."""
    lines = ["| decode k | recall | identical to exact | perplexity of the answer | blocks read |",
             "|---|---|---|---|---|"]
    for r in rows:
        lines.append(
            f"| {r['k']} | {r['recall']:.3f} | {r['identical_to_exact']:.3f} "
            f"| {r['answer_perplexity']:.3f} | {r['blocks_read']:.1f} |"
        )
    return "\n".join(lines)


def evaluation_table(log: list[dict[str, str]]) -> str:
    """The last evaluation at each length: shares of wholly right answers."""
    last = {r["eval_length"]: r for r in log if r["eval_length"]}
    lines = ["| tokens | at step | known words | unseen words | two-hop variable chains |",
             "|---|---|---|---|---|"]
    for length, r in last.items():
        lines.append(
            f"| {length} | {r['step']} | {float(r['eval_known']):.2f} "
            f"| {float(r['eval_unseen']):.2f} | {float(r['eval_chain']):.2f} |"
        )
    return "\n".join(lines)


TEXT = """\
# needle-qwen3

A Qwen3-architecture model of {mb:.2f} MB (float16; the folder is {total_mb:.2f} MB), trained for
this course so that recall, collapse and quantization error are measured on a real model, offline.
It is a recall model, not a chat model: it knows one small world of notes and answers questions
about them. Licence: Apache-2.0, like the code.

| part | size |
|---|---|
| layers, hidden, SwiGLU | {layers}, {hidden}, {mlp} |
| query heads, KV heads, head_dim | {heads}, {kv_heads}, {head_dim} |
| vocabulary | {vocab}, byte-level BPE; a word of the world is one token, bytes are the fallback |
| RoPE θ, context | {theta:g}, {context} tokens (trained on at most 2,176) |

## Training
`python tools/train_needle_model.py` (extra `train`); data: `course_lib/lab/world.py`, made by
seeded generators, no outside text. {steps} steps, {tokens:.1f} M tokens, {minutes:.0f} minutes on
one core (`training_log.csv`). Curriculum 128 → 256 → 512 → 1,024 → 2,176 tokens. Loss weight 1
on values, less on the rest of an answer, little on what cannot be predicted. A second run from
nothing, never interrupted, gave the same file bit for bit (same machine, torch 2.13.0, one thread):
model.safetensors has SHA-256 {sha256}.

**Disclosed: it was helped.** For the first {hint_steps} steps an extra loss told five attention
heads where to look: two heads of the first layer (the name and the attribute of the sentence),
three of the second (two: where the next token of the answer stands in the notes; one: the word
to copy from the question). Without such hints a model of this size can stall at
"right attribute, wrong name". Its retrieval heads are therefore not a discovery of training.

**Disclosed: it was made for probes.** From step {probe_from} on a second extra loss let the two
heads that copy values see every fourth key only, and asked them to find the fact all the same. So
neighbours of a value answer the query too, and a block probe that reads every fourth key seldom
misses it. A model that never met block selection may need a larger k; measure yours.

**Not learned:** two-hop chains of variables, {chain:.2f} right at the end (see the last table). The
course does not use the model for them. Where the first token of a value of several tokens is the
last token of a block, the answer needs two blocks, and a small k can lose one of them.

## Measured
{prompts} prompts of 2,061 tokens, needle in the middle, exact prefill, block-sparse decode with
k blocks (`data/runs/needle_k_sweep.json`):

{sweep}

Made-up names and values that training never used (`data/runs/needle_unseen.json`):

{unseen}

q8 against f32 KV rows on {kv[prompts]} prompts (`data/runs/kv_quality.json`): token agreement
{kv[token_agreement]:.4f}, identical texts {kv[identical_share]:.3f}, perplexity ratio q8/f32
{kv[perplexity_ratio]:.5f} over {kv[tokens_scored]} tokens of held-out notes and answers.

Evaluations during training (20 prompts each, the last at each length):

{evaluations}
"""


README = ROOT / "README.md"
BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"


def readme() -> str:
    """The README with the table of its flagship run renewed."""
    text = README.read_text(encoding="utf-8")
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    run = load_run("needle_k_sweep")
    texts = {r["k"]: r["text"] for r in run["records"] if r["index"] == 0}
    lines = ["| decode k | recall | same text as exact | blocks read | text of the first prompt |",
             "|---|---|---|---|---|"]
    for r in run["summary"]:
        text = texts[r["k"]].replace("\n", " ⏎ ").replace("|", "\\|")
        lines.append(f"| {r['k']} | {100 * r['recall']:.1f} % | "
                     f"{100 * r['identical_to_exact']:.1f} % | {r['blocks_read']:.1f} | {text} |")
    prompts = run["summary"][0]["prompts"]
    source = (f"recorded: {prompts} prompts, `{run['command']}`, course {run['course_version']}, "
              f"backend {run['backend']}, {run['date']}")
    return f"{head}{BEGIN}\n" + "\n".join(lines) + f"\n\n{source}\n{END}{tail}"


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        texts = {MODEL / "README.md": card(), README: readme()}
    except CourseError as error:
        print(f"write_results: {error}", file=sys.stderr)
        return 2
    for path, text in texts.items():
        write_atomically(path, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
