/* Quantization of KV rows to int8. One row: d float values that share one scale. */
#ifndef COURSE_QUANTIZE_H
#define COURSE_QUANTIZE_H

#include <stddef.h>
#include <stdint.h>

/* In the order of course_lib.quant.ROUNDING_RULES. */
enum rounding_rule { HALF_UP = 0, HALF_EVEN = 1, HALF_AWAY = 2, TRUNC = 3, NUM_RULES = 4 };

/* Rows of d values, one after the other. */
struct quantize_kernels {
    /* Index of the first row that holds NaN or infinity, or -1. */
    ptrdiff_t (*first_bad_row)(const float *x, ptrdiff_t rows, ptrdiff_t d);

    /* Quantize rows that first_bad_row has passed: q[rows][d], scale[rows]. */
    void (*quantize_rows)(const float *x, ptrdiff_t rows, ptrdiff_t d, enum rounding_rule rule,
                          int8_t *q, float *scale);
};

#endif
