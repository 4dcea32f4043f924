/* Probe scores of blocks. */

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* Query heads whose dots with a row are taken while it is in registers: with 32 registers of 16
 * floats there is room for two, and the widening of int8 rows is shared. */
#if defined(V16_AVX512)
enum { PROBE_HEADS = 2 };
#else
enum { PROBE_HEADS = 1 };
#endif

/* Sampled rows lie far apart, in a pattern that the CPU does not foresee: they are asked for this
 * many blocks before they are used. */
enum { PROBE_AHEAD = 8, CACHE_LINE = 64 };

static ptrdiff_t probe_step(ptrdiff_t length, ptrdiff_t n_probe)
{
    return length / n_probe > 1 ? length / n_probe : 1;
}

ALWAYS_INLINE v16 probe_chunk(const char *row, ptrdiff_t i, int is_int8)
{
    return is_int8 ? v16_load_i8((const int8_t *)row + i) : v16_load((const float *)row + i);
}

ALWAYS_INLINE v16 probe_part(const char *row, ptrdiff_t i, ptrdiff_t count, int is_int8)
{
    return is_int8 ? v16_load_part_i8((const int8_t *)row + i, count)
                   : v16_load_part((const float *)row + i, count);
}

/* dots[h][j] = q[h] . row[j] of `heads` queries and four rows. Four rows at a time because one
 * chain of multiply-adds waits for itself, and because four sums cost little more than one. */
ALWAYS_INLINE void probe_dots(const float *q, const char *const row[4], ptrdiff_t d, int is_int8,
                              int heads, float dots[][4])
{
    v16 sum[PROBE_HEADS][4];
    for (int h = 0; h < heads; h++)
        for (int j = 0; j < 4; j++)
            sum[h][j] = v16_set(0.0f);
    ptrdiff_t i = 0;
    for (; i + 16 <= d; i += 16)
        for (int j = 0; j < 4; j++) {
            v16 values = probe_chunk(row[j], i, is_int8);
            for (int h = 0; h < heads; h++)
                sum[h][j] = v16_fma(v16_load(q + h * d + i), values, sum[h][j]);
        }
    if (i < d)
        for (int j = 0; j < 4; j++) {
            v16 values = probe_part(row[j], i, d - i, is_int8);
            for (int h = 0; h < heads; h++)
                sum[h][j] = v16_fma(v16_load_part(q + h * d + i, d - i), values, sum[h][j]);
        }
    for (int h = 0; h < heads; h++)
        v16_sum4(dots[h], sum[h][0], sum[h][1], sum[h][2], sum[h][3]);
}

/* Largest score of the rows 0, step, 2 step, ... below `length`, of `heads` queries. */
ALWAYS_INLINE void probe_block(const float *q, const char *rows, const float *scale,
                               ptrdiff_t length, ptrdiff_t step, ptrdiff_t d, int is_int8,
                               int heads, float *best)
{
    ptrdiff_t row_bytes = is_int8 ? d : d * (ptrdiff_t)sizeof(float);
    int finite[PROBE_HEADS];
    for (int h = 0; h < heads; h++)
        best[h] = -INFINITY, finite[h] = 1;
    for (ptrdiff_t first = 0; first < length; first += 4 * step) {
        const char *row[4];
        float dots[PROBE_HEADS][4], factor[4];
        for (ptrdiff_t j = 0, t = first; j < 4; j++) {
            row[j] = rows + t * row_bytes;
            factor[j] = is_int8 ? scale[t] : 1.0f;
            t = t + step < length ? t + step : t;  /* the last rows again, where there are fewer */
        }
        probe_dots(q, row, d, is_int8, heads, dots);
        for (int h = 0; h < heads; h++)
            for (int j = 0; j < 4; j++) {
                float score = is_int8 ? dots[h][j] * factor[j] : dots[h][j];
                finite[h] &= score - score == 0.0f;
                best[h] = score > best[h] ? score : best[h];
            }
    }
    for (int h = 0; h < heads; h++)
        best[h] = finite[h] ? best[h] : NAN;
}

static void prefetch_samples(const char *rows, ptrdiff_t length, ptrdiff_t step,
                             ptrdiff_t row_bytes)
{
    for (ptrdiff_t t = 0; t < length; t += step)
        for (ptrdiff_t i = 0; i < row_bytes; i += CACHE_LINE)
            __builtin_prefetch(rows + t * row_bytes + i);
}

struct probe_task {
    const float *q;
    ptrdiff_t heads;
    const struct kv_rows *rows;
    ptrdiff_t block_size, n_probe;
    float *scores;
};

ALWAYS_INLINE void probe_kv_head_as(const struct probe_task *task, ptrdiff_t kh, int is_int8)
{
    const struct kv_rows *cache = task->rows;
    ptrdiff_t group = task->heads / cache->num_kv_heads, d = cache->d, size = task->block_size;
    ptrdiff_t row_bytes = is_int8 ? d : d * (ptrdiff_t)sizeof(float);
    ptrdiff_t n_blocks = (cache->n - 1) / size + 1;
    const char *rows = (const char *)cache->k + kh * cache->k_head_stride * (row_bytes / d);
    const float *scale = is_int8 ? cache->k_scale + kh * cache->k_scale_stride : NULL;
    const float *q = task->q + kh * group * d;
    float *scores = task->scores + kh * group * n_blocks;
    for (ptrdiff_t b = 0; b < n_blocks; b++) {
        ptrdiff_t start = b * size, later = start + PROBE_AHEAD * size;
        ptrdiff_t length = cache->n - start < size ? cache->n - start : size;
        ptrdiff_t step = probe_step(length, task->n_probe);
        const float *block_scale = is_int8 ? scale + start : NULL;
        if (b + PROBE_AHEAD < n_blocks - 1)
            prefetch_samples(rows + later * row_bytes, size, step, row_bytes);
        ptrdiff_t h = 0;
        float best[PROBE_HEADS];
        for (; h + PROBE_HEADS <= group; h += PROBE_HEADS) {
            probe_block(q + h * d, rows + start * row_bytes, block_scale, length, step, d,
                        is_int8, PROBE_HEADS, best);
            for (int i = 0; i < PROBE_HEADS; i++)
                scores[(h + i) * n_blocks + b] = best[i];
        }
        for (; h < group; h++)
            probe_block(q + h * d, rows + start * row_bytes, block_scale, length, step, d,
                        is_int8, 1, &scores[h * n_blocks + b]);
    }
}

/* Probe the K rows of one KV head for all query heads that read them. */
static void probe_kv_head(const struct probe_task *task, ptrdiff_t kh)
{
    if (task->rows->k_scale)
        probe_kv_head_as(task, kh, 1);
    else
        probe_kv_head_as(task, kh, 0);
}

static void probe_piece(void *context, ptrdiff_t kh, int thread)
{
    (void)thread;
    probe_kv_head(context, kh);
}

static void probe_scores(const float *q, ptrdiff_t heads, const struct kv_rows *rows,
                         ptrdiff_t block_size, ptrdiff_t n_probe, float *scores, int threads)
{
    struct probe_task task = {q, heads, rows, block_size, n_probe, scores};
    parallel_for(rows->num_kv_heads, threads, probe_piece, &task);
}
