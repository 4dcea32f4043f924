"""Kernels in plain C, the same bits on any machine.

Arguments are checked here, before the GIL is released; the C code trusts them.
"""

from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_IsContiguous,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from libc.stddef cimport ptrdiff_t
from libc.stdint cimport int8_t, uintptr_t

OPERATIONS = ("quantize_rows",)


cdef extern from "quantize.h":
    cdef enum rounding_rule:
        NUM_RULES
    ptrdiff_t c_first_bad_row "first_bad_row" (
        const float *x, ptrdiff_t rows, ptrdiff_t d) nogil
    void c_quantize_rows "quantize_rows" (
        const float *x, ptrdiff_t rows, ptrdiff_t d, rounding_rule rule,
        int8_t *q, float *scale) nogil


cdef class Array:
    """A checked view of an argument: C-contiguous, native, of one dtype and number of axes.

    TypeError for something that is no array or has another dtype or byte order, ValueError for
    another shape or memory layout; both name the argument. Holds the buffer while it lives.
    """
    cdef Py_buffer view
    cdef bint held

    def __cinit__(self, object array, str name, str dtype, int ndim, bint writable):
        cdef str wanted = f"a {'writable ' if writable else ''}{dtype} array of {ndim} axes"
        if not PyObject_CheckBuffer(array):
            raise TypeError(f"{name} must be {wanted}, not {type(array).__name__}")
        try:
            PyObject_GetBuffer(array, &self.view, PyBUF_STRIDES | PyBUF_FORMAT
                               | (PyBUF_WRITABLE if writable else 0))
        except (BufferError, ValueError) as error:
            raise ValueError(f"{name} must be {wanted}: {error}") from None
        self.held = True
        if self.view.format == b"=f":  # how NumPy exports a misaligned array
            raise ValueError(f"{name} is misaligned in memory; pass a copy")
        if self.view.format != (b"f" if dtype == "float32" else b"b"):
            raise TypeError(f"{name} must be {wanted} in native byte order, "
                            f"its buffer format is {(<bytes>self.view.format).decode()!r}")
        if self.view.ndim != ndim:
            raise ValueError(f"{name} must be {wanted}, it has {self.view.ndim}")
        if not PyBuffer_IsContiguous(&self.view, b"C"):
            raise ValueError(f"{name} must be C-contiguous; pass numpy.ascontiguousarray({name})")
        if <uintptr_t>self.view.buf % self.view.itemsize:
            raise ValueError(f"{name} is misaligned in memory; pass a copy")

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)


def quantize_rows(x, int rule_code, out_q, out_scale):
    """Quantize rows of float32 to int8 with one scale a row (engine rule 1).

    x float32 [rows, d], read-only allowed; rule_code an index into ROUNDING_RULES; out_q int8
    [rows, d] and out_scale float32 [rows] receive the result. ValueError, with nothing written,
    for NaN or infinity (names the row), for shapes that disagree and for d = 0; TypeError for a
    wrong dtype.
    """
    cdef Array rows = Array(x, "x", "float32", 2, False)
    cdef Array q = Array(out_q, "out_q", "int8", 2, True)
    cdef Array scale = Array(out_scale, "out_scale", "float32", 1, True)
    cdef ptrdiff_t n = rows.view.shape[0], d = rows.view.shape[1], bad
    cdef const float *source = <const float *>rows.view.buf
    cdef int8_t *q_out = <int8_t *>q.view.buf
    cdef float *scale_out = <float *>scale.view.buf
    if not 0 <= rule_code < NUM_RULES:
        raise ValueError(f"rule_code must be 0 to {NUM_RULES - 1}, not {rule_code}")
    if d == 0:
        raise ValueError("x must have at least one value a row")
    if q.view.shape[0] != n or q.view.shape[1] != d:
        raise ValueError(f"out_q must have the shape of x, ({n}, {d}), "
                         f"not ({q.view.shape[0]}, {q.view.shape[1]})")
    if scale.view.shape[0] != n:
        raise ValueError(f"out_scale must have one value for each of the {n} rows of x, "
                         f"not {scale.view.shape[0]}")
    with nogil:
        bad = c_first_bad_row(source, n, d)
        if bad < 0:
            c_quantize_rows(source, n, d, <rounding_rule>rule_code, q_out, scale_out)
    if bad >= 0:
        raise ValueError(f"x holds NaN or infinity in row {bad}")
