#include "quantize.h"

#include <string.h>

#define EXPONENT_MASK 0x7f800000
#define MAGNITUDE_MASK 0x7fffffff

/* Largest magnitude of a row, as the bits of a float. Without their sign bit, floats are ordered
 * like their bits, and an integer maximum is one a compiler vectorizes without -ffast-math. NaN
 * and infinity are the largest of all, so one comparison finds them. */
static int32_t max_magnitude_bits(const float *x, ptrdiff_t d)
{
    int32_t largest = 0;
    for (ptrdiff_t i = 0; i < d; i++) {
        int32_t bits;
        memcpy(&bits, &x[i], sizeof bits);
        bits &= MAGNITUDE_MASK;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static ptrdiff_t first_bad_row(const float *x, ptrdiff_t rows, ptrdiff_t d)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        if (max_magnitude_bits(x + r * d, d) >= EXPONENT_MASK)
            return r;
    return -1;
}

/* The roundings below get |y| < 128, so a conversion to int32 (which truncates) cannot overflow.
 * Comparisons count as 0 or 1 instead of branching, and nothing is called: compilers vectorize this
 * on any machine. */

static inline float floor_small(float y)
{
    int32_t t = (int32_t)y;
    return (float)(t - ((float)t > y));
}

static inline float round_half_up(float y) { return floor_small(y + 0.5f); }

/* 1.5 * 2^23: at that size floats are the integers, so the addition itself rounds, ties to even. */
static inline float round_half_even(float y) { return (y + 12582912.0f) - 12582912.0f; }

/* y - whole is exact, so unlike trunc(|y| + 0.5) this is right for the float below one half. */
static inline float round_half_away(float y)
{
    int32_t whole = (int32_t)y;
    float rest = y - (float)whole;
    return (float)(whole + (rest >= 0.5f) - (rest <= -0.5f));
}

/* Looks like rounding and is not: toward zero on negatives, so their error leans one way. */
static inline float round_trunc(float y) { return (float)(int32_t)(y + 0.5f); }

/* One loop per rule, so that the choice is made once a row and not once a value. */
#define QUANTIZE_WITH(ROUND)                                                                       \
    for (ptrdiff_t i = 0; i < d; i++) {                                                            \
        float y = ROUND(x[i] * to_int);                                                            \
        y = y > 127.0f ? 127.0f : y;                                                               \
        y = y < -127.0f ? -127.0f : y;                                                             \
        q[i] = (int8_t)y;                                                                          \
    }

static float quantize_row(const float *x, ptrdiff_t d, enum rounding_rule rule, int8_t *q)
{
    int32_t bits = max_magnitude_bits(x, d);
    float m;
    memcpy(&m, &bits, sizeof m);
    if (m < 1e-6f)
        m = 1.0f;
    /* Multiplying by 127/m is the definition; dividing by the scale gives other bits. */
    float to_int = 127.0f / m;
    switch (rule) {
    case HALF_UP: QUANTIZE_WITH(round_half_up) break;
    case HALF_EVEN: QUANTIZE_WITH(round_half_even) break;
    case HALF_AWAY: QUANTIZE_WITH(round_half_away) break;
    default: QUANTIZE_WITH(round_trunc) break;
    }
    return m / 127.0f;
}

static void quantize_rows(const float *x, ptrdiff_t rows, ptrdiff_t d, enum rounding_rule rule,
                          int8_t *q, float *scale)
{
    for (ptrdiff_t r = 0; r < rows; r++)
        scale[r] = quantize_row(x + r * d, d, rule, q + r * d);
}

static const struct quantize_kernels quantize_kernels = {
    .first_bad_row = first_bad_row,
    .quantize_rows = quantize_rows,
};
