"""Which kernels run: the environment variable, a missing or broken build, clear refusals."""

import importlib
import io
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

import kernels_pyx
from course_lib import backend
from course_lib.errors import CourseError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.delenv("COURSE_KERNEL", raising=False)
    backend._resolve.cache_clear()
    backend._set_threads_once.cache_clear()
    yield
    backend._resolve.cache_clear()
    backend._set_threads_once.cache_clear()


def provide(monkeypatch, variants):
    """Stand in for kernels_pyx with the given variants; each has one kernel that names it."""
    module = types.ModuleType("kernels_pyx")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels_pyx", None, origin="memory")
    module.VARIANTS = variants
    module.set_num_threads = lambda count: None
    module.kernels = lambda variant: {"which": lambda: variant}
    monkeypatch.setitem(sys.modules, "kernels_pyx", module)


def test_the_best_variant_runs_by_default(monkeypatch):
    provide(monkeypatch, ("avx2", "portable"))
    info = backend.info()
    assert (info.name, info.variant) == ("kernels_pyx", "avx2")
    assert "best" in info.reason
    assert backend.kernel("which")() == "avx2"
    assert backend.kernel("no_such_operation") is None


@pytest.mark.parametrize("asked", ["portable", "  portable "])
def test_the_environment_chooses_and_may_change(monkeypatch, asked):
    provide(monkeypatch, ("avx2", "portable"))
    assert backend.kernel("which")() == "avx2"
    monkeypatch.setenv("COURSE_KERNEL", asked)
    assert backend.info().variant == "portable"
    assert backend.info().reason == "COURSE_KERNEL=portable"
    assert backend.kernel("which")() == "portable"
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    assert backend.info() == backend.BackendInfo("numpy", "numpy", "COURSE_KERNEL=numpy")
    assert backend.kernel("which") is None


@pytest.mark.parametrize("before", [None, "avx2"])
def test_a_block_of_code_runs_on_another_backend_also_when_it_fails(monkeypatch, before):
    provide(monkeypatch, ("avx2", "portable"))
    if before:
        monkeypatch.setenv("COURSE_KERNEL", before)
    with backend.using("portable") as info:
        assert info.variant == backend.kernel("which")() == "portable"
        with pytest.raises(KeyError), backend.using("numpy"):
            assert backend.kernel("which") is None
            raise KeyError
        assert backend.kernel("which")() == "portable"
    with pytest.raises(CourseError), backend.using("neon"):
        pass
    assert os.environ.get("COURSE_KERNEL") == before


@pytest.mark.parametrize(("text", "count"), [("3", 3), (" 2 ", 2), ("", None)])
def test_threads_are_asked_for_or_one_per_fast_core(monkeypatch, text, count):
    monkeypatch.setenv("COURSE_THREADS", text)
    assert backend.threads() == (count or len(backend.performance_cores()))


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", "1025", "²"])
def test_a_wrong_number_of_threads_is_refused(monkeypatch, text):
    monkeypatch.setenv("COURSE_THREADS", text)
    with pytest.raises(CourseError, match="COURSE_THREADS=.* from 1 to 1024"):
        backend.threads()


def test_another_variant_does_not_reset_the_threads(monkeypatch):
    provide(monkeypatch, ("avx2", "portable"))
    asked = []
    monkeypatch.setattr(sys.modules["kernels_pyx"], "set_num_threads", asked.append)
    monkeypatch.setenv("COURSE_THREADS", "3")
    assert backend.info().variant == "avx2"
    with backend.using("portable"), backend.using("numpy"):
        backend.info()
    assert asked == [3]


def test_only_the_fast_cores_count(monkeypatch):
    capacity = {0: 400, 1: 400, 2: 1024, 3: 1024}
    monkeypatch.setattr(backend.os, "sched_getaffinity", lambda pid: set(capacity), raising=False)

    def read(path, **options):
        core = int(Path(path).parent.name.removeprefix("cpu"))
        return io.StringIO(str(capacity[core]))

    monkeypatch.setattr(backend, "open", read, raising=False)
    assert backend.performance_cores() == [2, 3]
    capacity.update({2: 400, 3: 400})
    assert backend.performance_cores() == [0, 1, 2, 3]


def test_an_unknown_name_lists_the_known(monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", "sse9")
    for call in (backend.info, lambda: backend.kernel("quantize_rows")):
        with pytest.raises(CourseError, match="sse9 .*numpy, portable, .*dotprod"):
            call()


def test_a_variant_that_is_not_there_is_refused(monkeypatch):
    provide(monkeypatch, ("portable",))
    monkeypatch.setenv("COURSE_KERNEL", "neon")
    with pytest.raises(CourseError, match="neon cannot run here; .* has numpy, portable"):
        backend.info()


def test_a_build_without_variants_leaves_numpy(monkeypatch):
    provide(monkeypatch, ())
    assert backend.info().variant == "numpy"
    assert backend.kernel("which") is None
    monkeypatch.setenv("COURSE_KERNEL", "portable")
    with pytest.raises(CourseError, match="has numpy"):
        backend.info()


@pytest.mark.parametrize(
    ("error", "reason"),
    [(ModuleNotFoundError("gone", name="kernels_pyx"), "kernels_pyx is not built"),
     (ModuleNotFoundError("no module x", name="x"), "does not load (no module x)"),
     (ImportError("undefined symbol: f"), "does not load (undefined symbol: f)"),
     (ValueError("numpy.dtype size changed"), "does not load (numpy.dtype size changed)")])
def test_a_missing_or_broken_build_leaves_numpy_and_says_why(monkeypatch, error, reason):
    def fail(name):
        raise error

    monkeypatch.setattr(backend.importlib, "import_module", fail)
    info = backend.info()
    assert (info.name, info.variant) == ("numpy", "numpy")
    assert reason in info.reason
    assert backend.kernel("quantize_rows") is None
    monkeypatch.setenv("COURSE_KERNEL", "portable")
    with pytest.raises(CourseError, match="needs the compiled kernels") as caught:
        backend.info()
    assert reason in str(caught.value)


def test_an_empty_folder_is_no_build(monkeypatch):
    module = types.ModuleType("kernels_pyx")
    module.__spec__ = importlib.machinery.ModuleSpec("kernels_pyx", None, is_package=True)
    monkeypatch.setitem(sys.modules, "kernels_pyx", module)
    assert backend.info().variant == "numpy"
    assert "without a package" in backend.info().reason


def run_python(code, **environment):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), **environment}).stdout


def test_importing_the_subject_never_fails_because_of_the_environment():
    said = run_python(
        "import course_lib.quant, course_lib.sparse_prefill, course_lib.kvcache\n"
        "from course_lib.errors import CourseError\n"
        "try: course_lib.quant.quantize_rows([1.0])\n"
        "except CourseError as error: print(error)", COURSE_KERNEL="nonsense")
    assert "COURSE_KERNEL=nonsense is not a kernel name" in said


def test_the_subject_imports_the_subject_only():
    said = run_python(
        "import sys, course_lib.sparse_prefill, course_lib.kvcache, course_lib.linear\n"
        "print(*sorted(m for m in sys.modules if m.startswith(('course_lib.', 'matplotlib',"
        " 'ipywidgets', 'IPython', 'tqdm'))))")
    assert said.split() == [f"course_lib.{m}" for m in (
        "arrays", "attention", "attention_common", "backend", "errors", "fused", "gather",
        "kvcache", "linear", "prefill_attention", "probe_keys", "quant", "selection", "sparse",
        "sparse_kernels", "sparse_prefill", "weight_blocks")]


def test_a_package_that_is_not_compiled_says_so(monkeypatch):
    provide(monkeypatch, ())
    monkeypatch.setattr(sys.modules["kernels_pyx"], "COMPILED", False, raising=False)
    assert backend.info().reason == "the kernels are not compiled"
    monkeypatch.setenv("COURSE_KERNEL", "avx2")
    with pytest.raises(CourseError, match="not compiled; build them"):
        backend.info()


def test_a_foreign_module_of_that_name_leaves_numpy(monkeypatch):
    provide(monkeypatch, ())
    monkeypatch.delattr(sys.modules["kernels_pyx"], "VARIANTS")
    assert backend.info() == backend.BackendInfo("numpy", "numpy",
                                                 "kernels_pyx is another module of that name")


def test_no_more_than_four_threads_per_core_are_used(monkeypatch):
    monkeypatch.setattr(backend, "usable_cores", lambda: [0, 1])
    for text, count in (("8", 8), ("9", 8), ("1024", 8)):
        monkeypatch.setenv("COURSE_THREADS", text)
        assert backend.threads() == count
    monkeypatch.setenv("COURSE_THREADS", "1" * 5000)
    with pytest.raises(CourseError, match=r"COURSE_THREADS=1{20}\.\.\. must be"):
        backend.threads()
    monkeypatch.setenv("COURSE_THREADS", "1" * 5000)
    with pytest.raises(CourseError, match=r"COURSE_THREADS=1{20}\.\.\. must be"):
        backend.threads()


def test_a_held_choice_is_looked_up_once_and_gives_way_to_using(monkeypatch):
    monkeypatch.setenv("COURSE_KERNEL", "numpy")
    with backend.held():
        monkeypatch.delenv("COURSE_KERNEL")
        assert backend.kernel("rms_norm") is None  # the environment of the beginning
        for variant in kernels_pyx.VARIANTS[:1]:
            with backend.using(variant):
                assert backend.kernel("rms_norm") is not None
        assert backend.kernel("rms_norm") is None
        seen = []
        other = threading.Thread(target=lambda: seen.append(backend.kernel("rms_norm")))
        other.start()
        other.join()
        assert (seen[0] is None) == (not kernels_pyx.VARIANTS)  # each thread holds its own
    assert (backend.kernel("rms_norm") is None) == (not kernels_pyx.VARIANTS)


def test_threads_that_wait_do_not_spin_for_long():
    """Set before the kernels are loaded, and a user's own value stays."""
    code = ("import os; from course_lib import backend; backend.info(); "
            "print(os.environ.get('GOMP_SPINCOUNT'))")
    for own, expected in ({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"):
        env = {k: v for k, v in os.environ.items() if k != "GOMP_SPINCOUNT"} | own
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True,
                              text=True, cwd=ROOT, check=True)
        assert done.stdout.strip() == expected
