"""`./course doctor`: each missing thing has a cost and one remedy."""

from __future__ import annotations

import builtins
import sys

import pytest

from course_lib import cli
from course_lib.launcher import machine


def test_the_report_has_a_line_for_everything(capsys):
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    for name in ("Python", "environment", "compiler", "headers", "kernels", "CPU", "memory", "disk",
                 "font", "browser", "real model"):
        assert any(line[8:].startswith(name) for line in out.splitlines()), name
    assert code == int("MISSING" in out)


def test_whatever_can_be_missing_has_a_cost_and_a_remedy(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    monkeypatch.setattr(machine.sysconfig, "get_path", lambda name: "/nonexistent")
    found = {finding.name: finding for finding in machine.findings()}
    for name in ("compiler", "headers", "browser"):
        assert not found[name].ok
    for finding in found.values():
        assert finding.ok or (finding.cost and finding.remedy), finding


def test_remedies_are_commands_where_apt_is(monkeypatch):
    monkeypatch.setattr(machine.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert machine.install("gcc") == "sudo apt install gcc"


def test_no_venv_module_is_the_one_thing_needed(monkeypatch, capsys):
    monkeypatch.setattr(machine.environment, "has_venv", lambda: False)
    assert cli.main(["doctor"]) == 1
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("MISSING Python")


def test_memory_is_read_from_the_kernel_s_table(monkeypatch):
    table = "MemTotal:        4000000 kB\nMemAvailable:    {} kB\n"
    monkeypatch.setattr(machine, "read", lambda path: table.format(3_000_000))
    assert machine.memory() == machine.Finding(
        "memory", True, "3.0 of 4.0 GB free", *machine.memory()[3:])
    monkeypatch.setattr(machine, "read", lambda path: table.format(900_000))
    assert not machine.memory().ok
    monkeypatch.setattr(machine, "read", lambda path: "")
    assert machine.memory().ok


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cpu_features_of_x86_come_from_cpuinfo(monkeypatch):
    monkeypatch.setattr(machine.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(machine, "read", lambda path: "processor: 0\nflags\t\t: fpu avx2 fma\n")
    assert machine.cpu_features() == ["avx2", "fma"]


def test_it_runs_without_any_package(monkeypatch):
    real = builtins.__import__

    def only_standard(name, *rest):
        if name.split(".")[0] in ("numpy", "matplotlib", "tqdm"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", only_standard)
    monkeypatch.setattr(machine, "find_spec", lambda name: None)
    monkeypatch.setattr(machine.state, "read_stamp", lambda env: None)
    found = {finding.name: finding for finding in machine.findings()}
    assert "not known" in found["kernels"].detail


def test_the_kernels_line_names_variant_and_threads(monkeypatch):
    from course_lib import backend

    found = backend.BackendInfo("kernels_pyx", "avx2", "the best")
    monkeypatch.delenv("COURSE_KERNEL", raising=False)
    monkeypatch.setenv("COURSE_THREADS", "3")
    monkeypatch.setattr(backend, "info", lambda: found)
    monkeypatch.setattr(machine.state, "read_stamp",
                        lambda env: {"kernels_line": "kernels: portable, avx2 compiled"})
    assert machine.kernels().detail == (
        "avx2 (the best), threads: 3; kernels: portable, avx2 compiled")
