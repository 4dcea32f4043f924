/* v16 as one AVX-512 register. */
#include <immintrin.h>

typedef __m512 v16;

enum { V16_ACCUMULATORS = 16 };  /* half of the 32 registers */

static inline v16 v16_set(float x) { return _mm512_set1_ps(x); }
static inline v16 v16_load(const float *x) { return _mm512_loadu_ps(x); }
static inline void v16_store(float *x, v16 a) { _mm512_storeu_ps(x, a); }
static inline v16 v16_load_i8(const int8_t *x)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x)));
}

static inline v16 v16_add(v16 a, v16 b) { return _mm512_add_ps(a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return _mm512_sub_ps(a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return _mm512_mul_ps(a, b); }
static inline v16 v16_div(v16 a, v16 b) { return _mm512_div_ps(a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c) { return _mm512_fmadd_ps(a, b, c); }
static inline v16 v16_max(v16 a, v16 b) { return _mm512_max_ps(a, b); }

/* c + *x * b. A multiply-add can itself take one number from memory for all lanes, at no cost. Put
 * into a register before, the number occupies a unit that computes for a cycle: with two queries an
 * eighth of the time of V on Zen 4. Compilers choose the register if it is used more than once,
 * so the instruction is written out. */
static inline v16 v16_fma_number(const float *x, v16 b, v16 c)
{
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(c) : "v"(b), "m"(*x));
    return c;
}

/* Lanes i and i + 8 of a 512-bit register: its halves. */
static inline __m256 v16_halves(v16 a)
{
    __m256 high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a), 1));
    return _mm256_add_ps(_mm512_castps512_ps256(a), high);
}

#include "v16_x86.h"

/* The sums of 16 vectors, each as v16_sum. Every step adds the two halves of what is left of each
 * vector, and puts the halves of two vectors into one register: 16, 8, 4, 2, 1 registers. A blend
 * runs where a shuffle does not have to: it leaves each half in its place. */
static inline void v16_sum16(float *sums, const v16 *a)
{
    v16 x[8], y[4], z[2];
    for (int i = 0; i < 8; i++) {  /* quarters 0, 1 and 2, 3 of vectors j and j + 4 */
        v16 b = a[i + (i & 4)], c = a[i + (i & 4) + 4];
        x[i] = _mm512_add_ps(_mm512_mask_blend_ps(0xff00, b, c), _mm512_shuffle_f32x4(b, c, 0x4e));
    }
    for (int i = 0; i < 4; i++)  /* now every quarter is one vector's: i, i + 4, i + 8, i + 12 */
        y[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[i], x[i + 4], 0x88),
                             _mm512_shuffle_f32x4(x[i], x[i + 4], 0xdd));
    for (int i = 0; i < 2; i++) {
        __m512d b = _mm512_castps_pd(y[2 * i]), c = _mm512_castps_pd(y[2 * i + 1]);
        z[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_mask_blend_pd(0xaa, b, c)),
                             _mm512_castpd_ps(_mm512_shuffle_pd(b, c, 0x55)));
    }
    _mm512_storeu_ps(sums, _mm512_add_ps(_mm512_shuffle_ps(z[0], z[1], 0x88),
                                         _mm512_shuffle_ps(z[0], z[1], 0xdd)));
}

static inline float v16_max_lane(v16 a) { return _mm512_reduce_max_ps(a); }

static inline int v16_not_finite(v16 a)
{
    const __m512i exponent = _mm512_set1_epi32(0x7f800000);
    return _mm512_cmpeq_epi32_mask(_mm512_and_si512(_mm512_castps_si512(a), exponent), exponent)
        != 0;
}

static inline v16 v16_raise(v16 a, v16 counter)
{
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(counter), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(a), n));
}

static inline v16 v16_zero_below(v16 a, v16 x, float limit)
{
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), a);
}
