/* Probe scores of blocks. */

/* Rows and query heads of a tile: as many dots at a time as there are accumulators, and a row is
 * widened once for both heads where that leaves rows enough. */
#if defined(V16_AVX512)
enum { PROBE_ROWS = 8, PROBE_HEADS = 2 };
#else
enum { PROBE_ROWS = 4, PROBE_HEADS = 1 };
#endif

/* Sampled rows lie apart, and the CPU does not guess all of them: they are asked for this many
 * blocks before they are used. */
enum { PROBE_AHEAD = 8 };

static ptrdiff_t probe_step(ptrdiff_t length, ptrdiff_t n_probe)
{
    return length / n_probe > 1 ? length / n_probe : 1;
}

/* dots[h * PROBE_ROWS + r] = q[h] . row r, of `heads` queries and `count` rows that lie `stride`
 * bytes apart. Where a tile is not full, the last row stands for those that are missing. */
ALWAYS_INLINE void probe_tile(const float *q, int heads, const char *first, ptrdiff_t stride,
                              int count, ptrdiff_t d, int q8, float *dots)
{
    v16 acc[PROBE_HEADS * PROBE_ROWS];
    for (int i = 0; i < heads * PROBE_ROWS; i++)
        acc[i] = v16_set(0.0f);
    const char *rows[PROBE_ROWS];
    for (int r = 0; r < PROBE_ROWS; r++)
        rows[r] = first + (r < count ? r : count - 1) * stride;
    if (d % 16) {
        for (int h = 0; h < heads; h++)
            for (int r = 0; r < count; r++)
                dots[h * PROBE_ROWS + r] = dot(q + h * d, rows[r], d, q8);
        return;
    }
    for (ptrdiff_t c = 0; c < d; c += 16) {
        v16 query[PROBE_HEADS];
        for (int h = 0; h < heads; h++)
            query[h] = v16_load(q + h * d + c);
        for (int r = 0; r < PROBE_ROWS; r++) {
            v16 key = load_values(rows[r], c, q8);
            for (int h = 0; h < heads; h++)
                acc[h * PROBE_ROWS + r] = v16_fma(query[h], key, acc[h * PROBE_ROWS + r]);
        }
    }
    if (heads * PROBE_ROWS == V16_ACCUMULATORS)
        v16_sum_all(dots, acc);
    else
        for (int i = 0; i < heads * PROBE_ROWS; i += 4)
            v16_sum4(dots + i, acc[i], acc[i + 1], acc[i + 2], acc[i + 3]);
}

/* best[h] becomes the largest of best[h] and the dots times their scales (NULL: 1), which lie
 * `step` apart; NaN if one of these is not finite. A NaN in best[h] stays. */
static void take_best(const float *dots, int heads, const float *scale, ptrdiff_t step,
                      int count, float *best)
{
    for (int h = 0; h < heads; h++)
        for (int r = 0; r < count; r++) {
            float score = dots[h * PROBE_ROWS + r];
            if (scale)
                score *= scale[r * step];
            if (!(score - score == 0.0f))
                best[h] = NAN;
            /* Written so that NaN stays: it is not smaller than anything. */
            best[h] = best[h] < score ? score : best[h];
        }
}

#if defined(V16_AVX512)
/* The same for two queries and a full tile of rows, where every score is finite; returns whether
 * that is so. */
static inline int take_best_16(const float *dots, const float *scale, float *best)
{
    __m512 score = _mm512_loadu_ps(dots);
    if (scale)
        score = _mm512_mul_ps(score, _mm512_broadcast_f32x8(_mm256_loadu_ps(scale)));
    if (v16_not_finite(score))
        return 0;
    __m256 a = _mm512_castps512_ps256(score), b = _mm512_extractf32x8_ps(score, 1);
    __m256 ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));  /* abab abab */
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(ab), _mm256_extractf128_ps(ab, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    /* Of two operands, one of them NaN, maxps returns the second: a NaN in best stays. */
    x = _mm_max_ps(x, _mm_castpd_ps(_mm_load_sd((const double *)best)));
    _mm_store_sd((double *)best, _mm_castps_pd(x));
    return 1;
}
#endif

/* Scores of `count` rows that lie `step` apart, of `heads` queries. */
ALWAYS_INLINE void probe_some(const float *q, int heads, const char *rows, const float *scale,
                              ptrdiff_t step, int count, ptrdiff_t d, int q8, float *best)
{
    float dots[PROBE_HEADS * PROBE_ROWS];
    probe_tile(q, heads, rows, step * row_size(d, q8), count, d, q8, dots);
#if defined(V16_AVX512)
    float scales[PROBE_ROWS];
    if (heads == 2 && count == PROBE_ROWS) {
        for (int r = 0; q8 && r < PROBE_ROWS; r++)
            scales[r] = scale[r * step];
        if (take_best_16(dots, q8 ? scales : NULL, best))
            return;
    }
#endif
    take_best(dots, heads, q8 ? scale : NULL, step, count, best);
}

/* Largest score of the rows 0, step, 2 step, ... below `length`, of `heads` queries. */
ALWAYS_INLINE void probe_block(const float *q, const char *rows, const float *scale,
                               ptrdiff_t length, ptrdiff_t step, ptrdiff_t d, int q8, int heads,
                               float *best)
{
    for (int h = 0; h < heads; h++)
        best[h] = -INFINITY;
    for (ptrdiff_t left = (length - 1) / step + 1; left > 0; left -= PROBE_ROWS) {
        probe_some(q, heads, rows, scale, step, left < PROBE_ROWS ? (int)left : PROBE_ROWS, d, q8,
                   best);
        rows += PROBE_ROWS * step * row_size(d, q8);
        scale = q8 ? scale + PROBE_ROWS * step : NULL;
    }
    for (int h = 0; h < heads; h++)
        best[h] += 0.0f;  /* -0 becomes 0: which of two zeros a maximum takes would be seen */
}

static void prefetch_samples(const char *rows, ptrdiff_t length, ptrdiff_t step,
                             ptrdiff_t row_bytes)
{
    for (ptrdiff_t t = 0; t < length; t += step)
        prefetch(rows + t * row_bytes, row_bytes);
}

struct probe_task {
    const float *q;
    ptrdiff_t heads;
    const struct kv_rows *rows, *samples;
    ptrdiff_t block_size, n_probe;
    float *scores;
};

/* Probe one block for all query heads of a group; scores[h * n_blocks] receives the result. */
ALWAYS_INLINE void probe_group(const float *q, ptrdiff_t group, const char *rows,
                               const float *scale, ptrdiff_t length, ptrdiff_t step, ptrdiff_t d,
                               int q8, float *scores, ptrdiff_t n_blocks)
{
    ptrdiff_t h = 0;
    float best[PROBE_HEADS];
    for (; h + PROBE_HEADS <= group; h += PROBE_HEADS) {
        probe_block(q + h * d, rows, scale, length, step, d, q8, PROBE_HEADS, best);
        for (int i = 0; i < PROBE_HEADS; i++)
            scores[(h + i) * n_blocks] = best[i];
    }
    for (; PROBE_HEADS > 1 && h < group; h++)
        probe_block(q + h * d, rows, scale, length, step, d, q8, 1, scores + h * n_blocks);
}

static const char *head_rows(const struct kv_rows *rows, ptrdiff_t kh, int q8)
{
    return (const char *)rows->k + row_size(kh * rows->k_head_stride, q8);
}

static const float *head_scales(const struct kv_rows *rows, ptrdiff_t kh, int q8)
{
    return q8 ? rows->k_scale + kh * rows->k_scale_stride : NULL;
}

/* Full blocks from the packed samples, where there are some, and every other block from the cache
 * itself: a block that still grows is sampled elsewhere with every token. */
ALWAYS_INLINE void probe_rows(const struct probe_task *task, ptrdiff_t kh, ptrdiff_t d, int q8)
{
    const struct kv_rows *cache = task->rows, *samples = task->samples;
    const ptrdiff_t group = task->heads / cache->num_kv_heads, size = task->block_size;
    const ptrdiff_t row_bytes = row_size(d, q8), n_blocks = (cache->n - 1) / size + 1;
    const ptrdiff_t full_step = probe_step(size, task->n_probe), each = (size - 1) / full_step + 1;
    const char *rows = head_rows(cache, kh, q8);
    const float *scale = head_scales(cache, kh, q8), *q = task->q + kh * group * d;
    float *scores = task->scores + kh * group * n_blocks;
    const char *packed = samples ? head_rows(samples, kh, q8) : NULL;
    const float *packed_scale = samples ? head_scales(samples, kh, q8) : NULL;
    const ptrdiff_t full = cache->n / size, sampled = samples ? samples->n / each : 0;
    for (ptrdiff_t b = 0; b < n_blocks; b++) {
        const ptrdiff_t start = b * size, later = start + PROBE_AHEAD * size;
        const char *block = rows + start * row_bytes;
        const float *block_scale = q8 ? scale + start : NULL;
        ptrdiff_t length = cache->n - start < size ? cache->n - start : size;
        ptrdiff_t step = probe_step(length, task->n_probe);
        if (b < full && b < sampled) {
            block = packed + b * each * row_bytes;
            block_scale = q8 ? packed_scale + b * each : NULL;
            length = each, step = 1;
        } else if (b + PROBE_AHEAD < n_blocks - 1) {
            prefetch_samples(rows + later * row_bytes, size, full_step, row_bytes);
        }
        probe_group(q, group, block, block_scale, length, step, d, q8, scores + b, n_blocks);
    }
}

/* The same, with the length of a row known to the compiler where it is a usual one. */
ALWAYS_INLINE void probe_rows_of(const struct probe_task *task, ptrdiff_t kh, int q8)
{
    if (V16_IN_REGISTERS && task->rows->d == 128)
        probe_rows(task, kh, 128, q8);
    else if (V16_IN_REGISTERS && task->rows->d == 64)
        probe_rows(task, kh, 64, q8);
    else
        probe_rows(task, kh, task->rows->d, q8);
}

/* Probe the K rows of one KV head for all query heads that read them. */
static void probe_kv_head(const struct probe_task *task, ptrdiff_t kh)
{
    if (task->rows->k_scale)
        probe_rows_of(task, kh, 1);
    else
        probe_rows_of(task, kh, 0);
}

static void probe_piece(void *context, ptrdiff_t kh, int thread)
{
    (void)thread;
    probe_kv_head(context, kh);
}

/* Multiply-adds of a probe. */
static double probe_work(const struct probe_task *task)
{
    const ptrdiff_t step = probe_step(task->block_size, task->n_probe);
    return (double)task->heads * (double)(task->rows->n / step) * (double)task->rows->d;
}

static void probe_scores(const float *q, ptrdiff_t heads, const struct kv_rows *rows,
                         const struct kv_rows *samples, ptrdiff_t block_size, ptrdiff_t n_probe,
                         float *scores, int threads)
{
    struct probe_task task = {q, heads, rows, samples, block_size, n_probe, scores};
    threads = useful_threads(probe_work(&task), threads);
    parallel_for(rows->num_kv_heads, threads, probe_piece, &task);
}
