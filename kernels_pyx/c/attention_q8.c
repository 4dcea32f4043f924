/* Dots of an int8 query with int8 rows.
 *
 * The query has one scale per `group` of values: 32 of them, or all d. In a group the products are
 * whole numbers and their sum is exact in whatever order it is made, which is where each
 * instruction set goes its own way: |sum| <= group * 127 * 128, for 32 values below 2^19, for
 * MAX_ROW_D below 2^31. Then one chain over the groups of a row, s = fma(q_scale[g], sum of g, s)
 * from 0: that order is the definition, and with one scale a row a single step. q never holds -128;
 * K of a foreign array may.
 *
 * `group` and the usual d are constants where q8_dots_of_piece calls, so that a loop over one group
 * is none. */

enum { GROUP = 32 };

/* The definition. */
static inline float q8_dot(const int8_t *q, const float *q_scale, const int8_t *k, ptrdiff_t d,
                           ptrdiff_t group)
{
    float s = 0.0f;
    for (ptrdiff_t g = 0; g < d / group; g++) {
        int32_t sum = 0;
        for (ptrdiff_t i = 0; i < group; i++)
            sum += q[g * group + i] * k[g * group + i];
        s = fmaf(q_scale[g], (float)sum, s);
    }
    return s;
}

#if defined(V16_AVX512) || defined(V16_AVX2)

/* Eight partial sums: products of 4 neighbours each are added to them. */
static inline __m256i add_products(__m256i q, __m256i k, __m256i sums)
{
#if defined(V16_AVX512)
    /* vpdpbusd multiplies unsigned by signed bytes. k ^ 0x80 is k + 128 without sign; the 128 times
     * the sum of q that this adds is in the offset, where the sums start. */
    return _mm256_dpbusd_epi32(sums, _mm256_xor_si256(k, _mm256_set1_epi8(-128)), q);
#else
    /* vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits, saturating: |k|
     * times q with the sign of k is at most 2 * 128 * 127 = 32512 and fits. */
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(k), _mm256_sign_epi8(q, k));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
}

/* Where the sums of a group start. */
static inline __m256i first_sums(int32_t offset)
{
#if defined(V16_AVX512)
    return _mm256_zextsi128_si256(_mm_cvtsi32_si128(offset));
#else
    (void)offset;
    return _mm256_setzero_si256();
#endif
}

/* The sums of four rows, of each 128-bit half by itself. (vphaddd does two of these steps in one
 * instruction, which takes the CPU twice as long.) */
ALWAYS_INLINE __m256i sums_of_4_halves(const __m256i *x)
{
    __m256i a = _mm256_add_epi32(_mm256_unpacklo_epi32(x[0], x[1]),
                                 _mm256_unpackhi_epi32(x[0], x[1]));
    __m256i b = _mm256_add_epi32(_mm256_unpacklo_epi32(x[2], x[3]),
                                 _mm256_unpackhi_epi32(x[2], x[3]));
    return _mm256_add_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

/* Dots with four rows. */
ALWAYS_INLINE void q8_dot4(const int8_t *q, const float *q_scale, const int32_t *offsets,
                           const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots)
{
    __m128 s = _mm_setzero_ps();
    for (ptrdiff_t g = 0; g < d / group; g++) {
        __m256i x[4];
        for (int r = 0; r < 4; r++)
            x[r] = first_sums(offsets[g]);
        for (ptrdiff_t i = 0; i < group; i += 32) {
            const ptrdiff_t c = g * group + i;
            const __m256i query = _mm256_loadu_si256((const __m256i *)(q + c));
            for (int r = 0; r < 4; r++)
                x[r] = add_products(
                    query, _mm256_loadu_si256((const __m256i *)(k + r * d + c)), x[r]);
        }
        __m256i halves = sums_of_4_halves(x);
        __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(halves),
                                     _mm256_extracti128_si256(halves, 1));
        s = _mm_fmadd_ps(_mm_set1_ps(q_scale[g]), _mm_cvtepi32_ps(sums), s);
    }
    _mm_storeu_ps(dots, s);
}

#elif defined(V16_NEON)
#include "attention_q8_neon.h"
#else

ALWAYS_INLINE void q8_dot4(const int8_t *q, const float *q_scale, const int32_t *offsets,
                           const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots)
{
    (void)offsets;
    for (int r = 0; r < 4; r++)
        dots[r] = q8_dot(q, q_scale, k + r * d, d, group);
}

#endif

#if defined(V16_AVX512)

/* Two queries share the rows: each is loaded, and made unsigned, for both. So many values and rows
 * at a time; with one scale a row, no group has to be told from its neighbour. */
enum { QUERY_PAIRS = 1, PAIR_STEP = 128, PAIR_STEP_OF_ROW = 64, PAIR_ROWS = 16 };

/* The first and the last 16 bytes of each group of 32, in registers of their own: products with the
 * first and with the last add up lane by lane, and 4 partial sums of a group are left. */
ALWAYS_INLINE void split_groups(const int8_t *x, __m512i *first, __m512i *last)
{
    const __m512i low = _mm512_loadu_si512(x), high = _mm512_loadu_si512(x + 64);
    *first = _mm512_shuffle_i32x4(low, high, 0x88);
    *last = _mm512_shuffle_i32x4(low, high, 0xdd);
}

/* Of one query, rows r to r + 3: 4 partial sums of a group in each 128 bits of x[r]. Returns the
 * sums of the 4 rows for the first group, then for the second, ... */
ALWAYS_INLINE __m512i sums_of_4(const __m512i *x)
{
    /* Halves of what is left of two rows in one register: as v16_sum16. */
    __m512i a = _mm512_add_epi32(_mm512_unpacklo_epi64(x[0], x[1]),
                                 _mm512_unpackhi_epi64(x[0], x[1]));
    __m512i b = _mm512_add_epi32(_mm512_unpacklo_epi64(x[2], x[3]),
                                 _mm512_unpackhi_epi64(x[2], x[3]));
    __m512 c = _mm512_castsi512_ps(a), d = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(c, d, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(c, d, 0xdd)));
}

/* sums[i]: of rows 4 i to 4 i + 3, for group after group. s = fma(scale of a group, its sum, s),
 * group after group, for the 16 rows side by side. */
ALWAYS_INLINE __m512 add_groups(const __m512i *sums, const float *q_scale, __m512 s)
{
    const __m512i a = _mm512_shuffle_i32x4(sums[0], sums[1], 0x44),
                  b = _mm512_shuffle_i32x4(sums[2], sums[3], 0x44),
                  c = _mm512_shuffle_i32x4(sums[0], sums[1], 0xee),
                  d = _mm512_shuffle_i32x4(sums[2], sums[3], 0xee);
    const __m512i of_group[4] = {
        _mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd),
        _mm512_shuffle_i32x4(c, d, 0x88), _mm512_shuffle_i32x4(c, d, 0xdd),
    };
    UNROLL for (int g = 0; g < 4; g++)
        s = v16_fma_number(q_scale + g, _mm512_cvtepi32_ps(of_group[g]), s);
    return s;
}

/* sums[i]: of rows 4 i to 4 i + 3, in each 128 bits a part. The sums of the 16 rows. A blend runs
 * where a shuffle does not have to: as in v16_sum16. */
ALWAYS_INLINE __m512i sums_of_16(const __m512i *sums)
{
    __m512i x[2];
    UNROLL for (int i = 0; i < 2; i++)
        x[i] = _mm512_add_epi32(_mm512_mask_blend_epi64(0xf0, sums[2 * i], sums[2 * i + 1]),
                                _mm512_shuffle_i32x4(sums[2 * i], sums[2 * i + 1], 0x4e));
    return _mm512_add_epi32(_mm512_shuffle_i32x4(x[0], x[1], 0x88),
                            _mm512_shuffle_i32x4(x[0], x[1], 0xdd));
}

/* q8_dot_pair with one scale for a whole query: whatever the order in which lanes are added, it is
 * the row's sum. So little is computed here that memory decides, and it must be read in order: gcc
 * would load the rows as its registers suit it, which took 1.7 times as long. */
ALWAYS_INLINE void q8_dot_pair_by_row(const int8_t *q, const float *q_scale,
                                      const int32_t *offsets, const int8_t *k, ptrdiff_t d,
                                      float *dots, ptrdiff_t stride)
{
    const __m512i sign = _mm512_set1_epi8(-128);
    __m512i sums[2][4];
    UNROLL for (int i = 0; i < 4; i++) {
        __m512i x[2][4];
        UNROLL for (int r = 0; r < 4; r++) {
            x[0][r] = x[1][r] = _mm512_setzero_si512();
            UNROLL for (ptrdiff_t c = 0; c < d; c += PAIR_STEP_OF_ROW) {
                __m512i key = _mm512_loadu_si512(k + (4 * i + r) * d + c);
                __asm__ volatile("" : "+v"(key));  /* nothing: it keeps this order */
                key = _mm512_xor_si512(key, sign);
                UNROLL for (int j = 0; j < 2; j++)
                    x[j][r] = _mm512_dpbusd_epi32(x[j][r], key, _mm512_loadu_si512(q + j * d + c));
            }
        }
        UNROLL for (int j = 0; j < 2; j++)
            sums[j][i] = sums_of_4(x[j]);
    }
    UNROLL for (int j = 0; j < 2; j++) {
        const __m512i sum = _mm512_add_epi32(sums_of_16(sums[j]), _mm512_set1_epi32(offsets[j]));
        _mm512_storeu_ps(dots + j * stride, _mm512_mul_ps(_mm512_set1_ps(q_scale[j]),
                                                          _mm512_cvtepi32_ps(sum)));
    }
}

/* dots[j * stride + r]: two queries with 16 rows of whole PAIR_STEPs. */
ALWAYS_INLINE void q8_dot_pair(const int8_t *q, const float *q_scale, const int32_t *offsets,
                               const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots,
                               ptrdiff_t stride)
{
    if (group != GROUP) {
        q8_dot_pair_by_row(q, q_scale, offsets, k, d, dots, stride);
        return;
    }
    __m512 s[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (ptrdiff_t c = 0; c < d; c += PAIR_STEP) {
        const ptrdiff_t g = c / GROUP, other = d / GROUP + g;
        __m512i q_first[2], q_last[2], sums[2][4];
        split_groups(q + c, &q_first[0], &q_last[0]);
        split_groups(q + d + c, &q_first[1], &q_last[1]);
        const __m512i sign = _mm512_set1_epi8(-128);
        const __m512i groups = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0);
        __m512i offset[2];  /* of each group in the first of its 4 lanes */
        for (int j = 0; j < 2; j++) {
            const __m128i four = _mm_loadu_si128((const __m128i *)(offsets + (j ? other : g)));
            offset[j] = _mm512_maskz_permutexvar_epi32(0x1111, groups,
                                                       _mm512_castsi128_si512(four));
        }
        UNROLL for (int i = 0; i < 4; i++) {
            __m512i x[2][4];
            UNROLL for (int r = 0; r < 4; r++) {
                __m512i first, last;
                split_groups(k + (4 * i + r) * d + c, &first, &last);
                first = _mm512_xor_si512(first, sign), last = _mm512_xor_si512(last, sign);
                UNROLL for (int j = 0; j < 2; j++)
                    x[j][r] = _mm512_dpbusd_epi32(
                        _mm512_dpbusd_epi32(offset[j], first, q_first[j]), last, q_last[j]);
            }
            UNROLL for (int j = 0; j < 2; j++)
                sums[j][i] = sums_of_4(x[j]);
        }
        s[0] = add_groups(sums[0], q_scale + g, s[0]);
        s[1] = add_groups(sums[1], q_scale + other, s[1]);
    }
    _mm512_storeu_ps(dots, s[0]);
    _mm512_storeu_ps(dots + stride, s[1]);
}

#elif defined(V16_AVX2)

enum { QUERY_PAIRS = 1, PAIR_STEP = 32, PAIR_STEP_OF_ROW = 32, PAIR_ROWS = 4 };

/* dots[j * stride + r]: two queries with four rows. The first query's dots are in the lower half of
 * a register and the second's in the upper. */
ALWAYS_INLINE void q8_dot_pair(const int8_t *q, const float *q_scale, const int32_t *offsets,
                               const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots,
                               ptrdiff_t stride)
{
    __m256 s = _mm256_setzero_ps();
    (void)offsets;
    for (ptrdiff_t g = 0; g < d / group; g++) {
        __m256i x[2][4], halves[2];
        for (int i = 0; i < 8; i++)
            x[i / 4][i % 4] = _mm256_setzero_si256();
        for (ptrdiff_t i = 0; i < group; i += 32) {
            const int8_t *queries = q + g * group + i, *keys = k + g * group + i;
            for (int r = 0; r < 4; r++) {
                __m256i key = _mm256_loadu_si256((const __m256i *)(keys + r * d));
                for (int j = 0; j < 2; j++)
                    x[j][r] = add_products(
                        _mm256_loadu_si256((const __m256i *)(queries + j * d)), key, x[j][r]);
            }
        }
        for (int j = 0; j < 2; j++)
            halves[j] = sums_of_4_halves(x[j]);
        __m256i sums = _mm256_add_epi32(_mm256_permute2x128_si256(halves[0], halves[1], 0x20),
                                        _mm256_permute2x128_si256(halves[0], halves[1], 0x31));
        __m256 scale = _mm256_set_m128(_mm_set1_ps(q_scale[d / group + g]),
                                       _mm_set1_ps(q_scale[g]));
        s = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(sums), s);
    }
    _mm_storeu_ps(dots, _mm256_castps256_ps128(s));
    _mm_storeu_ps(dots + stride, _mm256_extractf128_ps(s, 1));
}

#else

enum { QUERY_PAIRS = 0, PAIR_STEP = 32, PAIR_STEP_OF_ROW = 32, PAIR_ROWS = 4 };

ALWAYS_INLINE void q8_dot_pair(const int8_t *q, const float *q_scale, const int32_t *offsets,
                               const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots,
                               ptrdiff_t stride)
{
    q8_dot4(q, q_scale, offsets, k, d, group, dots);
    q8_dot4(q + d, q_scale + d / group, offsets + d / group, k, d, group, dots + stride);
}

#endif

/* Queries as int8: values[queries][d]; of each group of values a scale and, for VNNI, -128 * the
 * sum of the values, both [queries][d / group]. */
struct q8_queries {
    int8_t *values;
    float *scales;
    int32_t *offsets;
    ptrdiff_t group;  /* GROUP or d */
};

static void quantize_queries(const float *q, ptrdiff_t queries, ptrdiff_t d,
                             const struct q8_queries *to)
{
    const ptrdiff_t group = to->group, groups = queries * (d / group);
    quantize_rows(q, groups, group, HALF_AWAY, to->values, to->scales);
    for (ptrdiff_t g = 0; g < groups; g++) {
        int32_t sum = 0;
        for (ptrdiff_t i = 0; i < group; i++)
            sum += to->values[g * group + i];
        to->offsets[g] = -128 * sum;
    }
}

ALWAYS_INLINE void q8_dot_run(const int8_t *q, const float *q_scale, const int32_t *offsets,
                              const int8_t *k, ptrdiff_t num_rows, ptrdiff_t d, ptrdiff_t group,
                              const char *ahead, float *restrict dots)
{
    ptrdiff_t r = 0;
#if defined(V16_NEON)
    if (group != GROUP)
        r = q8_dots_by_row(q, q_scale, k, num_rows, d, ahead, dots);
#endif
    for (; r + 4 <= num_rows; r += 4) {
        if (ahead)
            prefetch(ahead + r * d, 4 * d);
        q8_dot4(q, q_scale, offsets, k + r * d, d, group, dots + r);
    }
    for (; r < num_rows; r++)
        dots[r] = q8_dot(q, q_scale, k + r * d, d, group);
}

/* The same for two queries. */
ALWAYS_INLINE void q8_dot_pair_run(const int8_t *q, const float *q_scale, const int32_t *offsets,
                                   const int8_t *k, ptrdiff_t num_rows, ptrdiff_t d,
                                   ptrdiff_t group, const char *ahead, float *restrict dots,
                                   ptrdiff_t stride)
{
    ptrdiff_t r = 0;
    for (; r + PAIR_ROWS <= num_rows; r += PAIR_ROWS) {
        if (ahead)
            prefetch(ahead + r * d, PAIR_ROWS * d);
        q8_dot_pair(q, q_scale, offsets, k + r * d, d, group, dots + r, stride);
    }
    if (r < num_rows) {
        ahead = ahead ? ahead + r * d : NULL;
        q8_dot_run(q, q_scale, offsets, k + r * d, num_rows - r, d, group, ahead, dots + r);
        q8_dot_run(q + d, q_scale + d / group, offsets + d / group, k + r * d, num_rows - r, d,
                   group, NULL, dots + stride + r);
    }
}

ALWAYS_INLINE void q8_dots_of_rows(const struct q8_queries *q, ptrdiff_t queries, const int8_t *k,
                                   ptrdiff_t num_rows, ptrdiff_t d, ptrdiff_t group,
                                   const char *ahead, float *dots, ptrdiff_t stride)
{
    const int pairs = QUERY_PAIRS && d % (group == GROUP ? PAIR_STEP : PAIR_STEP_OF_ROW) == 0;
    for (ptrdiff_t j = 0, step; j < queries; j += step, ahead = NULL) {
        const int8_t *values = q->values + j * d;
        const float *scales = q->scales + j * (d / group);
        const int32_t *offsets = q->offsets + j * (d / group);
        float *to = dots + j * stride;
        step = pairs && j + 2 <= queries ? 2 : 1;
        if (step == 2)
            q8_dot_pair_run(values, scales, offsets, k, num_rows, d, group, ahead, to, stride);
        else
            q8_dot_run(values, scales, offsets, k, num_rows, d, group, ahead, to);
    }
}

/* As dots_of_run, for int8 queries. */
static void q8_dots_of_piece(const struct q8_queries *q, ptrdiff_t queries, const int8_t *k,
                             ptrdiff_t num_rows, ptrdiff_t d, const char *ahead, float *dots,
                             ptrdiff_t stride)
{
    const int row = q->group != GROUP;  /* of d = 32 both are the same */
    if (V16_IN_REGISTERS && d == 128 && row)
        q8_dots_of_rows(q, queries, k, num_rows, 128, 128, ahead, dots, stride);
    else if (V16_IN_REGISTERS && d == 128)
        q8_dots_of_rows(q, queries, k, num_rows, 128, GROUP, ahead, dots, stride);
    else if (V16_IN_REGISTERS && d == 64 && row)
        q8_dots_of_rows(q, queries, k, num_rows, 64, 64, ahead, dots, stride);
    else if (V16_IN_REGISTERS && d == 64)
        q8_dots_of_rows(q, queries, k, num_rows, 64, GROUP, ahead, dots, stride);
    else if (row)
        q8_dots_of_rows(q, queries, k, num_rows, d, d, ahead, dots, stride);
    else
        q8_dots_of_rows(q, queries, k, num_rows, d, GROUP, ahead, dots, stride);
}

static void q8_dots_of_run(const struct q8_queries *q, ptrdiff_t queries, const int8_t *k,
                           ptrdiff_t num_rows, ptrdiff_t d, const char *ahead, float *dots,
                           ptrdiff_t stride)
{
    const ptrdiff_t step = rows_of_piece(d);
    for (ptrdiff_t r = 0; r < num_rows; r += step) {
        const ptrdiff_t count = num_rows - r < step ? num_rows - r : step;
        q8_dots_of_piece(q, queries, k + r * d, count, d, ahead ? ahead + r * d : NULL, dots + r,
                         stride);
    }
}
