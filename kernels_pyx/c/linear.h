/* Products of activations with weights in float32, Q8_0 and Q4_0.
 *
 * out[t][r] = x[t] . w[r] for every row t of x [n, cols] and every row r of the weights
 * [rows, cols]. One row of x (GEMV) and many (GEMM) give the same bits: how many rows are computed
 * at a time decides which weights are kept in registers, never the order of a sum.
 *
 * float32: 16 chains of fused multiply-adds, chain i over columns i, i + 16, i + 32, ..., then
 * v16_sum. Columns are padded with zeros to a multiple of 16.
 *
 * Q8_0 and Q4_0: x is quantized to int8 in blocks of 32 columns, the products inside a block are
 * summed as integers (exact, in any order), and the blocks are added one after the other:
 *     acc = fmaf(w_scale * x_scale, (float)sum, acc)
 *
 * Quantized weights lie in panels of 16 rows, so that the 16 lanes of a vector are 16 outputs and
 * no sum over lanes is needed:
 *     Q8_0 codes  [panel][cols / 4][16 rows][4 columns]  int8
 *     Q4_0 codes  [panel][cols / 32][4][16 rows][4]      byte j of a block of a row: columns j (low
 *                                                        four bits) and j + 16 (high), value + 8
 *     scales      [panel][cols / 32][16 rows]            float16
 * The last panel is padded with rows that no output is written for. */
#ifndef COURSE_LINEAR_H
#define COURSE_LINEAR_H

#include <stddef.h>
#include <stdint.h>

enum weight_kind { Q8_0, Q4_0, FLOAT32 };

/* Weights [rows, cols] of any kind; `scales` is NULL for float32. */
struct weight_matrix {
    enum weight_kind kind;
    const void *codes;
    const uint16_t *scales;
    ptrdiff_t rows, cols;
};

/* All but quantize_activations return 0 where memory for the copy of x is missing, else 1. x must
 * be finite, cols of a quantized product a multiple of 32; rows and n are at least 1. */
struct linear_kernels {
    int (*f32)(const float *x, ptrdiff_t n, ptrdiff_t cols, const float *w, ptrdiff_t rows,
               float *out, int threads);

    int (*q8_0)(const float *x, ptrdiff_t n, ptrdiff_t cols, const int8_t *codes,
                const uint16_t *scales, ptrdiff_t rows, float *out, int threads);

    int (*q4_0)(const float *x, ptrdiff_t n, ptrdiff_t cols, const uint8_t *codes,
                const uint16_t *scales, ptrdiff_t rows, float *out, int threads);

    /* What q8_0 and q4_0 make of x: q[n][cols], scale[n][cols / 32]. Per block of 32 values with
     * largest magnitude m (1 where that is below 1e-6): scale = m / 127 and
     * q = x * (127 / m) rounded, ties to even. */
    void (*quantize_activations)(const float *x, ptrdiff_t n, ptrdiff_t cols, int8_t *q,
                                 float *scale);
};

#endif
