/* Quantize weights to Q8_0 and Q4_0, straight into the panels that the products of linear.h read.
 *
 * Per block of 32 columns of a row, all in float32:
 *     Q8_0: d = (largest magnitude) / 127, code = x * (1 / d) rounded, halves away from zero
 *     Q4_0: d = (value of largest magnitude, the first of equals) / -8,
 *           code = min(trunc(x * (1 / d) + 8.5), 15)
 * Where 1 / d is infinite it is taken as 0. d is stored as float16, ties to even. These are the
 * bits of llama.cpp's and the gguf package's quantizers. */
#ifndef COURSE_PACK_H
#define COURSE_PACK_H

#include <stddef.h>
#include <stdint.h>

/* x [rows, cols] with cols a multiple of 32; codes and scales as in linear.h, the rows of the last
 * panel that x lacks filled with zeros. Every d must be below 65520: see first_too_large. */
struct pack_kernels {
    /* The first row with a value that is not finite or whose magnitude / divisor is beyond
     * float16; -1 if there is none. divisor: 127 for Q8_0, 8 for Q4_0. */
    ptrdiff_t (*first_too_large)(const float *x, ptrdiff_t rows, ptrdiff_t cols, float divisor);

    void (*q8_0)(const float *x, ptrdiff_t rows, ptrdiff_t cols, int8_t *codes, uint16_t *scales,
                 int threads);

    void (*q4_0)(const float *x, ptrdiff_t rows, ptrdiff_t cols, uint8_t *codes, uint16_t *scales,
                 int threads);
};

#endif
