#include "measure.h"

/* Hide a value from the compiler: it can neither compute with what it held before nor move a
 * computation across this line. No instruction comes of it. */
#if defined(V16_AVX512) || defined(V16_AVX2)
#define HIDE(register_value) __asm__ volatile("" : "+x"(register_value))
#elif defined(V16_NEON)
#define HIDE(register_value) __asm__ volatile("" : "+w"(register_value))
#endif

/* ---- Reading ------------------------------------------------------------------------------- */

/* Sixteen words are a cache line. The CPU's own prefetcher stops at the end of a page of 4 KB, so
 * the reading asks itself for the words a page ahead. */
enum { LINE = 16, READ_AHEAD = 1024 };

/* A sum of integers may be reordered freely: 32 sums side by side are what compilers turn into the
 * widest additions they have. Meanwhile the words at `ahead` are brought into the second-level
 * cache, as many as are summed. */
static uint32_t sum_range(const uint32_t *x, ptrdiff_t count, const uint32_t *ahead)
{
    uint32_t part[2 * LINE] = {0}, sum = 0;
    ptrdiff_t i = 0;
    for (; i + 2 * LINE <= count; i += 2 * LINE) {
        __builtin_prefetch(ahead + i, 0, 2);
        __builtin_prefetch(ahead + i + LINE, 0, 2);
        for (int j = 0; j < 2 * LINE; j++)
            part[j] += x[i + j];
    }
    for (; i < count; i++)
        sum += x[i];
    for (int j = 0; j < 2 * LINE; j++)
        sum += part[j];
    return sum;
}

struct reading {
    const uint32_t *x;
    const int64_t *first;  /* NULL: in order */
    ptrdiff_t count, size, pieces;
    uint32_t *sums;  /* one for each piece */
};

static void read_piece(void *context, ptrdiff_t index, int thread)
{
    const struct reading *r = context;
    ptrdiff_t from = r->count / r->pieces * index;
    ptrdiff_t to = index + 1 == r->pieces ? r->count : r->count / r->pieces * (index + 1);
    (void)thread;
    if (r->first == NULL) {
        r->sums[index] = sum_range(r->x + from, to - from, r->x + from + READ_AHEAD);
        return;
    }
    uint32_t sum = 0;
    for (ptrdiff_t i = from; i < to; i++)
        sum += sum_range(r->x + r->first[i], r->size, r->x + r->first[i + 1 < to ? i + 1 : i]);
    r->sums[index] = sum;
}

/* At most this many pieces, as many as the KV heads that attention shares among threads. */
enum { PIECES = 8 };

static uint32_t read_pieces(struct reading *r, int threads)
{
    uint32_t sums[PIECES], sum = 0;
    r->pieces = threads > 1 ? PIECES : 1;
    r->sums = sums;
    parallel_for(r->pieces, threads, read_piece, r);
    for (ptrdiff_t i = 0; i < r->pieces; i++)
        sum += sums[i];
    return sum;
}

static uint32_t sum_words(const uint32_t *x, ptrdiff_t count, int threads)
{
    struct reading r = {x, NULL, count, 0, 1, NULL};
    return read_pieces(&r, threads);
}

static uint32_t sum_blocks(const uint32_t *x, const int64_t *first, ptrdiff_t blocks,
                           ptrdiff_t size, int threads)
{
    struct reading r = {x, first, blocks, size, 1, NULL};
    return read_pieces(&r, threads);
}

/* ---- Computing ----------------------------------------------------------------------------- */

struct computing {
    ptrdiff_t rounds;
    float float_sink[1024];  /* one for each thread's piece */
    int32_t int_sink[1024];
};

/* A multiply-add waits some four cycles for the one before it in its chain; so many chains keep
 * two units of any of these CPUs busy and still fit the registers. */
#if defined(V16_AVX512)
enum { CHAINS = 10 };
#elif defined(V16_AVX2)
enum { CHAINS = 6 };
#else
enum { CHAINS = 5 };
#endif

static void float_piece(void *context, ptrdiff_t index, int thread)
{
    struct computing *c = context;
    const v16 half = v16_set(0.5f), one = v16_set(1.0f);
    v16 chain[CHAINS];
    (void)thread;
    for (int i = 0; i < CHAINS; i++)
        chain[i] = v16_set((float)i);
    for (ptrdiff_t round = 0; round < c->rounds; round++)
        for (int i = 0; i < CHAINS; i++)
            chain[i] = v16_fma(chain[i], half, one);
    for (int i = 1; i < CHAINS; i++)
        chain[0] = v16_add(chain[0], chain[i]);
    c->float_sink[index] = v16_sum(chain[0]);
}

static double float_operations(ptrdiff_t rounds, int threads, float *sink)
{
    struct computing c = {.rounds = rounds};
    parallel_for(threads, threads, float_piece, &c);
    sink[0] = c.float_sink[0];
    return 2.0 * 16 * CHAINS * (double)rounds * threads;
}

/* int8_step adds 64 products of int8 (one unsigned where the instruction wants that) to one chain
 * of int32 sums; every variant with the instructions that its weight products use. */
#if defined(V16_AVX512)
typedef __m512i int_sums;
typedef __m512i int8_values;
enum { INT_CHAINS = 10 };
static inline int_sums int_sums_zero(void) { return _mm512_setzero_si512(); }
static inline int8_values int8_ones(void) { return _mm512_set1_epi8(1); }
static inline int_sums int8_step(int_sums sums, int8_values a, int8_values b)
{
    return _mm512_dpbusd_epi32(sums, a, b);
}
static inline int32_t int_sums_first(int_sums sums)
{
    return _mm_cvtsi128_si32(_mm512_castsi512_si128(sums));
}
#elif defined(V16_AVX2)
/* Two vectors of 32: products in pairs to int16, pairs of those to int32, one addition. */
typedef __m256i int_sums;
typedef __m256i int8_values;
enum { INT_CHAINS = 6 };
static inline int_sums int_sums_zero(void) { return _mm256_setzero_si256(); }
static inline int8_values int8_ones(void) { return _mm256_set1_epi8(1); }
static inline int_sums int8_step(int_sums sums, int8_values a, int8_values b)
{
    const __m256i ones = _mm256_set1_epi16(1);
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_maddubs_epi16(a, b);
        HIDE(pairs);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, ones));
    }
    return sums;
}
static inline int32_t int_sums_first(int_sums sums)
{
    return _mm_cvtsi128_si32(_mm256_castsi256_si128(sums));
}
#elif defined(V16_NEON)
typedef int32x4_t int_sums;
typedef int8x16_t int8_values;
enum { INT_CHAINS = 10 };
static inline int_sums int_sums_zero(void) { return vdupq_n_s32(0); }
static inline int8_values int8_ones(void) { return vdupq_n_s8(1); }
static inline int_sums int8_step(int_sums sums, int8_values a, int8_values b)
{
    for (int i = 0; i < 4; i++) {
#if defined(V16_DOTPROD)
        sums = vdotq_s32(sums, a, b);
#else
        int16x8_t pairs = vmull_s8(vget_low_s8(a), vget_low_s8(b));
        pairs = vmlal_s8(pairs, vget_high_s8(a), vget_high_s8(b));
        HIDE(pairs);
        sums = vpadalq_s16(sums, pairs);
#endif
    }
    return sums;
}
static inline int32_t int_sums_first(int_sums sums) { return vgetq_lane_s32(sums, 0); }
#endif

#if defined(V16_AVX512) || defined(V16_AVX2) || defined(V16_NEON)
static void int8_piece(void *context, ptrdiff_t index, int thread)
{
    struct computing *c = context;
    int8_values a = int8_ones(), b = int8_ones();
    int_sums chain[INT_CHAINS];
    (void)thread;
    for (int i = 0; i < INT_CHAINS; i++)
        chain[i] = int_sums_zero();
    for (ptrdiff_t round = 0; round < c->rounds; round++) {
        HIDE(a);  /* or the products, the same in every round, would be made once */
        for (int i = 0; i < INT_CHAINS; i++)
            chain[i] = int8_step(chain[i], a, b);
    }
    int32_t sum = 0;
    for (int i = 0; i < INT_CHAINS; i++)
        sum = (int32_t)((uint32_t)sum + (uint32_t)int_sums_first(chain[i]));
    c->int_sink[index] = sum;
}
#else
enum { INT_CHAINS = 8 };
static void int8_piece(void *context, ptrdiff_t index, int thread)
{
    struct computing *c = context;
    int8_t a[64 * INT_CHAINS], b[64 * INT_CHAINS];
    uint32_t sum = 0;
    (void)thread;
    memset(a, 1, sizeof a);
    memset(b, 1, sizeof b);
    for (ptrdiff_t round = 0; round < c->rounds; round++) {
        int32_t part = 0;
        __asm__ volatile("" : : "r"(a), "r"(b) : "memory");  /* a and b may have changed */
        for (int i = 0; i < 64 * INT_CHAINS; i++)
            part += a[i] * b[i];
        sum += (uint32_t)part;
    }
    c->int_sink[index] = (int32_t)sum;
}
#endif

static double int8_operations(ptrdiff_t rounds, int threads, int32_t *sink)
{
    struct computing c = {.rounds = rounds};
    parallel_for(threads, threads, int8_piece, &c);
    sink[0] = c.int_sink[0];
    return 2.0 * 64 * INT_CHAINS * (double)rounds * threads;
}

static const struct measure_kernels measure_kernels = {
    sum_words, sum_blocks, float_operations, int8_operations,
};
