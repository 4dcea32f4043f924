# Quantization of KV rows.

cdef extern from "quantize.h":
    cdef enum rounding_rule:
        NUM_RULES
    cdef struct quantize_kernels:
        ptrdiff_t first_bad_row(const float *x, ptrdiff_t rows, ptrdiff_t d) nogil
        void quantize_rows(const float *x, ptrdiff_t rows, ptrdiff_t d, rounding_rule rule,
                           int8_t *q, float *scale) nogil


@operation
def quantize_rows(Variant variant not None, x, rule_code, out_q, out_scale):
    """Quantize rows of float32 to int8 with one scale a row (engine rule 1).

    x float32 [rows, d], read-only allowed; rule_code an index into ROUNDING_RULES; out_q int8
    [rows, d] and out_scale float32 [rows] receive the result. ValueError, with nothing written,
    for NaN or infinity (names the row), for shapes that disagree, for d = 0 and for outputs that
    share memory; TypeError for a wrong dtype.
    """
    cdef Array rows = Array(x, "x", "float32", 2)
    cdef Array q = Array(out_q, "out_q", "int8", 2, True)
    cdef Array scale = Array(out_scale, "out_scale", "float32", 1, True)
    cdef ptrdiff_t n = rows.size(0), d = rows.size(1), bad
    cdef const float *source = <const float *>rows.view.buf
    cdef int8_t *q_out = <int8_t *>q.view.buf
    cdef float *scale_out = <float *>scale.view.buf
    cdef rounding_rule rule = <rounding_rule>whole(rule_code, "rule_code", 0, NUM_RULES - 1)
    if d == 0:
        raise ValueError("x must have at least one value a row")
    q.require_shape((n, d), "like x")
    scale.require_shape((n,), "to have one value for each row of x")
    apart((q, scale), (rows,))
    with nogil:
        bad = variant.c.quantize.first_bad_row(source, n, d)
        if bad < 0:
            variant.c.quantize.quantize_rows(source, n, d, rule, q_out, scale_out)
    if bad >= 0:
        raise ValueError(f"x holds NaN or infinity in row {bad}")
