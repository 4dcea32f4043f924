/* Antidiagonal scores: `stride` queries and keys at a time become one long row each, the queries in
 * reverse order, so that a dot of two long rows is a sum along the antidiagonal of a square of
 * scores. The dot is the one of every kernel, over stride * d products, not scaled. */

struct antidiagonal_work {
    const float *q, *k;
    ptrdiff_t num_kv_heads, q_blocks, k_blocks, d, stride;  /* q_blocks: a group's */
    ptrdiff_t q_head_stride, k_head_stride, head_blocks;    /* long queries of a query head */
    ptrdiff_t length, padded, tiles, pieces;  /* of a long row; tiles and pieces: a KV head's */
    float *queries;  /* [num_kv_heads][tiles][padded][TILE_ROWS], packed once for all keys */
    float *out, *scratch;
    size_t scratch_size;
    unsigned char *bad;  /* [num_kv_heads][pieces]: whether a score is not finite */
};

/* One tile of long queries: `stride` queries each, the last one first. */
static void antidiagonal_pack(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct antidiagonal_work *work = context;
    ptrdiff_t first = index % work->tiles * TILE_ROWS, d = work->d, stride = work->stride;
    ptrdiff_t rows = work->q_blocks - first < TILE_ROWS ? work->q_blocks - first : TILE_ROWS;
    const float *q[TILE_ROWS];
    float *packed = work->queries + index * work->padded * TILE_ROWS;
    first += index / work->tiles * work->q_blocks;
    for (ptrdiff_t r = 0; r < rows; r++)  /* of one head after the other */
        q[r] = work->q + (first + r) / work->head_blocks * work->q_head_stride
               + (first + r) % work->head_blocks * work->length;
    if (rows < TILE_ROWS || work->length < work->padded)
        memset(packed, 0, (size_t)(work->padded * TILE_ROWS) * sizeof *packed);
    for (ptrdiff_t i = 0; i < stride; i++)
        for (ptrdiff_t j = 0; j < d; j++)
            for (ptrdiff_t r = 0; r < rows; r++)
                packed[(i * d + j) * TILE_ROWS + r] = q[r][(stride - 1 - i) * d + j];
}

/* The scores of 64 long keys with all long queries of their KV head. */
static void antidiagonal_piece(void *context, ptrdiff_t index, int thread)
{
    const struct antidiagonal_work *work = context;
    ptrdiff_t kv_head = index / work->pieces, n = index % work->pieces * TILE_KEYS;
    ptrdiff_t columns = work->k_blocks - n < TILE_KEYS ? work->k_blocks - n : TILE_KEYS;
    float *keys = work->scratch + (size_t)thread * work->scratch_size;
    float *scores = keys + work->padded * TILE_KEYS, *waiting = scores + TILE_ROWS * TILE_KEYS;
    int bad = 0;
    tile_pack_keys(work->k + kv_head * work->k_head_stride + n * work->length, columns,
                   work->length, keys);
    for (ptrdiff_t tile = 0; tile < work->tiles; tile++) {
        ptrdiff_t first = kv_head * work->q_blocks + tile * TILE_ROWS;
        ptrdiff_t rows = work->q_blocks - tile * TILE_ROWS;
        const float *queries = work->queries
                               + (kv_head * work->tiles + tile) * work->padded * TILE_ROWS;
        rows = rows < TILE_ROWS ? rows : TILE_ROWS;
        for (ptrdiff_t t = 0; t < columns; t += TILE_VECTORS * 16)
            score_tile(queries, keys + t, work->padded, 1.0f, scores + t, TILE_KEYS, waiting);
        for (ptrdiff_t r = 0; r < rows; r++) {
            for (ptrdiff_t t = 0; t < columns; t += 16)  /* zeros behind the last key */
                bad |= v16_not_finite(v16_load(scores + r * TILE_KEYS + t));
            memcpy(work->out + (first + r) * work->k_blocks + n, scores + r * TILE_KEYS,
                   (size_t)columns * sizeof *work->out);
        }
    }
    work->bad[index] = (unsigned char)bad;
}

static ptrdiff_t antidiagonal_scores(const float *q, ptrdiff_t num_heads, ptrdiff_t q_rows,
                                     ptrdiff_t q_head_stride, const float *k,
                                     ptrdiff_t num_kv_heads, ptrdiff_t k_rows,
                                     ptrdiff_t k_head_stride, ptrdiff_t d, ptrdiff_t stride,
                                     int threads, float *out)
{
    struct antidiagonal_work work = {
        .q = q, .k = k, .num_kv_heads = num_kv_heads, .k_blocks = k_rows / stride,
        .head_blocks = q_rows / stride, .q_blocks = num_heads / num_kv_heads * (q_rows / stride),
        .q_head_stride = q_head_stride, .k_head_stride = k_head_stride, .d = d, .stride = stride, .length = stride * d, .padded = tile_round_up(stride * d, 16),
    };
    work.tiles = (work.q_blocks + TILE_ROWS - 1) / TILE_ROWS;
    work.pieces = (work.k_blocks + TILE_KEYS - 1) / TILE_KEYS;
    work.scratch_size = (size_t)work.padded * TILE_KEYS + TILE_ROWS * TILE_KEYS + TILE_SCRATCH;
    const struct stage stages[] = {{num_kv_heads * work.tiles, antidiagonal_pack},
                                   {num_kv_heads * work.pieces, antidiagonal_piece}};
    ptrdiff_t result = PREFILL_DONE;
    size_t packed = (size_t)(stages[0].count * work.padded * TILE_ROWS);
    size_t size = (size_t)(num_kv_heads * work.q_blocks * work.k_blocks) * sizeof *out;
    threads = useful_threads(
        (double)num_heads * (double)q_rows * (double)work.k_blocks * (double)d, threads);
    /* `out` is written only when all scores are known to be finite. */
    work.out = take_workspace(size);
    work.queries = take_workspace(packed * sizeof *work.queries);
    work.scratch = take_workspace((size_t)threads * work.scratch_size * sizeof *work.scratch);
    work.bad = malloc((size_t)stages[1].count);
    if (!work.out || !work.queries || !work.scratch || !work.bad) {
        result = PREFILL_NO_MEMORY;
    } else {
        parallel_stages(stages, 2, threads, &work);
        for (ptrdiff_t i = 0; i < stages[1].count; i++)
            if (work.bad[i])
                result = PREFILL_BAD_OUTPUT;
        if (result == PREFILL_DONE)
            memcpy(out, work.out, size);
    }
    give_workspace(work.out);
    give_workspace(work.queries);
    give_workspace(work.scratch);
    free(work.bad);
    return result;
}
