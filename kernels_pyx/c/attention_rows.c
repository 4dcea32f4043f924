/* Rows of the KV cache: in which order they are read, dots of queries with K, sums of V.
 *
 * Every number is a chain of its own: a dot is one v16 accumulator over d, an output value one
 * multiply-add per token in the order of the tokens. So how many rows and queries are worked on at
 * a time changes no bit; it is chosen to keep the accumulators in registers (V16_ACCUMULATORS) and
 * to use a row that was loaded for two queries. */
#include "attention.h"

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Of four registers a v16, an array of accumulators is stored and loaded around every step unless
 * its loops are unrolled early. */
#if defined(V16_NEON)
#define UNROLL_ON_NEON UNROLL
#else
#define UNROLL_ON_NEON
#endif

enum { RUN_TOKENS = 64 };

/* What is gone over more than once (by queries, by strips of columns) is this small: it stays in
 * the first cache, and memory is read in order but for so much. NEON loads the query once for each
 * piece, so there a piece is a whole tile of single_pass; AVX-512, which has the sums of two
 * queries over 128 columns in registers, loads and stores these for each piece. */
#if defined(V16_AVX512)
enum { PIECE_BYTES = 8192 };
#elif defined(V16_NEON)
enum { PIECE_BYTES = 4096 };
#else
enum { PIECE_BYTES = 2048 };
#endif

static ptrdiff_t rows_of_piece(ptrdiff_t row_bytes)
{
    return row_bytes < PIECE_BYTES / 4 ? PIECE_BYTES / row_bytes : 4;
}

/* Where reading stands: the token `offset` of block blocks[block], or of everything. */
struct reader {
    const int32_t *blocks;
    ptrdiff_t count, block_size, n;
    ptrdiff_t block, offset;
};

static struct reader start_reading(const struct kv_rows *rows, const int32_t *blocks,
                                   ptrdiff_t count, ptrdiff_t block_size)
{
    if (blocks == NULL)
        count = 1, block_size = rows->n;
    return (struct reader){blocks, count, block_size, rows->n, 0, 0};
}

/* The token that is read next, or -1 at the end. */
static ptrdiff_t next_token(const struct reader *r)
{
    if (r->block == r->count)
        return -1;
    return (r->blocks ? r->blocks[r->block] * r->block_size : 0) + r->offset;
}

/* Take up to `most` tokens that follow each other; returns how many, 0 at the end. */
static ptrdiff_t next_run(struct reader *r, ptrdiff_t most, ptrdiff_t *first)
{
    if (r->block == r->count)
        return 0;
    *first = next_token(r);
    ptrdiff_t left_in_block = r->block_size - r->offset, left = r->n - *first;
    left = left < left_in_block ? left : left_in_block;
    if (left <= most) {
        r->block++, r->offset = 0;
        return left;
    }
    r->offset += most;
    return most;
}

/* The token read at a position, for messages. */
static ptrdiff_t token_at(struct reader r, ptrdiff_t position)
{
    ptrdiff_t first = 0;
    for (ptrdiff_t count; (count = next_run(&r, RUN_TOKENS, &first)) > 0; position -= count)
        if (position < count)
            return first + position;
    return first;
}

/* Bytes of a row. */
static ptrdiff_t row_size(ptrdiff_t d, int q8) { return q8 ? d : d * (ptrdiff_t)sizeof(float); }

ALWAYS_INLINE v16 load_values(const char *row, ptrdiff_t index, int q8)
{
    return q8 ? v16_load_i8((const int8_t *)row + index) : v16_load((const float *)row + index);
}

ALWAYS_INLINE v16 load_last_values(const char *row, ptrdiff_t index, ptrdiff_t count, int q8)
{
    return q8 ? v16_load_part_i8((const int8_t *)row + index, count)
              : v16_load_part((const float *)row + index, count);
}

/* Ask for memory that is needed soon, into the second cache: another block of a list. In a dense
 * cache the CPU sees by itself that memory is read in order, and asking made that slower. */
ALWAYS_INLINE void prefetch(const char *start, ptrdiff_t bytes)
{
    for (ptrdiff_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(start + i, 0, 2);
}

/* query . row, for a row of any length: the definition. */
static float dot(const float *q, const char *row, ptrdiff_t d, int q8)
{
    v16 sum = v16_set(0.0f);
    ptrdiff_t c = 0;
    for (; c + 16 <= d; c += 16)
        sum = v16_fma(v16_load(q + c), load_values(row, c, q8), sum);
    if (c < d)
        sum = v16_fma(v16_load_part(q + c, d - c), load_last_values(row, c, d - c, q8), sum);
    return v16_sum(sum);
}

/* dots[j * stride + r] = query j . row r, for 1 or 2 queries [padded] of whole vectors. */
ALWAYS_INLINE void dot_tile(const float *q, int queries, const char *k, int num_rows, ptrdiff_t d,
                            int q8, float *dots, ptrdiff_t stride)
{
    const ptrdiff_t row_bytes = row_size(d, q8);
    v16 acc[V16_ACCUMULATORS];
    UNROLL_ON_NEON for (int i = 0; i < queries * num_rows; i++)
        acc[i] = v16_set(0.0f);
    for (ptrdiff_t c = 0; c < d; c += 16) {
        v16 first = v16_load(q + c), second = first;
        if (queries == 2)
            second = v16_load(q + d + c);
        UNROLL_ON_NEON for (int r = 0; r < num_rows; r++) {
            v16 key = load_values(k + r * row_bytes, c, q8);
            acc[r] = v16_fma(first, key, acc[r]);
            if (queries == 2)
                acc[num_rows + r] = v16_fma(second, key, acc[num_rows + r]);
        }
    }
    float sums[V16_ACCUMULATORS];
    if (queries * num_rows == V16_ACCUMULATORS)
        v16_sum_all(sums, acc);
    else
        for (int i = 0; i < queries * num_rows; i++)
            sums[i] = v16_sum(acc[i]);
    for (int j = 0; j < queries; j++)
        memcpy(dots + j * stride, sums + j * num_rows, (size_t)num_rows * sizeof *sums);
}

/* Dots of one or two queries with rows that follow each other; while at it, fetch the rows that
 * are read after them, which begin at `ahead`. */
ALWAYS_INLINE void dot_run(const float *q, int queries, const char *k, ptrdiff_t num_rows,
                           ptrdiff_t d, int q8, const char *ahead, float *dots, ptrdiff_t stride)
{
    /* int8 rows: as many as there are accumulators, the widening of values is shared by all. Float
     * rows one by one: the memory is what takes time, and so it is read strictly in order. */
    const int tile = q8 ? V16_ACCUMULATORS / queries : 1;
    const ptrdiff_t row_bytes = row_size(d, q8);
    ptrdiff_t r = 0;
    for (; r + tile <= num_rows; r += tile) {
        if (ahead)
            prefetch(ahead + r * row_bytes, tile * row_bytes);
        dot_tile(q, queries, k + r * row_bytes, tile, d, q8, dots + r, stride);
    }
    for (; tile > 1 && r < num_rows; r++)
        dot_tile(q, queries, k + r * row_bytes, 1, d, q8, dots + r, stride);
}

/* The same, with the length of a row known to the compiler where it is a usual one. */
ALWAYS_INLINE void dot_run_of(const float *q, int queries, const char *k, ptrdiff_t num_rows,
                              ptrdiff_t d, int q8, const char *ahead, float *dots,
                              ptrdiff_t stride)
{
    if (V16_IN_REGISTERS && d == 128)
        dot_run(q, queries, k, num_rows, 128, q8, ahead, dots, stride);
    else if (V16_IN_REGISTERS && d == 64)
        dot_run(q, queries, k, num_rows, 64, q8, ahead, dots, stride);
    else
        dot_run(q, queries, k, num_rows, d, q8, ahead, dots, stride);
}

/* Dots of all queries q[queries][padded]: pairs share the loads of a row. */
static void dots_of_run(const float *q, ptrdiff_t queries, const char *k, ptrdiff_t num_rows,
                        ptrdiff_t d, int q8, const char *ahead, float *dots, ptrdiff_t stride)
{
    const ptrdiff_t padded = (d + 15) / 16 * 16;
    if (d % 16) {
        for (ptrdiff_t j = 0; j < queries; j++)
            for (ptrdiff_t r = 0; r < num_rows; r++)
                dots[j * stride + r] = dot(q + j * padded, k + r * row_size(d, q8), d, q8);
        return;
    }
    for (ptrdiff_t j = 0; j < queries; j += 2, ahead = NULL) {
        const float *part = q + j * padded;
        float *to = dots + j * stride;
        if (j + 1 < queries && q8)
            dot_run_of(part, 2, k, num_rows, d, 1, ahead, to, stride);
        else if (j + 1 < queries)
            dot_run_of(part, 2, k, num_rows, d, 0, ahead, to, stride);
        else if (q8)
            dot_run_of(part, 1, k, num_rows, d, 1, ahead, to, stride);
        else
            dot_run_of(part, 1, k, num_rows, d, 0, ahead, to, stride);
    }
}

/* scores = dots * k_scale (int8 rows) * 1/sqrt(d), each a multiplication of its own. */
static void scale_scores(float *dots, const float *k_scale, ptrdiff_t count, float inv_sqrt_d)
{
    const v16 inv = v16_set(inv_sqrt_d);
    for (ptrdiff_t t = 0; t < count; t += 16) {
        ptrdiff_t part = count - t < 16 ? count - t : 16;
        v16 x = part == 16 ? v16_load(dots + t) : v16_load_part(dots + t, part);
        if (k_scale)
            x = v16_mul(x, part == 16 ? v16_load(k_scale + t) : v16_load_part(k_scale + t, part));
        x = v16_mul(x, inv);
        if (part == 16)
            v16_store(dots + t, x);
        else
            v16_store_part(dots + t, x, part);
    }
}

#if defined(V16_AVX512)
/* Two int8 rows of 128 columns for two queries. All values are widened before the first is
 * multiplied. Zen 4 multiplies in two of its four units and widens in two, of which one is the
 * same: where the two kinds of instructions take turns, multiplications wait for it more often. */
ALWAYS_INLINE void add_two_rows(v16 *sum, const float *w, const float *second, const char *v,
                                ptrdiff_t row_bytes)
{
    v16 value[V16_ACCUMULATORS];
    UNROLL for (int i = 0; i < 16; i++) {
        value[i] = load_values(v + i / 8 * row_bytes, 16 * (i % 8), 1);
        __asm__ volatile("" : "+v"(value[i]));  /* nothing, but here: compilers keep this order */
    }
    UNROLL for (int i = 0; i < 16; i++) {
        sum[i % 8] = v16_fma_number(w + i / 8, value[i], sum[i % 8]);
        sum[8 + i % 8] = v16_fma_number(second + i / 8, value[i], sum[8 + i % 8]);
    }
}
#endif

/* acc[j][c] += w[j * stride + t] * v[t][c], token after token, for `width` v16 columns. */
ALWAYS_INLINE void sum_strip(float *acc, ptrdiff_t padded, int queries, const float *w,
                             ptrdiff_t stride, const char *v, ptrdiff_t num_rows,
                             ptrdiff_t row_bytes, int width, int q8, const char *ahead)
{
    v16 sum[V16_ACCUMULATORS];
    UNROLL_ON_NEON for (int j = 0; j < queries; j++)
        UNROLL_ON_NEON for (int c = 0; c < width; c++)
            sum[j * width + c] = v16_load(acc + j * padded + 16 * c);
    ptrdiff_t t = 0;
#if defined(V16_AVX512)
    if (q8 && queries == 2 && width == V16_ACCUMULATORS / 2)
        for (; t + 2 <= num_rows; t += 2) {
            if (ahead)
                prefetch(ahead + t * row_bytes, 2 * row_bytes);
            add_two_rows(sum, w + t, w + stride + t, v + t * row_bytes, row_bytes);
        }
#endif
    for (; t < num_rows; t++) {
        if (ahead)
            prefetch(ahead + t * row_bytes, row_bytes);
        v16 first = v16_set(w[t]), second = first;
        if (queries == 2)
            second = v16_set(w[stride + t]);
        UNROLL_ON_NEON for (int c = 0; c < width; c++) {
            v16 value = load_values(v + t * row_bytes, 16 * c, q8);
#if defined(V16_AVX512)
            if (q8) {  /* float rows wait for memory, and would only be loaded twice */
                sum[c] = v16_fma_number(w + t, value, sum[c]);
                if (queries == 2)
                    sum[width + c] = v16_fma_number(w + stride + t, value, sum[width + c]);
                continue;
            }
#endif
            sum[c] = v16_fma(first, value, sum[c]);
            if (queries == 2)
                sum[width + c] = v16_fma(second, value, sum[width + c]);
        }
    }
    UNROLL_ON_NEON for (int j = 0; j < queries; j++)
        UNROLL_ON_NEON for (int c = 0; c < width; c++)
            v16_store(acc + j * padded + 16 * c, sum[j * width + c]);
}

/* The last values of a row whose length is no multiple of 16. */
static void sum_last_columns(float *acc, ptrdiff_t padded, int queries, const float *w,
                             ptrdiff_t stride, const char *v, ptrdiff_t num_rows,
                             ptrdiff_t row_bytes, ptrdiff_t first, ptrdiff_t count, int q8)
{
    for (int j = 0; j < queries; j++) {
        v16 sum = v16_load(acc + j * padded + first);
        for (ptrdiff_t t = 0; t < num_rows; t++)
            sum = v16_fma(v16_set(w[j * stride + t]),
                          load_last_values(v + t * row_bytes, first, count, q8), sum);
        v16_store(acc + j * padded + first, sum);
    }
}

ALWAYS_INLINE void sum_run(float *acc, int queries, const float *w, ptrdiff_t stride,
                           const char *v, ptrdiff_t num_rows, ptrdiff_t d, int q8,
                           const char *ahead)
{
    const int width = V16_ACCUMULATORS / 2;  /* v16 columns of a strip, for one query as for two */
    const ptrdiff_t padded = (d + 15) / 16 * 16, value = q8 ? 1 : (int)sizeof(float);
    ptrdiff_t c = 0;
    for (; c + 16 * width <= d; c += 16 * width, ahead = NULL)
        sum_strip(acc + c, padded, queries, w, stride, v + c * value, num_rows, d * value, width,
                  q8, ahead);
    for (; width > 2 && c + 8 * width <= d; c += 8 * width, ahead = NULL)
        sum_strip(acc + c, padded, queries, w, stride, v + c * value, num_rows, d * value,
                  width / 2, q8, ahead);
    for (; c + 16 <= d; c += 16, ahead = NULL)
        sum_strip(acc + c, padded, queries, w, stride, v + c * value, num_rows, d * value, 1, q8,
                  ahead);
    if (c < d)
        sum_last_columns(acc, padded, queries, w, stride, v, num_rows, d * value, c, d - c, q8);
}

/* acc[queries][padded] += weights * rows, with the weights of query j at w + j * stride. */
static void sums_of_piece(float *acc, ptrdiff_t queries, const float *w, ptrdiff_t stride,
                          const char *v, ptrdiff_t num_rows, ptrdiff_t d, int q8,
                          const char *ahead)
{
    const ptrdiff_t padded = (d + 15) / 16 * 16;
    for (ptrdiff_t j = 0; j < queries; j += 2, ahead = NULL) {
        const float *weights = w + j * stride;
        float *to = acc + j * padded;
        if (j + 1 < queries && q8)
            sum_run(to, 2, weights, stride, v, num_rows, d, 1, ahead);
        else if (j + 1 < queries)
            sum_run(to, 2, weights, stride, v, num_rows, d, 0, ahead);
        else if (q8)
            sum_run(to, 1, weights, stride, v, num_rows, d, 1, ahead);
        else
            sum_run(to, 1, weights, stride, v, num_rows, d, 0, ahead);
    }
}

static void sums_of_run(float *acc, ptrdiff_t queries, const float *w, ptrdiff_t stride,
                        const char *v, ptrdiff_t num_rows, ptrdiff_t d, int q8, const char *ahead)
{
    const ptrdiff_t row_bytes = row_size(d, q8), step = rows_of_piece(row_bytes);
    for (ptrdiff_t t = 0; t < num_rows; t += step) {
        const ptrdiff_t count = num_rows - t < step ? num_rows - t : step;
        sums_of_piece(acc, queries, w + t, stride, v + t * row_bytes, count, d, q8,
                      ahead ? ahead + t * row_bytes : NULL);
    }
}
