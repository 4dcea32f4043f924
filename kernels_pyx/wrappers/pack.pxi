# Weights quantized into panels.

cdef extern from "pack.h":
    cdef struct pack_kernels:
        ptrdiff_t first_too_large(const float *x, ptrdiff_t rows, ptrdiff_t cols,
                                  float divisor) nogil
        void q8_0(const float *x, ptrdiff_t rows, ptrdiff_t cols, int8_t *codes, uint16_t *scales,
                  int threads) nogil
        void q4_0(const float *x, ptrdiff_t rows, ptrdiff_t cols, uint8_t *codes, uint16_t *scales,
                  int threads) nogil


cdef int pack_rows(Variant variant, bint q4, object x, object out_codes, object out_scales) except -1:
    cdef Array inputs = Array(x, "x", "float32", 2)
    cdef Array code = Array(out_codes, "out_codes", "uint8" if q4 else "int8", 4, True)
    cdef Array scale = Array(out_scales, "out_scales", "float16", 3, True)
    cdef ptrdiff_t rows = inputs.size(0), cols = inputs.size(1), bad
    cdef ptrdiff_t blocks = blocks_of_32(inputs), panels = rows // 16 + (rows % 16 != 0)
    cdef const float *x_data = <const float *>inputs.view.buf
    cdef void *codes_data = code.view.buf
    cdef uint16_t *scales_data = <uint16_t *>scale.view.buf
    code.require_shape((panels, blocks * (4 if q4 else 8), 16, 4), f"for {rows} rows of {cols}")
    scale.require_shape((panels, blocks, 16), f"for {rows} rows of {cols}")
    apart((code, scale), (inputs,))
    if rows == 0:
        return 0
    with nogil:
        bad = variant.c.pack.first_too_large(x_data, rows, cols, 8 if q4 else 127)
        if bad < 0 and q4:
            variant.c.pack.q4_0(x_data, rows, cols, <uint8_t *>codes_data, scales_data, num_threads)
        elif bad < 0:
            variant.c.pack.q8_0(x_data, rows, cols, <int8_t *>codes_data, scales_data, num_threads)
    if bad >= 0:
        require_finite_rows(variant, inputs)
        raise ValueError(f"x is too large for a float16 scale in row {bad}")
    return 0


@operation
def pack_q8_0(Variant variant not None, x, out_codes, out_scales):
    """Quantize weights to Q8_0 in panels of 16 rows, as linear_q8_0 takes them.

    x float32 [rows, cols] with cols a multiple of 32; out_codes int8 [ceil(rows / 16), cols / 4,
    16, 4]; out_scales float16 [ceil(rows / 16), cols / 32, 16]. Rows that fill up the last panel
    are zeros. ValueError, with nothing written, for NaN, infinity or a value whose block's scale
    is beyond float16 (names the row).
    """
    pack_rows(variant, False, x, out_codes, out_scales)


@operation
def pack_q4_0(Variant variant not None, x, out_codes, out_scales):
    """Quantize weights to Q4_0 in panels of 16 rows, as linear_q4_0 takes them: as pack_q8_0, with
    out_codes uint8 [ceil(rows / 16), cols / 8, 16, 4].
    """
    pack_rows(variant, True, x, out_codes, out_scales)
