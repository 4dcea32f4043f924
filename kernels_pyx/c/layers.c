#include "layers.h"
#include "rope_tables.c"

#include <stdlib.h>

/* The mean square is the dot of a row with itself as every kernel takes dots: 16 sums, added by
 * halves. */
static float mean_square(const float *x, ptrdiff_t d)
{
    v16 sum = v16_set(0.0f);
    ptrdiff_t i = 0;
    for (; i + 16 <= d; i += 16) {
        v16 a = v16_load(x + i);
        sum = v16_fma(a, a, sum);
    }
    if (i < d) {
        v16 a = v16_load_part(x + i, d - i);
        sum = v16_fma(a, a, sum);
    }
    return v16_sum(sum) / (float)d;
}

/* x / sqrt(mean + eps) * gain, each operation rounded once; `root` is the square root. */
static void normed_row(const float *x, const float *gain, ptrdiff_t d, float root, float *out)
{
    const v16 divisor = v16_set(root);
    ptrdiff_t i = 0;
    for (; i + 16 <= d; i += 16)
        v16_store(out + i, v16_mul(v16_div(v16_load(x + i), divisor), v16_load(gain + i)));
    if (i < d) {
        v16 y = v16_div(v16_load_part(x + i, d - i), divisor);
        v16_store_part(out + i, v16_mul(y, v16_load_part(gain + i, d - i)), d - i);
    }
}

static ptrdiff_t rms_norm(const float *x, const float *gain, ptrdiff_t rows, ptrdiff_t d, float eps,
                          float *out)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        float mean = mean_square(x + r * d, d) + eps;
        if (!isfinite(mean) || mean == 0.0f)
            return r;
    }
    for (ptrdiff_t r = 0; r < rows; r++)
        normed_row(x + r * d, gain, d, sqrtf(mean_square(x + r * d, d) + eps), out + r * d);
    return -1;
}

/* 16 pairs or fewer: first * cos - second * sin and second * cos + first * sin, three roundings
 * each, as in NumPy. Returns 1 if a result is not finite; writes unless `out` is NULL. */
static inline int rope_pairs(const float *x, const float *cos, const float *sin, ptrdiff_t pairs,
                             ptrdiff_t count, float *out)
{
    int whole = count == 16;
    v16 first = whole ? v16_load(x) : v16_load_part(x, count);
    v16 second = whole ? v16_load(x + pairs) : v16_load_part(x + pairs, count);
    v16 c = whole ? v16_load(cos) : v16_load_part(cos, count);
    v16 s = whole ? v16_load(sin) : v16_load_part(sin, count);
    v16 left = v16_sub(v16_mul(first, c), v16_mul(second, s));
    v16 right = v16_add(v16_mul(second, c), v16_mul(first, s));
    if (out && whole) {
        v16_store(out, left);
        v16_store(out + pairs, right);
    } else if (out) {
        v16_store_part(out, left, count);
        v16_store_part(out + pairs, right, count);
    }
    return v16_not_finite(left) | v16_not_finite(right);
}

/* All rows; returns the first token with a result that is not finite, or -1. */
static ptrdiff_t rope_rows(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                           ptrdiff_t heads, ptrdiff_t d, float *out)
{
    ptrdiff_t pairs = d / 2;
    for (ptrdiff_t t = 0; t < tokens; t++, cos += pairs, sin += pairs)
        for (ptrdiff_t h = 0; h < heads; h++, x += d, out = out ? out + d : NULL)
            for (ptrdiff_t i = 0; i < pairs; i += 16)
                if (rope_pairs(x + i, cos + i, sin + i, pairs, pairs - i < 16 ? pairs - i : 16,
                               out ? out + i : NULL))
                    return t;
    return -1;
}

static ptrdiff_t rope(const float *x, const float *cos, const float *sin, ptrdiff_t tokens,
                      ptrdiff_t heads, ptrdiff_t d, float *out)
{
    ptrdiff_t bad = rope_rows(x, cos, sin, tokens, heads, d, NULL);
    return bad < 0 ? rope_rows(x, cos, sin, tokens, heads, d, out) : bad;
}

/* SiLU(g) = g / (1 + exp(-g)). With e = exp(-|g|), which cannot overflow, that is g / (1 + e) for
 * g >= 0 and g e / (1 + e) below: g times a factor of 1 or e, over 1 + e. */
static inline v16 silu_mul_16(v16 gate, v16 up)
{
    const v16 one = v16_set(1.0f), zero = v16_set(0.0f);
    v16 e = v16_exp(v16_sub(zero, v16_max(gate, v16_sub(zero, gate))));
    /* 1 or 0 by the sign of g, plus e or 0: only one of the two is not 0, so nothing is rounded. */
    v16 factor = v16_add(v16_zero_below(one, gate, 0.0f),
                         v16_sub(e, v16_zero_below(e, gate, 0.0f)));
    return v16_mul(v16_div(v16_mul(gate, factor), v16_add(one, e)), up);
}

static void silu_mul_row(const float *gate, const float *up, ptrdiff_t count, float *out)
{
    ptrdiff_t i = 0;
    for (; i + 16 <= count; i += 16)
        v16_store(out + i, silu_mul_16(v16_load(gate + i), v16_load(up + i)));
    if (i < count)
        v16_store_part(out + i, silu_mul_16(v16_load_part(gate + i, count - i),
                                            v16_load_part(up + i, count - i)), count - i);
}

struct silu_work {
    const float *gate, *up;
    ptrdiff_t gate_stride, up_stride, d;
    float *out;
};

static void silu_piece(void *context, ptrdiff_t row, int thread)
{
    (void)thread;
    const struct silu_work *w = context;
    silu_mul_row(w->gate + row * w->gate_stride, w->up + row * w->up_stride, w->d,
                 w->out + row * w->d);
}

static void silu_mul(const float *gate, ptrdiff_t gate_stride, const float *up, ptrdiff_t up_stride,
                     ptrdiff_t rows, ptrdiff_t d, int threads, float *out)
{
    struct silu_work work = {gate, up, gate_stride, up_stride, d, out};
    /* An element takes some 16 multiply-adds: exp and two divisions. */
    parallel_for(rows, useful_threads(16.0 * (double)rows * (double)d, threads), silu_piece, &work);
}

/* exp(x - max) / sum, the sum in 16 lanes added by halves; `x` is finite. */
static void softmax_row(const float *x, ptrdiff_t count, float *out)
{
    float largest = x[0];
    for (ptrdiff_t i = 1; i < count; i++)
        largest = x[i] > largest ? x[i] : largest;
    const v16 most = v16_set(largest);
    v16 total = v16_set(0.0f);
    for (ptrdiff_t i = 0; i < count; i += 16) {
        ptrdiff_t part = count - i < 16 ? count - i : 16;
        v16_store_part(out + i, v16_exp(v16_sub(v16_load_part(x + i, part), most)), part);
        total = v16_add(total, v16_load_part(out + i, part));
    }
    total = v16_set(v16_sum(total));
    for (ptrdiff_t i = 0; i < count; i += 16) {
        ptrdiff_t part = count - i < 16 ? count - i : 16;
        v16_store_part(out + i, v16_div(v16_load_part(out + i, part), total), part);
    }
}

static void softmax(const float *x, ptrdiff_t rows, ptrdiff_t d, float *out)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        softmax_row(x + r * d, d, out + r * d);
}

static int all_finite(const float *x, ptrdiff_t count)
{
    return max_magnitude_bits(x, count) < 0x7f800000;
}

/* An integer that is ordered like the float: of negative floats, larger bits mean a smaller number.
 * Adding 0 makes -0 the 0 that it equals. A compiler vectorizes a maximum of integers. */
static inline int32_t float_order(float x)
{
    int32_t bits;
    x += 0.0f;
    memcpy(&bits, &x, sizeof bits);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

static ptrdiff_t argmax(const float *x, ptrdiff_t count)
{
    int32_t largest = float_order(x[0]), magnitude = 0;
    for (ptrdiff_t i = 0; i < count; i++) {
        int32_t order = float_order(x[i]), bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= 0x7fffffff;
        magnitude = bits > magnitude ? bits : magnitude;
        largest = order > largest ? order : largest;
    }
    if (magnitude > 0x7f800000)  /* above infinity lie the NaNs */
        return -1;
    ptrdiff_t i = 0;
    for (; i + 64 <= count; i += 64) {  /* 64 at a time without a branch, which vectorizes too */
        int found = 0;
        for (int j = 0; j < 64; j++)
            found |= float_order(x[i + j]) == largest;
        if (found)
            break;
    }
    while (float_order(x[i]) != largest)
        i++;
    return i;
}

#include "split_heads.c"

static const struct layer_kernels layer_kernels = {
    .rms_norm = rms_norm,
    .rope_powers = rope_powers,
    .rope_angles = rope_angles,
    .rope_tables = rope_tables,
    .rope = rope,
    .split_heads = split_heads,
    .silu_mul = silu_mul,
    .softmax = softmax,
    .all_finite = all_finite,
    .argmax = argmax,
};
