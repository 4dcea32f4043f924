/* The steps of a decoder layer around attention: RMSNorm, RoPE, SiLU gate; argmax of the logits.
 * The numbers are defined in layers.c. */
#ifndef COURSE_LAYERS_H
#define COURSE_LAYERS_H

#include <stddef.h>
#include <stdint.h>

struct layer_kernels {
    /* out[rows][d] = x / sqrt(mean of x^2 + eps) * gain[d]; `out` may be `x`. Returns -1, or the
     * first row whose mean square + eps is not finite or 0; then nothing is written. */
    ptrdiff_t (*rms_norm)(const float *x, const float *gain, ptrdiff_t rows, ptrdiff_t d, float eps,
                          float *out);

    /* cos and sin [tokens][pairs] of float(position) * frequency(i), all angles below 2^31.
     * Returns -1, or a token with a larger angle; then nothing is written. */
    ptrdiff_t (*rope_tables)(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                             float theta, float *cos, float *sin);

    /* Turn the pairs (x[i], x[i + d / 2]) of x[tokens][heads][d] by the angle of their token.
     * Returns -1, or the first token with a result that is not finite; then nothing is written. */
    ptrdiff_t (*rope)(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                      ptrdiff_t heads, ptrdiff_t d, float *out);

    /* out = SiLU(gate) * up of finite numbers; `out` may be `gate` or `up`. */
    void (*silu_mul)(const float *gate, const float *up, ptrdiff_t count, float *out);

    /* 1 if all numbers are finite. */
    int (*all_finite)(const float *x, ptrdiff_t count);

    /* The lowest index of the largest of count > 0 numbers, or -1 if one is NaN. */
    ptrdiff_t (*argmax)(const float *x, ptrdiff_t count);
};

#endif
