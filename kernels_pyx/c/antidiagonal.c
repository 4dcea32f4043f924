/* Antidiagonal scores: `stride` queries and keys at a time become one long row each, the queries in
 * reverse order, so that a dot of two long rows is a sum along the antidiagonal of a square of
 * scores. The dot is the one of every kernel, over stride * d products, not scaled. */

struct antidiagonal_work {
    const float *q, *k;
    ptrdiff_t num_heads, num_kv_heads, q_blocks, k_blocks, k_head_stride, d, stride;
    float *out, *scratch;
    size_t scratch_size;
    ptrdiff_t *status;  /* one per KV head */
};

/* Place `row` of a packed tile: `stride` queries, the last one first. */
static void pack_reversed(const float *q, ptrdiff_t d, ptrdiff_t stride, ptrdiff_t row,
                          float *packed)
{
    for (ptrdiff_t i = 0; i < stride; i++)
        for (ptrdiff_t j = 0; j < d; j++)
            packed[(i * d + j) * TILE_ROWS + row] = q[(stride - 1 - i) * d + j];
}

/* All query heads of one KV head: 64 long keys at a time. */
static void antidiagonal_piece(void *context, ptrdiff_t kv_head, int thread)
{
    const struct antidiagonal_work *work = context;
    ptrdiff_t length = work->stride * work->d, padded = tile_round_up(length, 16);
    ptrdiff_t group = work->num_heads / work->num_kv_heads;
    float *keys = work->scratch + (size_t)thread * work->scratch_size;
    float *queries = keys + padded * TILE_KEYS;
    float *scores = queries + padded * TILE_ROWS, *waiting = scores + TILE_ROWS * TILE_KEYS;
    work->status[kv_head] = PREFILL_DONE;
    for (ptrdiff_t n = 0; n < work->k_blocks; n += TILE_KEYS) {
        ptrdiff_t columns = work->k_blocks - n < TILE_KEYS ? work->k_blocks - n : TILE_KEYS;
        tile_pack_keys(work->k + kv_head * work->k_head_stride + n * length, columns, length, keys);
        for (ptrdiff_t row = 0; row < group * work->q_blocks; row += TILE_ROWS) {
            /* The long queries of the group's heads lie one behind the other. */
            ptrdiff_t first = kv_head * group * work->q_blocks + row;
            ptrdiff_t rows = group * work->q_blocks - row;
            rows = rows < TILE_ROWS ? rows : TILE_ROWS;
            memset(queries, 0, (size_t)(padded * TILE_ROWS) * sizeof *queries);
            for (ptrdiff_t r = 0; r < rows; r++)
                pack_reversed(work->q + (first + r) * length, work->d, work->stride, r, queries);
            for (ptrdiff_t t = 0; t < columns; t += TILE_VECTORS * 16)
                score_tile(queries, keys + t, padded, 1.0f, scores + t, TILE_KEYS, waiting);
            for (ptrdiff_t r = 0; r < rows; r++) {
                for (ptrdiff_t t = 0; t < columns; t++)
                    if (!isfinite(scores[r * TILE_KEYS + t]))
                        work->status[kv_head] = PREFILL_BAD_OUTPUT;
                memcpy(work->out + (first + r) * work->k_blocks + n, scores + r * TILE_KEYS,
                       (size_t)columns * sizeof *work->out);
            }
        }
    }
}

static ptrdiff_t antidiagonal_scores(const float *q, ptrdiff_t num_heads, ptrdiff_t q_rows,
                                     const float *k, ptrdiff_t num_kv_heads, ptrdiff_t k_rows,
                                     ptrdiff_t k_head_stride, ptrdiff_t d, ptrdiff_t stride,
                                     int threads, float *out)
{
    size_t padded = (size_t)tile_round_up(stride * d, 16);
    struct antidiagonal_work work = {
        .q = q, .k = k, .num_heads = num_heads, .num_kv_heads = num_kv_heads,
        .q_blocks = q_rows / stride, .k_blocks = k_rows / stride, .k_head_stride = k_head_stride,
        .d = d, .stride = stride,
        .scratch_size = padded * (TILE_KEYS + TILE_ROWS) + TILE_ROWS * TILE_KEYS + TILE_SCRATCH,
    };
    threads = useful_threads(
        (double)num_heads * (double)q_rows * (double)(k_rows / stride) * (double)d, threads);
    int used = (int)(num_kv_heads < threads ? num_kv_heads : threads);
    size_t size = (size_t)(num_heads * work.q_blocks * work.k_blocks) * sizeof *out;
    ptrdiff_t result = PREFILL_DONE;
    work.out = malloc(size);  /* `out` is written only when all scores are known to be finite */
    work.scratch = malloc((size_t)used * work.scratch_size * sizeof *work.scratch);
    work.status = malloc((size_t)num_kv_heads * sizeof *work.status);
    if (!work.scratch || !work.status || !work.out) {
        result = PREFILL_NO_MEMORY;
    } else {
        parallel_for(num_kv_heads, used, antidiagonal_piece, &work);
        for (ptrdiff_t kv_head = 0; kv_head < num_kv_heads; kv_head++)
            if (work.status[kv_head] != PREFILL_DONE)
                result = work.status[kv_head];
        if (result == PREFILL_DONE)
            memcpy(out, work.out, size);
    }
    free(work.out);
    free(work.scratch);
    free(work.status);
    return result;
}
