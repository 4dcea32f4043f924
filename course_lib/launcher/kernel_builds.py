"""The kernels built in other ways, in a folder apart from the checkout, and tests that run on such
a build."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from course_lib.errors import CourseError
from course_lib.launcher.runner import ONE_BY_ONE, TESTS, Count, environ, pytest
from course_lib.launcher.side_environment import impossible
from course_lib.paths import ROOT

SANITIZERS = ("-O1 -g1 -fno-omit-frame-pointer -fsanitize=address,undefined "
              "-fno-sanitize-recover=all -fno-wrapv")
"""Python's own flags hold -fwrapv, under which an overflow is no error to be found."""


def build(folder: Path, **variables: str) -> str:
    """Compile the kernels into ``folder / "lib"`` with these environment variables (see setup.py);
    return the line that says what was built. CourseError, with the compiler's messages, if
    setup.py fails."""
    env = {k: v for k, v in os.environ.items() if k not in ("CC", "COURSE_REQUIRE_KERNELS")}
    command = [sys.executable, "setup.py", "build_ext", "--force"]
    command += ["--build-temp", str(folder / "temp"), "--build-lib", str(folder / "lib")]
    result = subprocess.run(command, cwd=ROOT, env=env | variables, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = [line for line in result.stdout.splitlines() if line.startswith("kernels: ")]
    if result.returncode or not lines:
        raise CourseError(f"the kernels were not built:\n{result.stdout}")
    package = folder / "lib" / "kernels_pyx"
    if package.exists():
        shutil.copy(ROOT / "kernels_pyx" / "__init__.py", package)
    return lines[-1]


def variables(folder: Path, **more: str) -> dict[str, str]:
    """Return the environment of tests that run on a build; see tests/conftest.py."""
    return environ(COURSE_TEST_KERNELS=str(folder / "lib"), **more)


def sanitized() -> Count:
    """Run the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, with Cython's
    run-time checks."""
    library = find_sanitizer()
    if library is None:
        return impossible("gcc's libasan is not installed")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            build(folder, CC="gcc", COURSE_KERNEL_FLAGS=SANITIZERS, COURSE_KERNEL_CHECKS="1",
                  COURSE_REQUIRE_KERNELS="1")
        except CourseError as error:
            print(error, flush=True)
            return Count(failed=1, note="the kernels do not build with sanitizers")
        env = variables(
            folder, LD_PRELOAD=library, PYTHONMALLOC="malloc",
            ASAN_OPTIONS="detect_leaks=0:allocator_may_return_null=1",
            UBSAN_OPTIONS="print_stacktrace=1", COURSE_REQUIRE_KERNELS="1")
        files = [*sorted((TESTS / "unit").glob("test_kernels*.py")),
                 TESTS / "oracle" / "test_kernel_digests.py",
                 TESTS / "property" / "test_kernels_fuzz.py"]
        # Plain C once, and the digests with two threads.
        chosen = "not portable-baseline and not threads_1 and not threads_3"
        return pytest("-s", *ONE_BY_ONE, "-k", chosen, *map(str, files), env=env)


def find_sanitizer() -> str | None:
    """Return the path of gcc's AddressSanitizer, which must be loaded before anything else."""
    if shutil.which("gcc") is None:
        return None
    answer = subprocess.run(["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True)
    path = answer.stdout.strip()
    return path if os.path.isabs(path) else None
