#!/usr/bin/env python3
"""Record the experiments behind the lessons: data/runs/<name>.json.

    python tools/record_runs.py                      # all
    python tools/record_runs.py needle_k_sweep kv_quality

An interrupted experiment keeps what it has in build/runs and goes on from there.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tqdm import tqdm  # noqa: E402

from course_lib.engine import Engine  # noqa: E402
from course_lib.errors import CourseError  # noqa: E402
from course_lib.lab.experiments import EXPERIMENTS, options_record  # noqa: E402
from course_lib.lab.runs import save_run  # noqa: E402
from course_lib.paths import MODELS  # noqa: E402

PARTIAL = ROOT / "build" / "runs"


def record(engine: Engine, name: str) -> Path:
    """Run one experiment prompt by prompt and write its file."""
    experiment = EXPERIMENTS[name]
    partial = PARTIAL / f"{name}.jsonl"
    PARTIAL.mkdir(parents=True, exist_ok=True)
    records = []
    if partial.exists():
        records = [json.loads(line) for line in partial.read_text(encoding="utf-8").splitlines()]
    done = {r["index"] for r in records}
    todo = [i for i in range(experiment.options.prompts) if i not in done]
    with partial.open("a", encoding="utf-8") as f:
        for index in tqdm(todo, desc=name, disable=not sys.stderr.isatty()):
            rows = experiment.records(engine, experiment.options, index)
            records += rows
            f.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
            f.flush()
    path = save_run(
        name,
        command=f"python tools/record_runs.py {name}",
        options=options_record(experiment),
        summary=experiment.summarize(records),
        records=records,
    )
    partial.unlink()
    return path


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
        engine = Engine.load(MODELS / "needle-qwen3")
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
