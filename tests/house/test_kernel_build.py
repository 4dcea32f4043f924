"""setup.py where there is no compiler, one of no use, or another target than this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig

import pytest

from course_lib.paths import ROOT


def build(tmp_path, *, path: str, **variables: str):
    """Run setup.py with a PATH; return what it did. Nothing is written outside tmp_path."""
    command = [sys.executable, "setup.py", "build_ext", "--force"]
    command += [f"--build-temp={tmp_path / 'temp'}", f"--build-lib={tmp_path / 'lib'}"]
    env = {**os.environ, "PATH": path, **variables}
    env.pop("COURSE_REQUIRE_KERNELS", None)
    return subprocess.run(command, cwd=ROOT, env=env | variables, capture_output=True, text=True)


def test_without_a_compiler_the_build_says_so_and_succeeds(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    result = build(tmp_path, path=str(tmp_path))
    assert result.returncode == 0, result.stderr
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("kernels: not built, NumPy backend instead")
    assert "no C compiler" in last and last.endswith("]") and "[missing: " in last


@pytest.mark.parametrize("variables", [
    {"CC": "{folder}/garbage"}, {"CC": '"'}, {"CC": "gcc '"}, {"CC": "/bin/true"},
    {"CFLAGS": '"'}, {"LDFLAGS": "'"}, {"CPPFLAGS": '"'}])
def test_a_compiler_or_flags_of_no_use_leave_numpy_with_one_line(tmp_path, variables):
    pytest.importorskip("setuptools", minversion="77")
    garbage = tmp_path / "garbage"
    garbage.write_text("no program")
    garbage.chmod(0o755)
    variables = {name: text.format(folder=tmp_path) for name, text in variables.items()}
    result = build(tmp_path, path=os.environ["PATH"], **variables)
    assert result.returncode == 0, result.stderr
    last = result.stdout.strip().splitlines()[-1]
    assert last.startswith("kernels: not built, NumPy backend instead"), last
    required = build(tmp_path, path=os.environ["PATH"], COURSE_REQUIRE_KERNELS="1", **variables)
    assert required.returncode != 0
    assert required.stderr.strip().splitlines()[-1].startswith("error: kernels: not built")


def test_without_a_compiler_the_build_fails_when_kernels_are_required(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    result = build(tmp_path, path=str(tmp_path), COURSE_REQUIRE_KERNELS="1")
    assert result.returncode != 0
    assert "no C compiler" in result.stderr.strip().splitlines()[-1]


def test_a_kernel_that_no_longer_compiles_is_removed(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    old = tmp_path / "lib" / "kernels_pyx" / f"compiled{sysconfig_suffix()}"
    old.parent.mkdir(parents=True)
    old.write_bytes(b"an older build")
    build(tmp_path, path=str(tmp_path))
    assert not old.exists()


def sysconfig_suffix() -> str:
    return sysconfig.get_config_var("EXT_SUFFIX")


def test_the_compiler_s_target_chooses_flags_and_no_target_gets_cpu_flags(monkeypatch):
    setuptools = pytest.importorskip("setuptools", minversion="77")
    monkeypatch.setattr(setuptools, "setup", lambda **arguments: None)
    namespace: dict = {}
    exec((ROOT / "setup.py").read_text(encoding="utf-8"), namespace)
    for target in ("x86_64-linux-gnu", "aarch64-linux-gnu", "i686-linux-gnu", "arm64-apple-darwin"):
        flags = namespace["compile_flags"](target)
        assert {"-O3", "-ffp-contract=off", "-fno-math-errno"} <= set(flags)
        assert not [f for f in flags if f.startswith(("-march", "-mcpu", "-ffast"))]
        assert ("-mfpmath=sse" in flags) == target.startswith("i686")
