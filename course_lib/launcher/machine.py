"""What the machine has: the checks behind `./course doctor`.

Standard library only, because it also answers before the environment exists.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from typing import NamedTuple

from course_lib import known_models
from course_lib.errors import CourseError
from course_lib.launcher import environment, state
from course_lib.paths import ROOT

X86_FEATURES = ("sse4_1", "avx2", "fma", "avx512f", "avx512_vnni")
# Linux HWCAP bits of aarch64, <asm/hwcap.h>.
ARM_FEATURES = {"asimd": 1, "fphp": 9, "asimddp": 20, "i8mm": 64 + 13}
BROWSERS = ("firefox", "chromium", "chromium-browser", "google-chrome", "x-www-browser")


class Finding(NamedTuple):
    """One line of the report; cost and remedy are shown where ok is False."""

    name: str
    ok: bool
    detail: str
    cost: str = ""
    remedy: str = ""
    needed: bool = False


def findings() -> list[Finding]:
    """Return every check, in reading order."""
    checks = (python, prepared, compiler, headers, kernels, cpu, memory, disk, font, browser,
              real_model)
    return [check() for check in checks]


def install(package: str) -> str:
    """Return the command that installs a Debian or Ubuntu package, or words elsewhere."""
    if shutil.which("apt-get"):
        return f"sudo apt install {package}"
    return f"install the counterpart of Debian's {package}"


def python() -> Finding:
    version = sysconfig.get_python_version()
    ok = environment.has_venv()
    detail = f"{platform.python_version()} at {sys.executable}" + ("" if ok else ", no venv module")
    return Finding("Python", ok, detail,
                   "no environment can be made", install(f"python{version}-venv"), needed=True)


def prepared() -> Finding:
    env = state.find_environment(str(ROOT))
    reason = state.problem(str(ROOT), env)
    return Finding(
        "environment", reason is None, env if reason is None else f"{env}: {reason}",
        "the next command sets it up first (the network is needed)", "./course lab",
    )


def compiler() -> Finding:
    name = (sysconfig.get_config_var("CC") or "cc").split()[0]
    path = shutil.which(name)
    detail = f"no {name}"
    if path:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True)
        detail = (answer.stdout.splitlines() or [path])[0]
    return Finding("compiler", bool(path), detail,
                   "no compiled kernels: everything runs on NumPy, slower", install("gcc"))


def headers() -> Finding:
    path = os.path.join(sysconfig.get_path("include"), "Python.h")
    ok = os.path.exists(path)
    return Finding("headers", ok, path if ok else f"no {path}",
                   "no compiled kernels: everything runs on NumPy, slower",
                   install(f"python{sysconfig.get_python_version()}-dev"))


def kernels() -> Finding:
    cost = "attention and quantization run on NumPy, slower"
    remedy = "make compiler and headers ok above; the next command then compiles them"
    if os.environ.get("COURSE_KERNEL"):
        remedy = "unset COURSE_KERNEL"
    stamp = state.read_stamp(state.find_environment(str(ROOT))) or {}
    if not stamp and find_spec("numpy") is None:
        return Finding("kernels", False, "not known before the environment is there", cost, remedy)
    from course_lib import backend

    try:
        info = backend.info()
    except CourseError as error:
        return Finding("kernels", False, str(error), cost, remedy)
    ok = info.name != "numpy"
    line = stamp.get("kernels_line") or "kernels: built by hand"
    threads = f", threads: {backend.threads()}" if ok else ""
    return Finding("kernels", ok, f"{info.variant} ({info.reason}){threads}; {line}", cost, remedy)


def cpu() -> Finding:
    features = cpu_features()
    name = cpu_name() or platform.processor() or platform.machine()
    return Finding("CPU", True, f"{name}, {os.cpu_count()} cores, {platform.machine()}: "
                   + (", ".join(features) or "no vector features that the course asks about"))


def cpu_name() -> str:
    lines = read("/proc/cpuinfo").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    board = read("/proc/device-tree/model").strip("\0\n")
    return board or (names[0] if names else "")


def cpu_features() -> list[str]:
    """Return the vector features that kernels may use: from the kernel's auxiliary vector on
    aarch64 (under emulation /proc/cpuinfo shows the host), from /proc/cpuinfo on x86."""
    if platform.machine() in ("aarch64", "arm64") and sys.platform == "linux":
        import ctypes

        getauxval = ctypes.CDLL(None).getauxval
        getauxval.argtypes, getauxval.restype = [ctypes.c_ulong], ctypes.c_ulong
        words = getauxval(16) | getauxval(26) << 64  # AT_HWCAP, AT_HWCAP2
        return [name for name, bit in ARM_FEATURES.items() if words >> bit & 1]
    flags: set[str] = set()
    for line in read("/proc/cpuinfo").splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    return [name for name in X86_FEATURES if name in flags]


def memory() -> Finding:
    sizes = {}
    for line in read("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) / 1e6  # kB to GB
    if "MemAvailable" not in sizes:
        return Finding("memory", True, "size unknown here")
    free = sizes["MemAvailable"]
    return Finding("memory", free >= 1.5, f"{free:.1f} of {sizes['MemTotal']:.1f} GB free",
                   "a notebook (up to 0.6 GB) beside JupyterLab may be ended by the system",
                   "close other programs or notebooks")


def disk() -> Finding:
    folder = state.find_environment(str(ROOT))
    made = os.path.isdir(folder)
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    free = shutil.disk_usage(folder).free / 1e9
    needed = 0.1 if made else 1.0
    return Finding("disk", free >= needed, f"{free:.1f} GB free at {folder}",
                   "set-up or a notebook's copy may fail halfway", "free some space")


def font() -> Finding:
    """A Chinese font for the browser on this machine; figures use the font inside matplotlib."""
    cost = "Chinese words in titles show as boxes in a browser on this machine"
    program = shutil.which("fc-list")
    if program is None:
        return Finding("font", sys.platform == "darwin", "Chinese fonts not known (no fc-list)",
                       cost, install("fontconfig fonts-noto-cjk"))
    answer = subprocess.run([program, ":lang=zh", "family"], capture_output=True, text=True)
    families = sorted(set(answer.stdout.splitlines()))
    detail = families[0] if families else "no font with Chinese characters"
    return Finding("font", bool(families), detail, cost, install("fonts-noto-cjk"))


def browser() -> Finding:
    names = [name for name in BROWSERS if shutil.which(name)]
    if sys.platform == "darwin":
        names = ["the system's"]
    return Finding("browser", bool(names), ", ".join(names) or "none found",
                   "JupyterLab opens no window; its address is printed",
                   "open the address on another computer: ./course lab --no-browser, then "
                   "`ssh -L 8888:127.0.0.1:8888 BOARD` there")


def real_model() -> Finding:
    """The real language model that an optional package carries."""
    name = next(iter(known_models.KNOWN_MODELS))
    title = f"{name} ({known_models.KNOWN_MODELS[name].title})"
    python = state.python_of(state.find_environment(str(ROOT)))
    ok = known_models.locate(name) is not None
    return Finding("real model", ok, title if ok else f"no {title}",
                   "the course's experiments run on its own small model only",
                   known_models.install_command(name, python))


def read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
