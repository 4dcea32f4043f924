/* The steps of a decoder layer around attention: RMSNorm, RoPE, SiLU gate; softmax of a router's
 * logits; argmax of the logits. The numbers are defined in layers.c. */
#ifndef COURSE_LAYERS_H
#define COURSE_LAYERS_H

#include <stddef.h>
#include <stdint.h>

/* What split_heads reads and writes: stacked[tokens][heads + 2 kv_heads][d] into q[heads][t][d], k
 * and v [kv_heads][t][d], where t is the head stride / d. A gain[d] may be NULL. */
struct heads_to_split {
    const float *stacked, *q_gain, *k_gain, *cos, *sin;
    float eps;
    ptrdiff_t tokens, heads, kv_heads, d, q_head_stride, k_head_stride, v_head_stride;
    float *q, *k, *v;
};

struct layer_kernels {
    /* out[rows][d] = x / sqrt(mean of x^2 + eps) * gain[d]; `out` may be `x`. Returns -1, or the
     * first row whose mean square + eps is not finite or 0; then nothing is written. */
    ptrdiff_t (*rms_norm)(const float *x, const float *gain, ptrdiff_t rows, ptrdiff_t d, float eps,
                          float *out);

    /* powers[pairs] = theta^(i / pairs). */
    void (*rope_powers)(float theta, ptrdiff_t pairs, float *powers);

    /* cos and sin [tokens][pairs] of float(position) * frequencies[i], times factor; all angles
     * below 2^31. Returns -1, or a token with a larger angle; then nothing is written. */
    ptrdiff_t (*rope_angles)(const int64_t *positions, ptrdiff_t tokens, const float *frequencies,
                             ptrdiff_t pairs, float factor, float *cos, float *sin);

    /* The same with the frequencies 1 / powers[i] and the factor 1. */
    ptrdiff_t (*rope_tables)(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                             float theta, float *cos, float *sin);

    /* Turn the pairs (x[i], x[i + d / 2]) of x[tokens][heads][d] by the angle of their token.
     * Returns -1, or the first token with a result that is not finite; then nothing is written. */
    ptrdiff_t (*rope)(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                      ptrdiff_t heads, ptrdiff_t d, float *out);

    /* rms_norm (where there is a gain) and rope of query and key heads, in another order. Returns
     * -1, or the first token with a mean square + eps that is not finite or 0, or a result that is
     * not finite; then some of the output is written. */
    ptrdiff_t (*split_heads)(const struct heads_to_split *in, int threads);

    /* out[rows][d] = SiLU(gate) * up of finite numbers, in rows of any stride. */
    void (*silu_mul)(const float *gate, ptrdiff_t gate_stride, const float *up,
                     ptrdiff_t up_stride, ptrdiff_t rows, ptrdiff_t d, int threads, float *out);

    /* out[rows][d] = exp(x - largest of the row) / their sum, of finite numbers, d > 0. */
    void (*softmax)(const float *x, ptrdiff_t rows, ptrdiff_t d, float *out);

    /* 1 if all numbers are finite. */
    int (*all_finite)(const float *x, ptrdiff_t count);

    /* The lowest index of the largest of count > 0 numbers, or -1 if one is NaN. */
    ptrdiff_t (*argmax)(const float *x, ptrdiff_t count);
};

#endif
