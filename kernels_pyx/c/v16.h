/* v16: sixteen floats that every kernel computes with, whatever the machine's registers hold.
 *
 * Lane order and the order of additions are part of the definition of every kernel: float addition
 * is not associative, so the same sums in another order have other bits. v16_portable.h is the
 * definition, in plain C; the other files say the same with intrinsics: one AVX-512 register, two
 * of AVX2, four of NEON. v16_fma is one rounding (a fused multiply-add) everywhere, and nothing
 * else is fused: the compiler runs with -ffp-contract=off.
 */
#ifndef COURSE_V16_H
#define COURSE_V16_H

#include <float.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if FLT_EVAL_METHOD != 0
#error "float expressions must be evaluated in float: the results are compared bit by bit"
#endif

/* Plain C gets no code apart for rows of 64 and 128 values: a v16 is 16 numbers in memory there, so
 * that would take the compiler long and make nothing faster. */
#if defined(V16_AVX512) || defined(V16_AVX2) || defined(V16_NEON)
#define V16_IN_REGISTERS 1
#else
#define V16_IN_REGISTERS 0
#endif

/* Before a loop of constant length over a small array of v16: gcc makes registers of the array only
 * if it unrolls the loop early, and would otherwise load and store it around every step. (clang
 * does it unasked.) */
#if defined(__GNUC__) && !defined(__clang__)
#define UNROLL _Pragma("GCC unroll 16")
#else
#define UNROLL
#endif

#if defined(V16_AVX512)
#include "v16_avx512.h"
#elif defined(V16_AVX2)
#include "v16_avx2.h"
#elif defined(V16_NEON)
#include "v16_neon.h"
#else
#include "v16_portable.h"
#endif

/* The sums of V16_ACCUMULATORS vectors: as many as a loop can keep in registers and still have as
 * many again to work with. */
static inline void v16_sum_all(float *sums, const v16 *a)
{
#if defined(V16_AVX512)
    v16_sum16(sums, a);
#else
    v16_sum4(sums, a[0], a[1], a[2], a[3]);
#endif
}

/* The first `count` of 16 floats, 0 in the other lanes; nothing behind them is read. */
static inline v16 v16_load_part(const float *x, ptrdiff_t count)
{
    float padded[16] = {0};
    memcpy(padded, x, (size_t)count * sizeof *x);
    return v16_load(padded);
}

static inline v16 v16_load_part_i8(const int8_t *x, ptrdiff_t count)
{
    int8_t padded[16] = {0};
    memcpy(padded, x, (size_t)count);
    return v16_load_i8(padded);
}

static inline void v16_store_part(float *x, v16 a, ptrdiff_t count)
{
    float all[16];
    v16_store(all, a);
    memcpy(x, all, (size_t)count * sizeof *x);
}

/* exp of every lane, for arguments up to 88; 0 below -87, where a softmax weight is nothing.
 *
 * x = n ln 2 + r with a whole n and |r| <= ln 2 / 2, so exp(x) = 2^n exp(r). n comes from an
 * addition that rounds to a whole number, ties to even (at 1.5 * 2^23 floats are the integers);
 * n ln 2 is subtracted in two parts, the first of which has zeros enough to make n * it exact;
 * exp(r) is its Taylor polynomial of degree 7, which leaves 5.4e-9 of it; n is added to its
 * exponent. Within 3 ulp of the exact value; the same bits everywhere, which no libm promises. */
static inline v16 v16_exp(v16 x)
{
    const v16 magic = v16_set(12582912.0f);
    const v16 counter = v16_fma(x, v16_set(1.44269504f), magic);
    const v16 n = v16_sub(counter, magic);
    v16 r = v16_fma(n, v16_set(-0.693359375f), x);
    r = v16_fma(n, v16_set(2.12194440e-4f), r);
    v16 p = v16_set(1.98412698e-4f);
    p = v16_fma(p, r, v16_set(1.38888889e-3f));
    p = v16_fma(p, r, v16_set(8.33333333e-3f));
    p = v16_fma(p, r, v16_set(4.16666667e-2f));
    p = v16_fma(p, r, v16_set(1.66666667e-1f));
    p = v16_fma(p, r, v16_set(0.5f));
    p = v16_fma(p, r, v16_set(1.0f));
    p = v16_fma(p, r, v16_set(1.0f));
    return v16_zero_below(v16_raise(p, counter), x, -87.0f);
}

#endif
