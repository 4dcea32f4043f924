/* A single pass over the tokens (online softmax) in tiles of 32, with a running maximum, a running
 * sum and a running output, all from nothing. A tile whose maximum is larger than the running one
 * first shrinks sum and output by exp(old - new).
 *
 * Two tiles are read together, their K and then their V. The weights of a tile are a long chain of
 * operations, each waiting for the one before; the chains of the two run side by side. And a tile
 * rarely shrinks anything, so most of the time the outputs stay in registers through both. (Four
 * were no faster: memory has to deliver K and V by turns.) */

enum { TILE_TOKENS = 32, TILES = 2, CHUNK_TOKENS = TILES * TILE_TOKENS };

struct single_pass_state {
    float max, total;
    float shrink[TILES];  /* by what the output is multiplied before each tile of the chunk */
    ptrdiff_t status;
};

/* In floats. 48: three arrays are moved up to a multiple of 64 bytes, by at most 15 floats each. */
static size_t single_pass_scratch(ptrdiff_t queries, ptrdiff_t d)
{
    const size_t each = 2 * ((size_t)d + 15) + CHUNK_TOKENS
        + sizeof(struct single_pass_state) / sizeof(float);
    return each > SIZE_MAX / 2 / (size_t)queries ? SIZE_MAX / 2 : each * (size_t)queries + 48;
}

/* One query, one tile: 32 scores (those behind `count` are never used) become weights. Returns by
 * what the output shrinks. */
static float single_pass_tile(struct single_pass_state *state, float *scores, ptrdiff_t count)
{
    float shrink = 1.0f;
    for (ptrdiff_t t = count; t < TILE_TOKENS; t++)
        scores[t] = scores[0];
    v16 low = v16_load(scores), high = v16_load(scores + 16);
    float max = v16_max_lane(v16_max(low, high));
    if (max > state->max) {
        float old_and_new[16] = {state->max - max};  /* -infinity in the first block: exp is 0 */
        v16_store(old_and_new, v16_exp(v16_load(old_and_new)));
        shrink = old_and_new[0];
        state->total *= shrink;
        state->max = max;
    }
    low = v16_exp(v16_sub(low, v16_set(state->max)));
    high = v16_exp(v16_sub(high, v16_set(state->max)));
    v16_store(scores, low);
    v16_store(scores + 16, high);
    if (count < TILE_TOKENS) {
        memset(scores + count, 0, (size_t)(TILE_TOKENS - count) * sizeof *scores);
        low = v16_load(scores), high = v16_load(scores + 16);
    }
    state->total += v16_sum(v16_add(low, high));
    return shrink;
}

/* The same for up to TILES of them. */
static void single_pass_tiles(struct single_pass_state *state, float *scores, ptrdiff_t count)
{
    for (ptrdiff_t t = 0; t < count; t += TILE_TOKENS)
        state->shrink[t / TILE_TOKENS] = single_pass_tile(
            state, scores + t, count - t < TILE_TOKENS ? count - t : TILE_TOKENS);
}

/* Shrink the outputs of all queries as the tile asks. */
static void shrink_outputs(const struct single_pass_state *states, ptrdiff_t queries,
                           ptrdiff_t tile, float *acc, ptrdiff_t padded)
{
    for (ptrdiff_t j = 0; j < queries; j++) {
        const v16 shrink = v16_set(states[j].shrink[tile]);
        if (states[j].shrink[tile] != 1.0f)
            for (ptrdiff_t c = j * padded; c < (j + 1) * padded; c += 16)
                v16_store(acc + c, v16_mul(v16_load(acc + c), shrink));
    }
}

/* The first token after the tile at `t` before which an output shrinks; `count` if none does. */
static ptrdiff_t next_shrink(const struct single_pass_state *states, ptrdiff_t queries,
                             ptrdiff_t t, ptrdiff_t count)
{
    for (t += TILE_TOKENS; t < count; t += TILE_TOKENS)
        for (ptrdiff_t j = 0; j < queries; j++)
            if (states[j].shrink[t / TILE_TOKENS] != 1.0f)
                return t;
    return count;
}

static void multiply(float *x, const float *y, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        x[i] *= y[i];
}

static ptrdiff_t single_pass_rows(const float *q, ptrdiff_t queries, const struct kv_rows *rows,
                                  ptrdiff_t kv_head, const int32_t *blocks, ptrdiff_t count,
                                  ptrdiff_t block_size, enum attention_kind kind, float *scratch,
                                  float *out)
{
    const ptrdiff_t d = rows->d, padded = padded_to(d, 16);
    const int q8 = rows->k_scale != NULL, q8_query = kind != SINGLE_PASS;
    const ptrdiff_t row_bytes = row_size(d, q8);
    const char *k = (const char *)rows->k + row_size(kv_head * rows->k_head_stride, q8);
    const char *v = (const char *)rows->v + row_size(kv_head * rows->v_head_stride, q8);
    const float *k_scale = q8 ? rows->k_scale + kv_head * rows->k_scale_stride : NULL;
    const float *v_scale = q8 ? rows->v_scale + kv_head * rows->v_scale_stride : NULL;
    const float inv_sqrt_d = 1.0f / sqrtf((float)d);

    float *acc = aligned(scratch), *scores = acc + queries * padded;
    float *padded_q = aligned(scores + queries * CHUNK_TOKENS);
    struct q8_queries int_q = {(int8_t *)padded_q, NULL, NULL,
                               kind == SINGLE_PASS_Q8_ROW ? d : GROUP};
    struct single_pass_state *states =
        (struct single_pass_state *)aligned(padded_q + queries * padded);
    if (q8_query) {
        int_q.scales = padded_q + queries * d / 4;  /* behind queries * d bytes, 4 to a float */
        int_q.offsets = (int32_t *)(int_q.scales + queries * (d / GROUP));
        quantize_queries(q, queries, d, &int_q);
    } else {
        pad_queries(q, queries, d, padded_q);
    }
    memset(acc, 0, (size_t)(queries * padded) * sizeof *acc);
    for (ptrdiff_t j = 0; j < queries; j++)
        states[j] = (struct single_pass_state){.max = -INFINITY, .status = ATTEND_DONE};

    struct reader r = start_reading(rows, blocks, count, block_size);
    while (next_token(&r) >= 0) {
        const struct reader chunk = r;
        ptrdiff_t first, run, have = 0;
        while (have < CHUNK_TOKENS && (run = next_run(&r, CHUNK_TOKENS - have, &first)) > 0) {
            const char *ahead = rows_ahead(&r, k, row_bytes), *keys = k + first * row_bytes;
            if (q8_query)
                q8_dots_of_run(&int_q, queries, (const int8_t *)keys, run, d, ahead,
                               scores + have, CHUNK_TOKENS);
            else
                dots_of_run(padded_q, queries, keys, run, d, q8, ahead, scores + have,
                            CHUNK_TOKENS);
            for (ptrdiff_t j = 0; j < queries; j++)
                scale_scores(scores + j * CHUNK_TOKENS + have, q8 ? k_scale + first : NULL, run,
                             inv_sqrt_d);
            have += run;
        }
        for (ptrdiff_t j = 0; j < queries; j++) {
            float *own = scores + j * CHUNK_TOKENS;
            const ptrdiff_t bad = first_bad_value(own, have);
            if (bad >= 0 && states[j].status == ATTEND_DONE)
                states[j].status = token_at(chunk, bad);
            if (states[j].status == ATTEND_DONE)
                single_pass_tiles(&states[j], own, have);
        }
        struct reader again = chunk;
        for (ptrdiff_t done = 0; done < have;) {
            shrink_outputs(states, queries, done / TILE_TOKENS, acc, padded);
            const ptrdiff_t end = next_shrink(states, queries, done, have);
            for (; done < end; done += run) {
                run = next_run(&again, end - done, &first);
                if (q8)
                    for (ptrdiff_t j = 0; j < queries; j++)
                        multiply(scores + j * CHUNK_TOKENS + done, v_scale + first, run);
                sums_of_run(acc, queries, scores + done, CHUNK_TOKENS, v + first * row_bytes, run,
                            d, q8, rows_ahead(&again, v, row_bytes));
            }
        }
    }

    for (ptrdiff_t j = 0; j < queries; j++) {
        if (states[j].status != ATTEND_DONE)
            return states[j].status;
        const v16 total = v16_set(states[j].total);
        for (ptrdiff_t c = 0; c < padded; c += 16)
            v16_store(acc + j * padded + c, v16_div(v16_load(acc + j * padded + c), total));
        if (write_outputs(acc + j * padded, 1, d, out + j * d))
            return ATTEND_BAD_OUTPUT;
    }
    return ATTEND_DONE;
}
