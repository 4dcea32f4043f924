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

/* dots[h * PROBE_ROWS + r] = q[h] . row[r] for `heads` queries. */
ALWAYS_INLINE void probe_tile(const float *q, int heads, const char *const row[PROBE_ROWS],
                              ptrdiff_t d, int q8, float *dots)
{
    v16 acc[PROBE_HEADS * PROBE_ROWS];
    for (int i = 0; i < heads * PROBE_ROWS; i++)
        acc[i] = v16_set(0.0f);
    for (ptrdiff_t c = 0; c < d; c += 16) {
        const int whole = c + 16 <= d;
        v16 query[PROBE_HEADS];
        for (int h = 0; h < heads; h++)
            query[h] = whole ? v16_load(q + h * d + c) : v16_load_part(q + h * d + c, d - c);
        for (int r = 0; r < PROBE_ROWS; r++) {
            v16 key = whole ? load_values(row[r], c, q8) : load_last_values(row[r], c, d - c, q8);
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

/* Largest score of the rows 0, step, 2 step, ... below `length`, of `heads` queries. Lane
 * h * PROBE_ROWS + r stands for row r of every tile. x - x is 0 for a number and NaN for what is
 * none; added up, that makes the result NaN if a score is not finite, and turns -0 into 0: which
 * of two equal zeros a maximum returns differs between machines. */
ALWAYS_INLINE void probe_block(const float *q, const char *rows, const float *scale,
                               ptrdiff_t length, ptrdiff_t step, ptrdiff_t d, int q8, int heads,
                               float *best)
{
    const ptrdiff_t row_bytes = row_size(d, q8);
    float score[16] = {0}, factor[16] = {0}, poison[16];
    v16 largest = v16_set(-INFINITY), not_finite = v16_set(0.0f);
    for (ptrdiff_t first = 0; first < length; first += PROBE_ROWS * step) {
        const char *row[PROBE_ROWS];
        ptrdiff_t t = first;
        for (int r = 0; r < PROBE_ROWS; r++) {
            row[r] = rows + t * row_bytes;
            if (q8)
                for (int h = 0; h < heads; h++)
                    factor[h * PROBE_ROWS + r] = scale[t];
            t = t + step < length ? t + step : t;  /* where rows are missing, the last one again */
        }
        probe_tile(q, heads, row, d, q8, score);
        v16 x = v16_load(score);
        if (q8)
            x = v16_mul(x, v16_load(factor));
        largest = v16_max(largest, x);
        not_finite = v16_add(not_finite, v16_sub(x, x));
    }
    v16_store(score, largest);
    v16_store(poison, not_finite);
    for (int h = 0; h < heads; h++) {
        best[h] = score[h * PROBE_ROWS];
        for (int i = h * PROBE_ROWS; i < (h + 1) * PROBE_ROWS; i++)
            best[h] = score[i] > best[h] ? score[i] : best[h];
        for (int i = h * PROBE_ROWS; i < (h + 1) * PROBE_ROWS; i++)
            best[h] += poison[i];
    }
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
    const struct kv_rows *rows;
    ptrdiff_t block_size, n_probe;
    float *scores;
};

ALWAYS_INLINE void probe_rows(const struct probe_task *task, ptrdiff_t kh, ptrdiff_t d, int q8)
{
    const struct kv_rows *cache = task->rows;
    ptrdiff_t group = task->heads / cache->num_kv_heads, size = task->block_size;
    ptrdiff_t row_bytes = row_size(d, q8);
    ptrdiff_t n_blocks = (cache->n - 1) / size + 1;
    const char *rows = (const char *)cache->k + row_size(kh * cache->k_head_stride, q8);
    const float *scale = q8 ? cache->k_scale + kh * cache->k_scale_stride : NULL;
    const float *q = task->q + kh * group * d;
    float *scores = task->scores + kh * group * n_blocks;
    for (ptrdiff_t b = 0; b < n_blocks; b++) {
        ptrdiff_t start = b * size, later = start + PROBE_AHEAD * size;
        ptrdiff_t length = cache->n - start < size ? cache->n - start : size;
        ptrdiff_t step = probe_step(length, task->n_probe);
        const float *block_scale = q8 ? scale + start : NULL;
        if (b + PROBE_AHEAD < n_blocks - 1)
            prefetch_samples(rows + later * row_bytes, size, step, row_bytes);
        ptrdiff_t h = 0;
        float best[PROBE_HEADS];
        for (; h + PROBE_HEADS <= group; h += PROBE_HEADS) {
            probe_block(q + h * d, rows + start * row_bytes, block_scale, length, step, d,
                        q8, PROBE_HEADS, best);
            for (int i = 0; i < PROBE_HEADS; i++)
                scores[(h + i) * n_blocks + b] = best[i];
        }
        for (; h < group; h++)
            probe_block(q + h * d, rows + start * row_bytes, block_scale, length, step, d,
                        q8, 1, &scores[h * n_blocks + b]);
    }
}

/* The same, with the length of a row known to the compiler where it is a usual one. */
ALWAYS_INLINE void probe_rows_of(const struct probe_task *task, ptrdiff_t kh, int q8)
{
    if (task->rows->d == 128)
        probe_rows(task, kh, 128, q8);
    else if (task->rows->d == 64)
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

static void probe_scores(const float *q, ptrdiff_t heads, const struct kv_rows *rows,
                         ptrdiff_t block_size, ptrdiff_t n_probe, float *scores, int threads)
{
    struct probe_task task = {q, heads, rows, block_size, n_probe, scores};
    parallel_for(rows->num_kv_heads, threads, probe_piece, &task);
}
