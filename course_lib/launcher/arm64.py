"""The tests of the kernels on emulated arm64 CPUs, on a machine with Debian's packages.

tools/arm64/prepare.sh makes the emulated Python; here is what runs on it: the kernels' own tests
on a CPU without the int8 dot product and, as far as they say more there, on one with it (the
board's); the rest of the library's unit tests and the stored oracle on the latter; and two
notebooks whose Jupyter server side runs here and whose kernel is emulated.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from course_lib.launcher import state
from course_lib.launcher.runner import TESTS, Count, environ, pytest
from course_lib.launcher.side_environment import UPPER_FLOOR, impossible
from course_lib.paths import NOTEBOOKS, ROOT

CANNOT = 77
"""prepare.sh's exit code when emulation is impossible on this machine; its last line says why."""

DOTPROD_CPU, NEON_CPU = "cortex-a76", "cortex-a72"
BEST_VARIANT = {DOTPROD_CPU: "dotprod", NEON_CPU: "neon"}
ONLY_HERE = {DOTPROD_CPU: "test_variant or not (neon or portable)", NEON_CPU: ""}
"""Which of the kernels' tests run on a CPU (pytest's -k): variants that both CPUs have, on the one
with fewer instructions, where one too many would be illegal."""

KERNEL_TESTS = ("arm64", "unit/test_kernels*.py", "unit/test_quant.py", "property/test_kernels*.py",
                "oracle/test_kernel_digests.py")
OTHER_TESTS = ("unit", "property", "oracle")
NOT_EMULATED = (
    *UPPER_FLOOR,
    # About the machine outside.
    "test_cli.py", "test_machine.py", "test_bench*.py",
    # Plain Python without a kernel, the same on every machine.
    "test_atomic.py", "test_bias.py", "test_chat_command.py", "test_checkpoint_fuzz.py",
    "test_client.py", "test_decode_cost.py", "test_decode_gate.py", "test_engine_chat_templates.py",
    "test_engine_config.py", "test_engine_conversation.py", "test_engine_gguf*.py",
    "test_engine_stream.py", "test_engine_tokenizer.py", "test_fits.py", "test_gguf_fuzz.py",
    "test_known_models.py", "test_needle.py", "test_perplexity.py", "test_phase_bar.py",
    "test_prompts.py", "test_published.py", "test_ruler.py", "test_runs.py",
    "test_safetensors_source.py", "test_server_needle.py", "test_sse.py", "test_tensor_names.py",
    "test_training_documents.py", "test_weight_blocks_gguf.py", "test_weight_cache.py",
    "test_world.py",
    # They need torch.
    "test_*_transformers.py", "test_engine_families.py", "test_smollm2.py", "test_training.py",
    # Whole runs of the shipped model at 2,061 tokens; the notebooks have four of them.
    "test_recorded_runs.py",
    # Thousands of tokens through NumPy around kernels whose digests are compared.
    "test_prefill_properties.py", "test_xattn_golden.py", "test_xattn_policy.py",
    "test_engine_chunked.py",
    # Experiments: Python around the engine and the kernels, whose bits are tested.
    "test_anatomy.py", "test_footprint.py", "test_intervals.py", "test_page_cache.py",
    "test_prefill_cost.py", "test_prefill_damage.py", "test_prefill_lab.py",
    "test_prefill_record.py", "test_ring_schedule.py", "test_rounding_rules.py",
    "test_token_path.py", "test_tokenizing.py", "test_weight_file.py", "test_block_size_places.py",
    "test_half_floats.py", "test_dot_ladder_counts.py", "test_query_scales.py",
)
TOO_LONG = (
    "oracle/test_shipped_model.py::test_it_recalls_at_2061_tokens_and_loses_the_needle_at_k_1",
    "oracle/test_shipped_model.py::test_q8_rows_give_the_same_answers",
    "oracle/test_shipped_model.py::test_without_the_note_it_does_not_know_the_articles_answer",
    "unit/test_decode_record.py::test_the_needles_block_and_the_query_that_reads_it",
    # One of three prompts stays.
    "oracle/test_shipped_model.py::test_another_value_in_the_same_prompt_gives_another_answer[1]",
    "oracle/test_shipped_model.py::test_another_value_in_the_same_prompt_gives_another_answer[2]",
)
DAYS: dict[str, tuple[str, ...]] = {
    "day09_q8_kv.ipynb": ("sessions", "nats["),
    "day10_sparse_attention.ipynb": ("prompt_study(", "explorer", "prefill_k=1", "_ms(", "SECONDS"),
}
"""Notebook -> what marks cells that are left out: those that read 2,061 tokens once more, which
takes an emulated kernel a minute, and those that only take times, which mean nothing here."""
CELL_SECONDS = "600"


@dataclass(frozen=True)
class Job:
    """Tests that run in one process; jobs run two at a time."""

    title: str
    run: Callable[[IO[str]], Count]


def tests() -> Count:
    """Prepare the emulated machine if needed and run everything on it."""
    problem = prepare()
    if problem is not None:
        return problem
    folder, total = place(), Count()
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
        for title, count, text in pool.map(run_job, jobs(folder)):
            print(f"-- {title}\n{text}", flush=True)
            total += count
    return total


def place() -> str:
    """The emulated Python's folder."""
    return f"{state.find_environment(str(ROOT))}-arm64"


def prepare() -> Count | None:
    """Make the emulated Python; return None, or the Count of why there is none."""
    command = [str(ROOT / "tools" / "arm64" / "prepare.sh"), place(), sys.executable]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environ())
    print(result.stderr, end="", flush=True)
    if result.returncode == 0:
        return None
    reason = (result.stderr.strip().splitlines() or ["it ended without a word"])[-1]
    return impossible(reason) if result.returncode == CANNOT else Count(failed=1, note=reason)


def prepare_ahead() -> None:
    """Make the emulated Python unless that installs programs, which tests that run meanwhile look
    for."""
    if all(map(shutil.which, ("aarch64-linux-gnu-gcc", "qemu-aarch64"))):
        prepare()


def jobs(folder: str) -> list[Job]:
    """Longest first."""
    ignored = [f"--ignore-glob={TESTS}/*/{name}" for name in NOT_EMULATED]
    ignored += [f"--ignore-glob={TESTS / path}" for path in KERNEL_TESTS]
    ignored += [f"--deselect={(TESTS / test).relative_to(ROOT)}" for test in TOO_LONG]
    library = [*ignored, *(str(TESTS / name) for name in OTHER_TESTS)]
    return [
        Job(f"the library on {DOTPROD_CPU}", partial(emulated, folder, DOTPROD_CPU, library)),
        *(Job(f"the kernels on {cpu}",
              partial(emulated, folder, cpu, ["-k", ONLY_HERE[cpu], *kernel_tests()]))
          for cpu in (NEON_CPU, DOTPROD_CPU)),
        *(Job(f"{day} with an emulated kernel", partial(notebook, folder, day)) for day in DAYS),
    ]


def kernel_tests() -> list[str]:
    return [str(path) for pattern in KERNEL_TESTS for path in sorted(TESTS.glob(pattern))]


def run_job(job: Job) -> tuple[str, Count, str]:
    """Run a job; return its title, results and output."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        count = job.run(output)
        output.seek(0)
        return job.title, count, output.read()


def emulated(folder: str, cpu: str, arguments: list[str], output: IO[str]) -> Count:
    """Run tests by the Python of an emulated CPU."""
    env = arm64_environ(COURSE_EXPECT_VARIANT=BEST_VARIANT[cpu], COURSE_REQUIRE_KERNELS="1")
    return pytest("-p", "emulated", *arguments, python=f"{folder}/python-{cpu}", env=env,
                  output=output)


def notebook(folder: str, name: str, output: IO[str]) -> Count:
    """Run a notebook in an emulated kernel and compare its outputs with the stored ones."""
    env = arm64_environ(JUPYTER_PATH=f"{folder}/jupyter", COURSE_THREADS="1")
    with tempfile.TemporaryDirectory() as copies:
        copy = Path(copies) / name
        copy.write_text(without_long_cells(name), encoding="utf-8")
        return pytest("--nbval", "--nbval-kernel-name", DOTPROD_CPU, "--nbval-cell-timeout",
                      CELL_SECONDS, f"--rootdir={ROOT}", str(copy), env=env, output=output)


def without_long_cells(name: str) -> str:
    """Return a notebook without the code cells that DAYS names."""
    book = json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))
    book["cells"] = [
        cell for cell in book["cells"] if cell["cell_type"] != "code"
        or not any(mark in "".join(cell["source"]) for mark in DAYS[name])
    ]
    return json.dumps(book)


def arm64_environ(**changes: str) -> dict[str, str]:
    """The environment of emulated processes, which choose their own kernels."""
    env = environ(**changes)
    env.pop("COURSE_KERNEL", None)
    return env
