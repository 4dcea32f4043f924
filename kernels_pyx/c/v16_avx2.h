/* v16 as two AVX2 registers: lanes 0 to 7 and 8 to 15. */
#include <immintrin.h>

typedef struct { __m256 low, high; } v16;

enum { V16_ACCUMULATORS = 4 };  /* half of the 16 registers */

#define V16_BOTH(f, a, b) (v16){f((a).low, (b).low), f((a).high, (b).high)}

static inline v16 v16_set(float x) { return (v16){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline v16 v16_load(const float *x)
{
    return (v16){_mm256_loadu_ps(x), _mm256_loadu_ps(x + 8)};
}
static inline void v16_store(float *x, v16 a)
{
    _mm256_storeu_ps(x, a.low);
    _mm256_storeu_ps(x + 8, a.high);
}
static inline v16 v16_load_i8(const int8_t *x)
{
    __m256i low = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x));
    __m256i high = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(x + 8)));
    return (v16){_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)};
}

static inline v16 v16_add(v16 a, v16 b) { return V16_BOTH(_mm256_add_ps, a, b); }
static inline v16 v16_sub(v16 a, v16 b) { return V16_BOTH(_mm256_sub_ps, a, b); }
static inline v16 v16_mul(v16 a, v16 b) { return V16_BOTH(_mm256_mul_ps, a, b); }
static inline v16 v16_div(v16 a, v16 b) { return V16_BOTH(_mm256_div_ps, a, b); }
static inline v16 v16_max(v16 a, v16 b) { return V16_BOTH(_mm256_max_ps, a, b); }
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
}

/* Lanes i and i + 8 of a v16: its two registers. */
static inline __m256 v16_halves(v16 a) { return _mm256_add_ps(a.low, a.high); }

#include "v16_x86.h"

static inline float v16_max_lane(v16 a)
{
    __m256 halves = _mm256_max_ps(a.low, a.high);
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

static inline int v16_not_finite(v16 a)
{
    const __m256i exponent = _mm256_set1_epi32(0x7f800000);
    __m256i low = _mm256_and_si256(_mm256_castps_si256(a.low), exponent);
    __m256i high = _mm256_and_si256(_mm256_castps_si256(a.high), exponent);
    __m256i bad = _mm256_or_si256(_mm256_cmpeq_epi32(low, exponent),
                                  _mm256_cmpeq_epi32(high, exponent));
    return _mm256_movemask_epi8(bad) != 0;
}

static inline __m256 v8_raise(__m256 a, __m256 counter)
{
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(counter), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), n));
}
static inline v16 v16_raise(v16 a, v16 counter) { return V16_BOTH(v8_raise, a, counter); }

static inline v16 v16_zero_below(v16 a, v16 x, float limit)
{
    __m256 least = _mm256_set1_ps(limit);
    return (v16){_mm256_and_ps(a.low, _mm256_cmp_ps(x.low, least, _CMP_GE_OQ)),
                 _mm256_and_ps(a.high, _mm256_cmp_ps(x.high, least, _CMP_GE_OQ))};
}

#undef V16_BOTH
