#!/usr/bin/env python3
"""Record the experiments behind the lessons: data/runs/<name>.json.

    python tools/record_runs.py                      # all
    python tools/record_runs.py needle_k_sweep kv_quality

An interrupted experiment keeps its finished prompts in build/runs and goes on from there, as long
as the options, the model and the course version are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

import course_lib  # noqa: E402
from course_lib.atomic import write_atomically  # noqa: E402
from course_lib.engine import Engine  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.lab.experiments import EXPERIMENTS, options_record  # noqa: E402
from course_lib.lab.runs import save_run  # noqa: E402
from course_lib.paths import MODELS  # noqa: E402

PARTIAL = ROOT / "build" / "runs"
MODEL = MODELS / "needle-qwen3"


def record(engine: Engine, name: str, model: Path = MODEL) -> Path:
    """Run one experiment prompt by prompt and write its file."""
    experiment = EXPERIMENTS[name]
    partial = PARTIAL / f"{name}.jsonl"
    header = {"options": options_record(experiment), "version": course_lib.__version__,
              "model": hashlib.sha256((model / "model.safetensors").read_bytes()).hexdigest()}
    prompts = resumed(partial, json.loads(json.dumps(header)))
    PARTIAL.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(x, ensure_ascii=False) + "\n" for x in (header, *prompts.values())]
    write_atomically(partial, "".join(lines))
    todo = [i for i in range(experiment.options.prompts) if i not in prompts]
    with partial.open("a", encoding="utf-8") as f:
        for index in tqdm(todo, desc=name, disable=not sys.stderr.isatty()):
            prompts[index] = experiment.records(engine, experiment.options, index)
            f.write(json.dumps(prompts[index], ensure_ascii=False) + "\n")
            f.flush()
    records = [row for index in sorted(prompts) for row in prompts[index]]
    path = save_run(
        name,
        command=f"python tools/record_runs.py {name}",
        options=options_record(experiment),
        summary=experiment.summarize(records),
        records=records,
    )
    partial.unlink()
    return path


def resumed(partial: Path, header: dict) -> dict[int, list[dict]]:
    """The finished prompts of an interrupted recording: one line each, after a header line.

    A torn last line is left out; another header (options, model, version) means none."""
    if not partial.exists():
        return {}
    first, *lines = partial.read_text(encoding="utf-8").split("\n")
    try:
        if json.loads(first) != header:
            return {}
    except ValueError:
        return {}
    prompts: dict[int, list[dict]] = {}
    for line in lines:
        try:
            rows = json.loads(line)
        except ValueError:
            break
        prompts[rows[0]["index"]] = rows
    return prompts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(EXPERIMENTS))
    args = parser.parse_args()
    unknown = [name for name in args.names if name not in EXPERIMENTS]
    if unknown:
        print(f"record_runs: no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}",
              file=sys.stderr)
        return 2
    try:
        engine = Engine.load(MODEL)
        for name in args.names or EXPERIMENTS:
            print(record(engine, name).relative_to(ROOT), flush=True)
    except CourseError as error:
        print(f"record_runs: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; finished prompts are kept in {PARTIAL.relative_to(ROOT)}",
              file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
