"""The kernels compiled by other compilers, with other optimization and on odd machines: the same
bits, or one line that says what is missing. Slow: every test compiles."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from course_lib.launcher.kernel_builds import build, variables
from course_lib.launcher.runner import environ
from course_lib.paths import ROOT

C = ROOT / "kernels_pyx" / "c"
DIGESTS = "tests/oracle/test_kernel_digests.py"


def need(compiler: str) -> None:
    """Skip without this compiler; in CI nothing is left out unseen."""
    if shutil.which(compiler) is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"no {compiler} here")


def run_python(code: str, folder) -> str:
    """Run Python code on a build and return what it prints."""
    env = environ(PYTHONPATH=os.pathsep.join([str(folder / "lib"), str(ROOT)]))
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True,
                            cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def variants_of(folder) -> list[str]:
    return run_python("import kernels_pyx; print(*kernels_pyx.VARIANTS)", folder).split()


def script(path, text: str) -> str:
    """Write a program that stands in for a compiler; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


# gcc -O3 is what the other suites run on.
@pytest.mark.parametrize("compiler, level", (("gcc", "-O0"), ("gcc", "-O2"), ("clang", "-O3")))
def test_the_same_bits_by_every_compiler(tmp_path, compiler, level):
    need(compiler)
    line = build(tmp_path, CC=compiler, COURSE_KERNEL_FLAGS=level, COURSE_REQUIRE_KERNELS="1")
    assert "without" not in line
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", DIGESTS]
    command += ["-k", "not threads_1 and not threads_3"]
    result = subprocess.run(command, cwd=ROOT, env=variables(tmp_path), text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert result.returncode == 0, result.stdout
    assert "skipped" not in result.stdout


@pytest.mark.parametrize("compiler", ("gcc", "clang"))
def test_no_warning(tmp_path, compiler):
    need(compiler)
    target = subprocess.run([compiler, "-dumpmachine"], capture_output=True, text=True).stdout
    names = ["portable", "portable_fma", "avx2", "avx512"] if target.startswith("x86_64") else [
        "portable", "neon", "dotprod"]
    sources = [C / "variants" / f"{name}.c" for name in names] + [
        C / name for name in ("choose.c", "parallel.c", "workspace.c")]
    flags = ["-Wall", "-Wextra", "-Werror", "-O2", "-ffp-contract=off", "-fPIC"]
    for source in sources:
        result = subprocess.run([compiler, *flags, f"-I{C}", "-c", source, "-o", "out.o"],
                                cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_a_variant_that_does_not_compile_does_not_cost_the_others(tmp_path):
    need("gcc")
    old = script(tmp_path / "old-gcc", 'case "$*" in *variants/avx512.c*|*variants/dotprod.c*) '
                 'echo "unknown target" >&2; exit 1;; esac; exec gcc "$@"')
    line = build(tmp_path, CC=old, COURSE_KERNEL_FLAGS="-O1")
    assert ", without avx512" in line or ", without dotprod" in line
    assert line.startswith("kernels: portable, ") and "[files: " in line
    names = variants_of(tmp_path)
    assert "portable" in names and not {"avx512", "dotprod"} & set(names)
    assert "avx2" in names or "neon" in names or "portable-baseline" in names


def test_without_any_variant_that_compiles_there_is_one_line(tmp_path):
    line = build(tmp_path, CC=script(tmp_path / "cc", "exit 1"))
    assert line.startswith("kernels: not built, NumPy backend instead (slower): ")
    assert not list(tmp_path.glob("lib/kernels_pyx/compiled*"))


def test_a_compiler_without_openmp_gives_one_thread_and_says_so(tmp_path):
    need("gcc")
    plain = script(tmp_path / "cc", 'for a; do [ "$a" = -fopenmp ] && exit 1; done; exec gcc "$@"')
    line = build(tmp_path, CC=plain, COURSE_KERNEL_FLAGS="-O1")
    assert "one thread (no OpenMP)" in line
    said = run_python("import kernels_pyx.compiled as c; c.set_num_threads(4); "
                      "print(c.HAS_THREADS, c.get_num_threads())", tmp_path)
    assert said == "False 1"


@pytest.mark.parametrize("value", ("  ", "gcc -m64", "{folder}/with space/cc", "env gcc"))
def test_what_cc_may_hold(tmp_path, value):
    need("gcc")
    if "-m64" in value and os.uname().machine != "x86_64":
        pytest.skip("-m64 is a flag of x86 compilers")
    script(tmp_path / "with space" / "cc", 'exec gcc "$@"')
    line = build(tmp_path, CC=value.format(folder=tmp_path), COURSE_KERNEL_FLAGS="-O0")
    assert line.startswith("kernels: portable, ") and "compiled for" in line
    assert "unknown target" not in line
    assert "portable" in variants_of(tmp_path)


@pytest.mark.parametrize("value", ("no-such-compiler", "/", "no such compiler with spaces"))
def test_a_cc_that_is_not_there_is_one_line(tmp_path, value):
    line = build(tmp_path, CC=value)
    assert line.startswith("kernels: not built") and f"no C compiler ({value.split()[0]})" in line
