"""What the library and the kernels refuse at their border, the same with and without kernels."""

import copy
import ctypes
import os
import subprocess
import sys

import numpy as np
import pytest

import kernels_pyx
from course_lib import attention, backend, sparse, sparse_prefill
from course_lib.arrays import F32, LayerRows, NotFiniteError
from course_lib.kvcache import KVCache, kv_ledger
from course_lib.linear import PackedMatrix
from course_lib.paths import ROOT
from course_lib.prefill_attention import add_heads
from course_lib.probe_keys import ProbeKeys

backends = pytest.mark.parametrize("name", ("numpy", *kernels_pyx.VARIANTS))
needs_kernels = pytest.mark.skipif(not kernels_pyx.VARIANTS, reason="no kernels here")
RNG = np.random.default_rng(5)
Q, K = RNG.standard_normal((4, 20, 32), F32), RNG.standard_normal((2, 400, 32), F32)


@pytest.fixture(autouse=True)
def on_backend(request):
    if "name" not in request.fixturenames:
        yield
        return
    with backend.using(request.getfixturevalue("name")):
        yield


@backends
def test_small_numpy_integers_do_not_wrap(name):
    start = np.uint8(250)
    assert np.array_equal(attention.causal_attention(Q, K, K, start=start),
                          attention.causal_attention(Q, K, K, start=250))
    got, trace = sparse_prefill.sparse_prefill_attention(Q, K, K, k_blocks=2, start=start)
    want, _ = sparse_prefill.sparse_prefill_attention(Q, K, K, k_blocks=2, start=250)
    assert np.array_equal(got, want) and trace.groups == [(250, 270)]
    small = {"block_size": np.int8(32), "n_probe": np.uint8(8)}
    assert np.array_equal(sparse.probe_scores(Q[0, 0], K[0], **small),
                          sparse.probe_scores(Q[0, 0], K[0]))
    assert sparse.probe_positions(np.int8(10), np.int16(400), np.int8(32)).tolist() \
        == sparse.probe_positions(10, 400).tolist()
    out, _ = sparse.sparse_attention(Q[:, 0], K, K, k_blocks=np.int8(3), **small)
    assert np.array_equal(out, sparse.sparse_attention(Q[:, 0], K, K, k_blocks=3)[0])
    assert kv_ledger(*np.array([8, 8, 64, 100], np.uint8)) == kv_ledger(8, 8, 64, 100)
    with pytest.raises(TypeError, match="start must be an integer"):
        attention.causal_attention(Q, K, K, start=1.0)


@backends
def test_importance_from_may_be_any_integer(name):
    for run in (attention.causal_attention,
                lambda *a, **o: sparse_prefill.sparse_prefill_attention(*a, k_blocks=2, **o)):
        importance = np.zeros(400, F32)
        run(Q, K, K, start=300, importance=importance, importance_from=2**70)
        assert not importance.any()
        run(Q, K, K, start=300, importance=importance, importance_from=-2**70)
        assert np.isclose(importance.sum(), 80)
        with pytest.raises(TypeError, match="importance_from"):
            run(Q, K, K, start=300, importance=importance, importance_from=0.5)


def test_importance_that_would_overflow_stays_as_it_was():
    most = np.finfo(F32).max
    importance = np.array([1, most, 2], F32)
    with pytest.raises(NotFiniteError, match="importance"):
        add_heads(importance, np.full((2, 2), most, F32))
    assert importance.tolist() == [1, most, 2]


@backends
def test_a_block_far_longer_than_the_array_takes_no_memory(name):
    assert sparse.importance_sums(np.ones(3, F32), 10**15).tolist() == [3]


@backends
def test_switches_and_probe_keys_have_one_type(name):
    q = Q[:, 0]
    for wrong in (1, "yes", None):
        with pytest.raises(TypeError, match="shared_selection"):
            sparse.sparse_attention(q, K, K, shared_selection=wrong)
    sparse.sparse_attention(q, K, K, shared_selection=np.True_)
    with pytest.raises(TypeError, match="probe_keys must be"):
        sparse.sparse_attention(q, K, K, probe_keys=[])
    keys = ProbeKeys()
    keys.update(LayerRows(K, K))
    scale = np.ones(K.shape[:2], F32)
    for other in (LayerRows(K[:1], K[:1]), LayerRows(K[..., :16], K[..., :16]),
                  LayerRows(K.astype(np.int8), K.astype(np.int8), scale, scale)):
        with pytest.raises(ValueError, match="probe_keys holds samples"):
            sparse.sparse_attention(q[:, :other.k.shape[2]], *other, probe_keys=keys)
        with pytest.raises(ValueError, match="probe_keys holds samples"):
            keys.update(other)
    for other in (LayerRows(K, K, scale), LayerRows(K.astype(float), K),
                  LayerRows(K.astype(np.int8), K), LayerRows(K.astype(np.int8), K, scale[:, 1:])):
        with pytest.raises(ValueError, match="scale|float64"):
            ProbeKeys().update(other)


def test_a_wrong_call_leaves_no_probe_keys():
    cache = KVCache(1, 2, 32)
    cache.append(0, K, K)
    kept, size = cache.probe_keys(0, 8), cache.nbytes
    for layer, n_probe in ((7, 8), (0, 0), (-1, 4)):
        with pytest.raises(ValueError):
            cache.probe_keys(layer, n_probe)
    assert cache.probe_keys(np.int8(0), np.int8(8)) is kept
    assert list(cache._probe_keys) == [(0, 8)] and cache.nbytes == size


@backends
def test_packed_matrices_made_by_hand_are_checked(name):
    good = PackedMatrix.quantize(RNG.standard_normal((20, 64), F32))
    nan = good.scales.copy()
    nan[0, 0, 0] = np.nan
    for change, error, message in (
            ({"kind": "q5"}, ValueError, "one of q8_0, q4_0"),
            ({"kind": "q4_0"}, TypeError, "codes of q4_0 must be an array of uint8"),
            ({"rows": 40}, ValueError, "codes of q8_0 40 x 64"),
            ({"rows": -1}, ValueError, "multiple of 32"),
            ({"cols": 48}, ValueError, "multiple of 32"),
            ({"rows": 2.0}, TypeError, "rows must be an integer"),
            ({"codes": good.codes.tolist()}, TypeError, "codes"),
            ({"codes": good.codes[..., ::-1]}, ValueError, "C-contiguous"),
            ({"scales": good.scales.astype(F32)}, TypeError, "scales"),
            ({"scales": good.scales[:1]}, ValueError, "scales"),
            ({"scales": nan}, ValueError, "scales holds NaN")):
        fields = {n: getattr(good, n) for n in ("rows", "cols", "kind", "codes", "scales")}
        with pytest.raises(error, match=message):
            PackedMatrix(**fields | change)
    for call in (PackedMatrix.quantize, PackedMatrix.from_blocks):
        with pytest.raises(ValueError, match="'q5' is unknown; use one of q8_0, q4_0"):
            call(np.ones((2, 34), np.uint8), "q5")


@needs_kernels
def test_operations_without_a_variant_are_refused():
    from kernels_pyx import compiled

    out = np.zeros(3, F32)
    for name, function in compiled.OPERATIONS.items():
        with pytest.raises(TypeError):
            function(None, *[out] * 3)
        assert name in kernels_pyx.kernels("portable")
    with pytest.raises(TypeError, match="'variant' has incorrect type"):
        compiled.OPERATIONS["exp"](None, out, out)
    for make in (compiled.Variant, lambda: compiled.Variant.__new__(compiled.Variant)):
        with pytest.raises(TypeError):
            make()
    with pytest.raises(ValueError, match="place must be"):
        compiled.Variant(99)
    with pytest.raises(TypeError):
        copy.copy(compiled.Variant(0))


@needs_kernels
def test_ctypes_arrays_are_taken():
    x, out = (ctypes.c_float * 4)(0, 1, 2, 3), (ctypes.c_float * 4)()
    kernels_pyx.kernels("portable")["exp"](x, out)
    assert np.allclose(list(out), np.exp(np.arange(4)))
    rows = ((ctypes.c_float * 4) * 2)((1, 2, 3, 4), (5, 6, 7, 8))
    q, scale = np.zeros((2, 4), np.int8), np.zeros(2, F32)
    kernels_pyx.kernels("portable")["quantize_rows"](rows, 0, q, scale)
    assert q[:, 3].tolist() == [127, 127]
    with pytest.raises(TypeError, match="x must be a float32"):
        kernels_pyx.kernels("portable")["exp"]((ctypes.c_double * 4)(), out)


RACE = """
import sys, threading, time
import numpy as np
import kernels_pyx
which, run = sys.argv[1], kernels_pyx.kernels(kernels_pyx.VARIANTS[0])
rng, F32 = np.random.default_rng(0), np.float32
q, k = rng.standard_normal((4, 32), F32), rng.standard_normal((2, 6400, 32), F32)
out = np.empty_like(q)
if which == "visible":
    q = rng.standard_normal((2, 512, 32), F32)
    out, index, good, bad = np.empty_like(q), np.full(512, 10, np.int64), 10, 2**40
    call = lambda: run["prefill_attention"](q, k, k, index, out)
elif which == "first":
    words, index, good, bad = np.ones(10**5, np.int32), np.zeros(10**5, np.int64), 0, 2**40
    call = lambda: run["read_blocks"](words, index, 16)
else:
    probe = np.empty((4, 200), F32)
    order, ids = np.zeros((2, 4, 100), np.int32)
    more = np.zeros((2, 4), np.int32)
    index, good, bad = {"order": order, "ids": ids}[which], 0, 2**30
    call = lambda: run["sparse_attention"](q, k, k, None, None, None, 100, 32, 8, False, out,
                                           probe, order, ids, *more)
def spoil():
    while going:
        index[...] = bad
        index[...] = good
going, end = True, time.monotonic() + 0.7
sys.setswitchinterval(1e-5)
thread = threading.Thread(target=spoil)
thread.start()
while time.monotonic() < end:
    try:
        call()
    except ValueError:
        pass
going = False
thread.join()
"""


@needs_kernels
@pytest.mark.parametrize("which", ["visible", "first", "order", "ids"])
def test_indexes_that_another_thread_writes_do_not_lead_astray(which):
    subprocess.run([sys.executable, "-c", RACE, which], check=True, timeout=60,
                   env={**os.environ, "PYTHONPATH": str(ROOT)})
