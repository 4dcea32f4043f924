#!/usr/bin/env python3
"""Train the model that ships with the course (extra `train`: torch).

    python tools/train_needle_model.py --out data/models/needle-qwen3 --work build/needle-training

Fixed seeds; a run that is interrupted resumes from its last checkpoint in --work; every step's
readings go to --work/log.csv. The exported folder has Hugging Face's layout.
"""

from __future__ import annotations

import argparse
import csv
import os
import random
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parent)]

from course_lib.launcher.extras import need  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("data/models/needle-qwen3"))
    parser.add_argument("--work", type=Path, default=Path("build/needle-training"))
    parser.add_argument("--threads", type=int, default=1, help="two are slower on a busy machine")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16",
                        help="of matrix products; the shipped model used bfloat16")
    parser.add_argument("--evaluate-every", type=int, default=50, metavar="STEPS")
    return parser.parse_args()


if __name__ == "__main__":  # before what needs the extra
    arguments = parse_arguments()
    need("train", "torch")

import torch  # noqa: E402
from needle_model.batches import make_batch  # noqa: E402
from needle_model.documents import DocumentWriter  # noqa: E402
from needle_model.network import Network, Shape, export  # noqa: E402
from needle_model.objective import loss  # noqa: E402
from needle_model.tokenizer import build_tokenizer, write_tokenizer  # noqa: E402
from tqdm import tqdm  # noqa: E402

from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.lab import world  # noqa: E402

SEED = 20261129
FIELDS = ("step length tokens seconds lr hint_weight loss hint_loss value_accuracy probe_loss "
          "eval_length eval_known eval_unseen eval_chain").split()


@dataclass(frozen=True)
class Stage:
    """`steps` batches of `count` documents of `length` tokens."""

    steps: int
    length: int
    count: int


STAGES = (
    Stage(400, 128, 32),
    Stage(400, 256, 16),
    Stage(350, 512, 8),
    Stage(350, 1024, 4),
    Stage(550, 2176, 2),
)
PROBE_FROM, PROBE_WEIGHT = 1127, 0.25  # once facts are found, make them findable by probes too
HINT_STEPS = 900  # hints fade out linearly over the last half of these steps


def stage_of(step: int, stages: tuple[Stage, ...]) -> Stage:
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]


def learning_rate(step: int, total: int, peak: float) -> float:
    """Warm-up over 40 steps, constant, then linear to 3 % over the last 40 % of the run."""
    fall = min(1.0, (total - step) / (0.4 * total))
    return peak * min(1.0, (step + 1) / 40) * max(0.03, fall)


def hint_weight(step: int) -> float:
    return max(0.0, min(1.0, 2 * (1 - step / HINT_STEPS)))


def probe_weight(step: int) -> float:
    """Rises over 100 steps from PROBE_FROM on, then stays."""
    return PROBE_WEIGHT * min(1.0, max(0.0, (step - PROBE_FROM) / 100))


def optimizers(network: Network) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in network.named_parameters() if p.dim() == 2 and "embed" not in n]
    rest = [p for n, p in network.named_parameters() if p.dim() != 2 or "embed" in n]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.02, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=1.0, betas=(0.9, 0.95), weight_decay=0.0),
    ]


PEAK_LR = (4e-3, 4e-3)


@torch.no_grad()
def evaluate(
    network: Network, writer: DocumentWriter, length: int, prompts: int
) -> dict[str, float]:
    """Share of one-question prompts whose whole answer is the argmax at every token.

    When every token of the answer is the argmax given the ones before, greedy generation gives
    exactly this answer, so this is a test of generation with one forward pass a prompt."""
    out = {}
    for kind in ("known", "unseen", "chain"):
        hits = 0
        for seed in range(prompts):
            rng = random.Random(f"{kind}-{length}-{seed}")
            context, answer = evaluation_text(rng, kind, length, writer)
            ids = torch.tensor([context + answer])
            hidden, _ = network(ids)
            start = len(context) - 1
            guess = network.logits(hidden[0, start:-1]).argmax(-1)
            hits += bool((guess == ids[0, start + 1 :]).all())
        out[f"eval_{kind}"] = hits / prompts
    return out


def evaluation_text(
    rng: random.Random, kind: str, length: int, writer: DocumentWriter
) -> tuple[list[int], list[int]]:
    """Token ids of a prompt of about `length` tokens and of its answer."""
    if kind == "chain":
        variables = [world.made_up_word(rng, held_out=True) for _ in range(3)]
        sources = [world.number(rng, 5), *variables[:-1]]
        chain = [world.Assignment(v, s) for v, s in zip(variables, sources, strict=True)]
        needles = [a.sentence for a in chain]
        question, answer = world.chain_question(chain), world.chain_answer(chain)
    else:
        attribute = rng.choice(list(world.ATTRIBUTES))
        unseen = kind == "unseen"
        name = world.random_name(rng, held_out=unseen)
        fact = world.Fact(name, attribute, world.random_value(rng, attribute, held_out=unseen))
        needles, question, answer = [fact.sentence], fact.question, fact.sentence
    lines: list[str] = []
    used = {(needles[0].split("'")[0], question)}
    size = 40
    while size < length:
        if rng.random() < 0.4:
            text = world.filler_sentence(rng)
        else:
            other = world.Fact(rng.choice(world.NAMES), rng.choice(list(world.ATTRIBUTES)), "")
            if (other.name, other.attribute) in used or other.question == question:
                continue
            used.add((other.name, other.attribute))
            value = world.random_value(rng, other.attribute)
            text = world.Fact(other.name, other.attribute, value).sentence
        lines.append(text)
        size += len(writer.encode(text + "\n"))
    for needle, place in zip(needles, sorted(rng.random() for _ in needles), strict=True):
        lines.insert(int(place * len(lines)), needle)
    if kind == "chain":  # keep the chain in order even when two places round to one index
        where = sorted(lines.index(n) for n in needles)
        for needle, i in zip(needles, where, strict=True):
            lines[i] = needle
    context = "<|im_start|>user\nRead these notes.\n" + "\n".join(lines) + "\n" + question
    context += "<|im_end|>\n<|im_start|>assistant\n"
    return writer.encode(context), writer.encode(answer) + writer.encode("<|im_end|>")


class Run:
    """One training run with its files: checkpoint.pt and log.csv under `work`."""

    def __init__(self, work: Path, stages: tuple[Stage, ...], shape: Shape):
        self.work, self.stages = work, stages
        self.total = sum(s.steps for s in stages)
        torch.manual_seed(SEED)
        self.network = Network(shape)
        self.optimizers = optimizers(self.network)
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.checkpoint = work / "checkpoint.pt"
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, weights_only=True)
            self.network.load_state_dict(state["network"])
            for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self._forget_log_after_checkpoint()

    def _forget_log_after_checkpoint(self) -> None:
        """Steps after the checkpoint run again, so their rows would stand twice."""
        path = self.work / "log.csv"
        if path.exists():
            head, *rows = path.read_text().splitlines(keepends=True)
            rows = [row for row in rows if int(row.split(",")[0]) <= self.step]
            write_atomically(path, head + "".join(rows))

    def save(self) -> None:
        state = {
            "network": self.network.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step, "tokens": self.tokens, "seconds": self.seconds,
        }
        partial = self.checkpoint.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.checkpoint)

    def log(self, row: dict[str, object]) -> None:
        path = self.work / "log.csv"
        new = not path.exists()
        with path.open("a", newline="") as f:
            out = csv.DictWriter(f, FIELDS)
            if new:
                out.writeheader()
            out.writerow(row)

    def train_step(self, writer: DocumentWriter, dtype: torch.dtype) -> dict[str, object]:
        started = time.perf_counter()
        stage = stage_of(self.step, self.stages)
        weight = hint_weight(self.step)
        first_seed = SEED * 1000 + self.step * 64
        batch = make_batch(writer, first_seed, stage.count, stage.length, hints=weight > 0)
        rates = [learning_rate(self.step, self.total, peak) for peak in PEAK_LR]
        for optimizer, rate in zip(self.optimizers, rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            total, readings = loss(
                self.network, batch, weight, probe_weight(self.step), phase=self.step
            )
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.tokens += batch.ids.numel()
        self.seconds += time.perf_counter() - started
        return {
            "step": self.step, "length": stage.length, "tokens": self.tokens,
            "seconds": round(self.seconds, 1), "lr": round(rates[0], 6), "hint_weight": weight,
            **{k: round(v, 5) for k, v in readings.items()},
        }


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(args: argparse.Namespace) -> int:
    torch.set_num_threads(args.threads)
    for signum in (signal.SIGINT, signal.SIGTERM):  # a background shell leaves SIGINT ignored
        signal.signal(signum, _interrupt)
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    writer = DocumentWriter(tokenizer)
    run = Run(args.work, STAGES, Shape(vocab=tokenizer.get_vocab_size()))
    dtype = getattr(torch, args.dtype)
    bar = tqdm(total=run.total, initial=run.step, disable=not sys.stderr.isatty())
    try:
        while run.step < run.total:
            row = run.train_step(writer, dtype)
            bar.update()
            bar.set_postfix(loss=row["loss"], value=row["value_accuracy"])
            if run.step % args.evaluate_every == 0 or run.step == run.total:
                length = stage_of(run.step - 1, run.stages).length
                row |= {"eval_length": length, **evaluate(run.network, writer, length, 20)}
                run.save()
            run.log(row)
    except KeyboardInterrupt:
        run.save()
        print(f"Stopped at step {run.step}; kept in {run.checkpoint}. Run again to go on.")
        return 130
    args.out.mkdir(parents=True, exist_ok=True)
    export(run.network, args.out)
    write_tokenizer(tokenizer, args.out)
    shutil.copyfile(args.work / "log.csv", args.out / "training_log.csv")
    parameters = sum(p.numel() for p in run.network.parameters())
    print(f"{parameters} parameters, {run.tokens} tokens, {run.seconds:.0f} s → {args.out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(arguments))
