# Products of activations with weights.

cdef extern from "linear.h":
    cdef struct linear_kernels:
        int f32(const float *x, ptrdiff_t n, ptrdiff_t cols, const float *w, ptrdiff_t rows,
                float *out, int threads) nogil
        int q8_0(const float *x, ptrdiff_t n, ptrdiff_t cols, const int8_t *codes,
                 const uint16_t *scales, ptrdiff_t rows, float *out, int threads) nogil
        int q4_0(const float *x, ptrdiff_t n, ptrdiff_t cols, const uint8_t *codes,
                 const uint16_t *scales, ptrdiff_t rows, float *out, int threads) nogil
        void quantize_activations(const float *x, ptrdiff_t n, ptrdiff_t cols, int8_t *q,
                                  float *scale) nogil


cdef int require_finite_rows(Variant variant, Array x) except -1:
    """ValueError, naming the row, for NaN or infinity in x."""
    cdef ptrdiff_t bad = -1, n = x.size(0), cols = x.size(1)
    cdef const float *rows = <const float *>x.view.buf
    if cols > 0:
        with nogil:
            bad = variant.c.quantize.first_bad_row(rows, n, cols)
    if bad >= 0:
        raise ValueError(f"{x.name} holds NaN or infinity in row {bad}")
    return 0


cdef ptrdiff_t blocks_of_32(Array x) except -1:
    """Return how many blocks of 32 a row of x has; ValueError if it is not made of them."""
    if x.size(1) == 0 or x.size(1) % 32:
        raise ValueError(f"{x.name} must have rows of a multiple of 32 values, not {x.size(1)}")
    return x.size(1) // 32


@operation
def linear_f32(Variant variant not None, x, w, out):
    """out[t] = w · x[t]: x float32 [n, cols], w float32 [rows, cols], out float32 [n, rows].

    16 chains of fused multiply-adds over the columns, then a halving tree: the same bits for any
    n. Any number of columns; with none, out is 0. ValueError, with nothing written, for NaN or
    infinity in x (names the row) and for shapes that disagree. An overflow gives infinity or NaN,
    as float arithmetic does.
    """
    cdef Array inputs = Array(x, "x", "float32", 2)
    cdef Array weights = Array(w, "w", "float32", 2)
    cdef Array output = Array(out, "out", "float32", 2, True)
    cdef ptrdiff_t n = inputs.size(0), cols = inputs.size(1), rows = weights.size(0)
    cdef const float *x_data = <const float *>inputs.view.buf
    cdef const float *w_data = <const float *>weights.view.buf
    cdef float *out_data = <float *>output.view.buf
    cdef int done
    weights.require_shape((rows, cols), "with as many columns as x")
    output.require_shape((n, rows), "(rows of x, rows of w)")
    apart((output,), (inputs, weights))
    if n == 0 or rows == 0:
        return
    require_finite_rows(variant, inputs)
    with nogil:
        done = variant.c.linear.f32(x_data, n, cols, w_data, rows, out_data, num_threads)
    if not done:
        raise MemoryError("no memory for a copy of some rows of x")


cdef int quantized_product(Variant variant, bint q4, object x, object codes, object scales,
                           object out) except -1:
    cdef Array inputs = Array(x, "x", "float32", 2)
    cdef Array code = Array(codes, "codes", "uint8" if q4 else "int8", 4)
    cdef Array scale = Array(scales, "scales", "float16", 3)
    cdef Array output = Array(out, "out", "float32", 2, True)
    cdef ptrdiff_t n = inputs.size(0), cols = inputs.size(1), rows = output.size(1)
    cdef ptrdiff_t blocks = blocks_of_32(inputs), panels = rows // 16 + (rows % 16 != 0)
    cdef const float *x_data = <const float *>inputs.view.buf
    cdef const void *codes_data = code.view.buf
    cdef const uint16_t *scales_data = <const uint16_t *>scale.view.buf
    cdef float *out_data = <float *>output.view.buf
    cdef int done
    output.require_shape((n, rows), "with one row for each row of x")
    cdef tuple code_shape = (panels, blocks * (4 if q4 else 8), 16, 4)
    cdef tuple scale_shape = (panels, blocks, 16)
    if not (code.has_shape(code_shape) and scale.has_shape(scale_shape)):
        why = f"for {rows} outputs (out) of {cols} columns (x)"
        code.require_shape(code_shape, why)
        scale.require_shape(scale_shape, why)
    apart((output,), (inputs, code, scale))
    if n == 0 or rows == 0:
        return 0
    require_finite_rows(variant, inputs)
    with nogil:
        if q4:
            done = variant.c.linear.q4_0(x_data, n, cols, <const uint8_t *>codes_data, scales_data,
                                         rows, out_data, num_threads)
        else:
            done = variant.c.linear.q8_0(x_data, n, cols, <const int8_t *>codes_data, scales_data,
                                         rows, out_data, num_threads)
    if not done:
        raise MemoryError("no memory for the quantized rows of x")
    return 0


@operation
def linear_q8_0(Variant variant not None, x, codes, scales, out):
    """out[t] = w · x[t] for Q8_0 weights in panels of 16 rows; course_lib.linear packs them.

    x float32 [n, cols] with cols a multiple of 32, which is quantized to int8 in blocks of 32;
    codes int8 [ceil(rows / 16), cols / 4, 16, 4] (any value, also -128); scales float16
    [ceil(rows / 16), cols / 32, 16]; out float32 [n, rows]. The same bits for any n. ValueError,
    with nothing written, for NaN or infinity in x (names the row) and for shapes that disagree.
    """
    quantized_product(variant, False, x, codes, scales, out)


@operation
def linear_q4_0(Variant variant not None, x, codes, scales, out):
    """out[t] = w · x[t] for Q4_0 weights in panels of 16 rows: as linear_q8_0, with codes uint8
    [ceil(rows / 16), cols / 8, 16, 4], byte k of group g of a block holding columns 4 g + k in its
    low and 16 + 4 g + k in its high four bits.
    """
    quantized_product(variant, True, x, codes, scales, out)


@operation
def quantize_activations(Variant variant not None, x, out_q, out_scale):
    """Quantize rows to int8 in blocks of 32 as linear_q8_0 does: max-abs / 127, ties to even.

    x float32 [n, cols] with cols a multiple of 32; out_q int8 [n, cols]; out_scale float32
    [n, cols / 32]. ValueError, with nothing written, for NaN or infinity (names the row).
    """
    cdef Array inputs = Array(x, "x", "float32", 2)
    cdef Array q = Array(out_q, "out_q", "int8", 2, True)
    cdef Array scale = Array(out_scale, "out_scale", "float32", 2, True)
    cdef ptrdiff_t n = inputs.size(0), cols = inputs.size(1), blocks = blocks_of_32(inputs)
    cdef const float *x_data = <const float *>inputs.view.buf
    cdef int8_t *q_data = <int8_t *>q.view.buf
    cdef float *scale_data = <float *>scale.view.buf
    q.require_shape((n, cols), "like x")
    scale.require_shape((n, blocks), "with one value for each 32 of x")
    apart((q, scale), (inputs,))
    require_finite_rows(variant, inputs)
    with nogil:
        variant.c.linear.quantize_activations(x_data, n, cols, q_data, scale_data)
