#include "measure.h"

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

/* Every variant with the instructions that its kernels live on. A multiply-add waits some four
 * cycles for the one before it in its chain: CHAINS of them keep two units busy and fit the
 * registers. A vector holds FLOATS floats or INT8S int8 values.
 *
 * HIDE makes the compiler forget what a register holds, at no instruction: products that are the
 * same in every round would otherwise be computed once. */
#if defined(V16_AVX512)
enum { CHAINS = 10, FLOATS = 16, INT8S = 64 };
#define HIDE(value) __asm__ volatile("" : "+v"(value))
typedef __m512 floats;
typedef __m512i int8s, int32s;
static inline floats all_floats(float x) { return _mm512_set1_ps(x); }
static inline int8s all_int8s(int8_t x) { return _mm512_set1_epi8(x); }
static inline int32s no_int32s(void) { return _mm512_setzero_si512(); }
static inline floats float_step(floats sum, floats a, floats b)
{
    return _mm512_fmadd_ps(a, b, sum);
}
static inline int32s int8_step(int32s sum, int8s a, int8s b)
{
    return _mm512_dpbusd_epi32(sum, a, b);
}

#elif defined(V16_AVX2)
enum { CHAINS = 10, FLOATS = 8, INT8S = 32 };
#define HIDE(value) __asm__ volatile("" : "+x"(value))
typedef __m256 floats;
typedef __m256i int8s, int32s;
static inline floats all_floats(float x) { return _mm256_set1_ps(x); }
static inline int8s all_int8s(int8_t x) { return _mm256_set1_epi8(x); }
static inline int32s no_int32s(void) { return _mm256_setzero_si256(); }
static inline floats float_step(floats sum, floats a, floats b)
{
    return _mm256_fmadd_ps(a, b, sum);
}
static inline int32s int8_step(int32s sum, int8s a, int8s b)
{
    /* Products summed in pairs to int16, pairs of those to int32. */
    __m256i pairs = _mm256_maddubs_epi16(a, b);
    return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#elif defined(V16_NEON)
enum { CHAINS = 10, FLOATS = 4, INT8S = 16 };
#define HIDE(value) __asm__ volatile("" : "+w"(value))
typedef float32x4_t floats;
typedef int8x16_t int8s;
typedef int32x4_t int32s;
static inline floats all_floats(float x) { return vdupq_n_f32(x); }
static inline int8s all_int8s(int8_t x) { return vdupq_n_s8(x); }
static inline int32s no_int32s(void) { return vdupq_n_s32(0); }
static inline floats float_step(floats sum, floats a, floats b) { return vfmaq_f32(sum, a, b); }
static inline int32s int8_step(int32s sum, int8s a, int8s b)
{
#if defined(V16_DOTPROD)
    return vdotq_s32(sum, a, b);
#else
    /* Products in int16, those of lanes i and i + 8 summed; pairs of these to int32. */
    int16x8_t products = vmull_s8(vget_low_s8(a), vget_low_s8(b));
    return vpadalq_s16(sum, vmlal_s8(products, vget_high_s8(a), vget_high_s8(b)));
#endif
}

#else
/* Plain C: arrays in memory, and the compiler does with them what it can. */
enum { CHAINS = 4, FLOATS = 16, INT8S = 1024 };
#define HIDE(value) __asm__ volatile("" : "+m"(value))
typedef struct { float x[FLOATS]; } floats;
typedef struct { int8_t x[INT8S]; } int8s;
typedef struct { int32_t x; } int32s;
static inline floats all_floats(float x)
{
    floats all;
    for (int i = 0; i < FLOATS; i++)
        all.x[i] = x;
    return all;
}
static inline int8s all_int8s(int8_t x)
{
    int8s all;
    memset(all.x, x, sizeof all.x);
    return all;
}
static inline int32s no_int32s(void) { return (int32s){0}; }
static inline floats float_step(floats sum, floats a, floats b)
{
    for (int i = 0; i < FLOATS; i++)
        sum.x[i] = fmaf(a.x[i], b.x[i], sum.x[i]);
    return sum;
}
static inline int32s int8_step(int32s sum, int8s a, int8s b)
{
    int32_t part = 0;
    for (int i = 0; i < INT8S; i++)
        part += a.x[i] * b.x[i];
    return (int32s){(int32_t)((uint32_t)sum.x + (uint32_t)part)};
}
#endif

static void float_piece(void *rounds, ptrdiff_t index, int thread)
{
    const floats a = all_floats(0.5f), b = all_floats(0.25f);
    floats chain[CHAINS];
    (void)index, (void)thread;
    for (int i = 0; i < CHAINS; i++)
        chain[i] = all_floats((float)i);
    for (ptrdiff_t round = *(const ptrdiff_t *)rounds; round > 0; round--)
        for (int i = 0; i < CHAINS; i++)
            chain[i] = float_step(chain[i], a, b);
    for (int i = 0; i < CHAINS; i++)
        HIDE(chain[i]);  /* as if it were used */
}

static void int8_piece(void *rounds, ptrdiff_t index, int thread)
{
    int8s a = all_int8s(1), b = all_int8s(1);
    int32s chain[CHAINS];
    (void)index, (void)thread;
    for (int i = 0; i < CHAINS; i++)
        chain[i] = no_int32s();
    for (ptrdiff_t round = *(const ptrdiff_t *)rounds; round > 0; round--)
        for (int i = 0; i < CHAINS; i++) {
            HIDE(a);
            chain[i] = int8_step(chain[i], a, b);
        }
    for (int i = 0; i < CHAINS; i++)
        HIDE(chain[i]);
}

static double float_operations(ptrdiff_t rounds, int threads)
{
    parallel_for(threads, threads, float_piece, &rounds);
    return 2.0 * FLOATS * CHAINS * (double)rounds * threads;
}

static double int8_operations(ptrdiff_t rounds, int threads)
{
    parallel_for(threads, threads, int8_piece, &rounds);
    return 2.0 * INT8S * CHAINS * (double)rounds * threads;
}

#undef HIDE

static const struct measure_kernels measure_kernels = {
    .sum_words = sum_words,
    .sum_blocks = sum_blocks,
    .float_operations = float_operations,
    .int8_operations = int8_operations,
};
