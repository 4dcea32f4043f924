"""The compiled kernels: Python functions that check their arguments and call C.

Every operation takes a Variant first; kernels_pyx.kernels(name) binds it. Arguments are checked
here, before the GIL is released; the C code trusts them. One file in wrappers/ per family.
"""

from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int8_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uintptr_t

OPERATIONS = {}
"""Operation name -> function of (Variant, *arguments)."""


def operation(function):
    """Register an operation under its name."""
    OPERATIONS[function.__name__] = function
    return function


cdef extern from "kernels.h":
    cdef struct quantize_kernels
    cdef struct attention_kernels
    cdef struct selection_kernels
    cdef struct prefill_kernels
    cdef struct layer_kernels
    cdef struct linear_kernels
    cdef struct step_kernels
    cdef struct decoder_kernels
    cdef struct pack_kernels
    cdef struct measure_kernels
    cdef struct c_kernels "kernels":
        const char *name
        const quantize_kernels *quantize
        const attention_kernels *attention
        const selection_kernels *selection
        const prefill_kernels *prefill
        const layer_kernels *layers
        const linear_kernels *linear
        const step_kernels *steps
        const decoder_kernels *decoder
        const pack_kernels *pack
        const measure_kernels *measure
    enum: MAX_VARIANTS
    int runnable_kernels(const c_kernels **found)

cdef extern from "parallel.h":
    int parallel_available()
    long c_parallel_regions "parallel_regions"()
    double worth_a_thread


cdef class Variant:
    """The operations of one instruction set, as C functions: those of runnable()[place]."""
    cdef const c_kernels *c

    def __cinit__(self, place):
        cdef const c_kernels *found[MAX_VARIANTS]
        cdef int count = runnable_kernels(found)
        self.c = found[whole(place, "place", 0, count - 1)]

    @property
    def name(self):
        return self.c.name.decode()


def runnable():
    """Return the variants that this CPU runs, best first."""
    cdef const c_kernels *found[MAX_VARIANTS]
    return [Variant(place) for place in range(runnable_kernels(found))]


HAS_THREADS = bool(parallel_available())
"""Whether the build can use more than one thread (OpenMP)."""

cdef int num_threads = 1
cdef int most_threads = 1024 if HAS_THREADS else 1


def set_num_threads(count):
    """Use up to `count` threads from now on; results do not depend on it. ValueError below 1."""
    global num_threads
    num_threads = min(whole(count, "the number of threads", 1, 1024), most_threads)


def share_small_work(yes):
    """Use all threads even where a call is done before they are awake, for tests; or not."""
    global worth_a_thread
    worth_a_thread = 0 if yes else 1 << 20


def parallel_regions():
    """Return how many calls have started more than one thread, for tests."""
    return c_parallel_regions()


def forked():
    """To be called in a child made by fork: it inherits OpenMP's state but not its threads, and
    would wait for them without end. So it uses one thread, whatever it asks for."""
    global most_threads
    most_threads = 1
    set_num_threads(1)


def get_num_threads():
    """Return how many threads the kernels use at most."""
    return num_threads


include "wrappers/arguments.pxi"
include "wrappers/quantize.pxi"
include "wrappers/attention.pxi"
include "wrappers/selection.pxi"
include "wrappers/prefill.pxi"
include "wrappers/layers.pxi"
include "wrappers/linear.pxi"
include "wrappers/steps.pxi"
include "wrappers/decoder.pxi"
include "wrappers/pack.pxi"
include "wrappers/measure.pxi"
