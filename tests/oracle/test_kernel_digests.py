"""Every compiled operation gives the bits of `golden/kernel_digests.json`, on every variant, with
any number of threads. tools/make_kernel_digests.py writes the file, from the portable variant."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import kernels_pyx
from tests.oracle.kernel_cases import MEASURING, POISON, SIZES, Bits, cases, make
from tests.sharing import shared_among

GOLDEN = json.loads(
    (Path(__file__).parent / "golden" / "kernel_digests.json").read_text(encoding="ascii"))
OPERATIONS = sorted(SIZES)
if kernels_pyx.VARIANTS:
    from kernels_pyx.compiled import OPERATIONS as COMPILED
REQUIRED = os.environ.get("COURSE_REQUIRE_KERNELS") == "1"
needs_kernels = pytest.mark.skipif(not kernels_pyx.VARIANTS and not REQUIRED,
                                   reason="the kernels are not compiled here")


@pytest.fixture(params=(1, 2, 3), ids=lambda count: f"threads_{count}")
def threads(request):
    with shared_among(request.param):
        yield request.param


@needs_kernels
@pytest.mark.parametrize("variant", kernels_pyx.VARIANTS or ("none",))
@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_bits_are_those_of_the_file(variant, operation, threads):
    got = {name: call.digest(variant) for name, call in cases(operation).items()}
    expected = {name: GOLDEN[name] for name in got}
    wrong = [name for name in got if got[name] != expected[name]]
    assert not wrong, f"{len(wrong)} of {len(got)} differ: {wrong[:5]}"


@needs_kernels
def test_every_operation_has_cases():
    assert set(COMPILED) == set(SIZES) | set(MEASURING)
    assert all(len(sizes) >= 3 for sizes in SIZES.values())


def test_the_file_holds_every_case_and_no_other():
    assert list(GOLDEN) == [name for operation in OPERATIONS for name in cases(operation)]


def test_cases_differ():
    """Two cases with one digest are one case; only the smallest calls have one answer."""
    assert len(set(GOLDEN.values())) > 0.95 * len(GOLDEN)


def test_inputs_are_the_same_on_every_machine():
    """And with them the digests: no sampler and no mathematical function is involved."""
    assert Bits("x").raw(2).tolist() == [2151374751030940024, 13648862252194908045]
    assert Bits("x").floats(2).tolist() == [-0.7059421539306641, 0.9781718254089355]


@needs_kernels
@pytest.mark.parametrize("operation", ("linear_q8_0", "linear_q4_0"))
def test_more_panels_than_bands(operation, threads):
    """A band of two panels or more, and a last one that is shorter."""
    call = make(operation, **SIZES[operation][0] | {"rows": 520})
    fresh = {name: call.arguments[name].copy() for name in call.outputs}
    kernels_pyx.kernels(kernels_pyx.VARIANTS[0])[operation](**call.arguments | fresh)
    assert call.digest(kernels_pyx.VARIANTS[0]) == call.digest("portable")
    for array in fresh.values():
        assert not (array.view("u1") == POISON).reshape(-1, 4).all(1).any()
