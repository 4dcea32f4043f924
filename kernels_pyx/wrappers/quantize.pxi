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


@operation
def quantize_heads(Variant variant not None, k, v, rule_code, out_k, out_v, out_k_scale,
                   out_v_scale):
    """Quantize the rows of every head of K and V as quantize_rows does, into a cache.

    k, v float32 [heads, t, d]; rule_code as in quantize_rows; out_k and out_v int8 [heads, t, d],
    out_k_scale and out_v_scale float32 [heads, t] receive the result and may be views of some
    tokens of longer heads. ValueError, with nothing written, for NaN or infinity (names the row),
    for shapes that disagree, for d = 0 and for outputs that share memory; TypeError for a wrong
    dtype.
    """
    cdef Array keys = Array(k, "k", "float32", 3), values = Array(v, "v", "float32", 3)
    cdef Array k_out = Array(out_k, "out_k", "int8", 3, True, True)
    cdef Array v_out = Array(out_v, "out_v", "int8", 3, True, True)
    cdef Array k_scale = Array(out_k_scale, "out_k_scale", "float32", 2, True, True)
    cdef Array v_scale = Array(out_v_scale, "out_v_scale", "float32", 2, True, True)
    cdef ptrdiff_t heads = keys.size(0), t = keys.size(1), d = keys.size(2), bad
    cdef rounding_rule rule = <rounding_rule>whole(rule_code, "rule_code", 0, NUM_RULES - 1)
    cdef Array rows, q, scale
    if d == 0:
        raise ValueError("k must have at least one value a row")
    values.require_shape((heads, t, d), "like k")
    for q in (k_out, v_out):
        q.require_shape((heads, t, d), "like k")
    for scale in (k_scale, v_scale):
        scale.require_shape((heads, t), "to have one value for each row of k")
    apart((k_out, v_out, k_scale, v_scale), (keys, values))
    for rows in (keys, values):
        bad = variant.c.quantize.first_bad_row(<const float *>rows.view.buf, heads * t, d)
        if bad >= 0:
            raise ValueError(f"{rows.name} holds NaN or infinity in row {bad}")
    for rows, q, scale in ((keys, k_out, k_scale), (values, v_out, v_scale)):
        quantize_each_head(variant, rule, rows, q, scale)


cdef int quantize_each_head(Variant variant, rounding_rule rule, Array rows, Array q,
                            Array scale) except -1:
    cdef ptrdiff_t h, heads = rows.size(0), t = rows.size(1), d = rows.size(2)
    cdef ptrdiff_t q_stride = q.head_stride(), scale_stride = scale.head_stride()
    cdef const float *source = <const float *>rows.view.buf
    cdef int8_t *q_out = <int8_t *>q.view.buf
    cdef float *scale_out = <float *>scale.view.buf
    with nogil:
        for h in range(heads):
            variant.c.quantize.quantize_rows(source + h * t * d, t, d, rule, q_out + h * q_stride,
                                             scale_out + h * scale_stride)
    return 0
