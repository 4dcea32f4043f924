/* The mass of blocks from antidiagonal scores. Of a row that sees the first n columns
 *
 *     e[t]    = v16_exp((score[t] - max of scores) * rate)
 *     tile[c] = sum of e over the `size` columns of block c, ascending from 0
 *     total   = sum of all tiles, in double, ascending
 *
 * and a block's mass is the sum over its `size` rows, in double, ascending, of tile / total. */

struct block_sums_work {
    const struct block_sums_input *in;
    ptrdiff_t q_blocks, k_blocks;
    float *out;
    double *scratch;  /* a thread's: [k_blocks] masses; then floats: [k_blocks] tiles, a row of e */
    size_t scratch_size;
    unsigned char *bad;  /* [heads][q_blocks]: whether a score is not finite */
};

/* The tiles of the blocks that a row of n scores sees, at least one; returns their total. */
static double block_sums_row(const float *scores, ptrdiff_t n, ptrdiff_t size, float rate, float *e,
                             float *tiles)
{
    ptrdiff_t end = tile_round_up(n, 16), blocks = (n + size - 1) / size;
    v16 largest = v16_set(scores[0]), times = v16_set(rate);
    double total = 0.0;
    memcpy(e, scores, (size_t)n * sizeof *e);
    for (ptrdiff_t t = n; t < end; t++)
        e[t] = -INFINITY;
    for (ptrdiff_t t = 0; t < end; t += 16)
        largest = v16_max(v16_load(e + t), largest);
    largest = v16_set(v16_max_lane(largest));
    for (ptrdiff_t t = 0; t < end; t += 16)
        v16_store(e + t, v16_exp(v16_mul(v16_sub(v16_load(e + t), largest), times)));
    for (ptrdiff_t c = 0; c < blocks; c++) {
        ptrdiff_t last = c * size + size < n ? c * size + size : n;
        float tile = 0.0f;
        for (ptrdiff_t t = c * size; t < last; t++)
            tile += e[t];
        tiles[c] = tile;
        total += (double)tile;
    }
    return total;
}

/* One block of rows of one head. */
static void block_sums_piece(void *context, ptrdiff_t index, int thread)
{
    const struct block_sums_work *work = context;
    const struct block_sums_input *in = work->in;
    ptrdiff_t head = index / work->q_blocks, first = index % work->q_blocks * in->size;
    ptrdiff_t end = first + in->size < in->rows ? first + in->size : in->rows;
    double *mass = work->scratch + (size_t)thread * work->scratch_size;
    float *tiles = (float *)(mass + work->k_blocks), *e = tiles + work->k_blocks;
    float *out = work->out + index * work->k_blocks;
    memset(mass, 0, (size_t)work->k_blocks * sizeof *mass);
    work->bad[index] = 0;
    for (ptrdiff_t row = first; row < end; row++) {
        const float *scores = in->scores + (head * in->rows + row) * in->columns;
        ptrdiff_t n = in->seen;
        if (first_bad_value(scores, in->columns) >= 0)
            work->bad[index] = 1;
        if (work->bad[index] || row < in->first_row || row >= in->last_row)
            continue;
        if (in->causal_from >= 0 && row + in->causal_from + 1 < n)
            n = row + in->causal_from + 1;
        double total = block_sums_row(scores, n, in->size, in->rate, e, tiles);
        ptrdiff_t blocks = (n + in->size - 1) / in->size;
        for (ptrdiff_t c = 0; c < blocks; c++)
            mass[c] += (double)tiles[c] / total;
    }
    for (ptrdiff_t c = 0; c < work->k_blocks; c++)
        out[c] = (float)mass[c];
}

static ptrdiff_t block_sums(const struct block_sums_input *in, int threads, float *out)
{
    ptrdiff_t q_blocks = (in->rows + in->size - 1) / in->size;
    ptrdiff_t k_blocks = (in->columns + in->size - 1) / in->size, result = PREFILL_DONE;
    ptrdiff_t pieces = in->heads * q_blocks, width = tile_round_up(in->columns, 16);
    struct block_sums_work work = {
        .in = in, .q_blocks = q_blocks, .k_blocks = k_blocks,
        .scratch_size = (size_t)(k_blocks + (k_blocks + width + 1) / 2),
    };
    size_t size = (size_t)(pieces * k_blocks) * sizeof *out;
    /* A score takes some 32 multiply-adds. */
    threads = useful_threads(32 * (double)(in->heads * in->rows) * (double)in->columns, threads);
    /* `out` is written only when all scores are known to be finite. */
    work.out = take_workspace(size);
    work.scratch = take_workspace((size_t)threads * work.scratch_size * sizeof *work.scratch);
    work.bad = malloc((size_t)pieces);
    if (!work.out || !work.scratch || !work.bad) {
        result = PREFILL_NO_MEMORY;
    } else {
        parallel_for(pieces, threads, block_sums_piece, &work);
        for (ptrdiff_t i = 0; i < pieces; i++)
            if (work.bad[i])
                result = PREFILL_BAD_OUTPUT;
        if (result == PREFILL_DONE)
            memcpy(out, work.out, size);
    }
    give_workspace(work.out);
    give_workspace(work.scratch);
    free(work.bad);
    return result;
}
