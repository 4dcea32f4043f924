/* Two passes: all scores, their softmax, then V. The kernel of every exact and sparse arm.
 *
 * K is read to its end before V begins, each strictly in order. In scratch: the queries, padded
 * with zeros to whole v16, the outputs likewise, and the scores, which become the weights. */

static ptrdiff_t padded_to(ptrdiff_t count, ptrdiff_t multiple)
{
    return (count + multiple - 1) / multiple * multiple;
}

/* Cache lines begin at multiples of 64 bytes; a v16 that lies in one is loaded faster. */
static float *aligned(float *scratch)
{
    return (float *)(((uintptr_t)scratch + 63) & ~(uintptr_t)63);
}

static size_t attend_rows_scratch(ptrdiff_t queries, ptrdiff_t tokens, ptrdiff_t d)
{
    const size_t values = 2 * ((size_t)d + 15) + (size_t)tokens + 31, most = SIZE_MAX / 2;
    return values > most / (size_t)queries ? most : values * (size_t)queries + 16;
}

/* The queries, each with zeros up to a whole v16. */
static void pad_queries(const float *q, ptrdiff_t queries, ptrdiff_t d, float *padded)
{
    const ptrdiff_t size = padded_to(d, 16);
    for (ptrdiff_t j = 0; j < queries; j++) {
        memcpy(padded + j * size, q + j * d, (size_t)d * sizeof *q);
        memset(padded + j * size + d, 0, (size_t)(size - d) * sizeof *q);
    }
}

/* The first position whose score is not finite, or -1. */
static ptrdiff_t first_bad_value(const float *x, ptrdiff_t count)
{
    for (ptrdiff_t t = 0; t < count; t += 16) {
        const ptrdiff_t part = count - t < 16 ? count - t : 16;
        if (v16_not_finite(part == 16 ? v16_load(x + t) : v16_load_part(x + t, part)))
            for (ptrdiff_t i = 0; i < part; i++)
                if (v16_not_finite(v16_set(x[t + i])))
                    return t + i;
    }
    return -1;
}

/* Scores, all finite, become exp(score - max); returns their sum. `scores` has room for whole
 * v16. */
static float exp_scores(float *scores, ptrdiff_t count)
{
    for (ptrdiff_t t = count; t % 16; t++)
        scores[t] = scores[0];
    v16 largest = v16_load(scores);
    for (ptrdiff_t t = 16; t < count; t += 16)
        largest = v16_max(largest, v16_load(scores + t));
    const v16 max = v16_set(v16_max_lane(largest));
    v16 sum = v16_set(0.0f);
    for (ptrdiff_t t = 0; t < count; t += 16) {
        v16 e = v16_exp(v16_sub(v16_load(scores + t), max));
        v16_store(scores + t, e);
        sum = v16_add(sum, count - t < 16 ? v16_load_part(scores + t, count - t) : e);
    }
    return v16_sum(sum);
}

/* weights = e / sum (* v_scale), 16 at a time. */
static void divide_weights(float *e, float sum, const float *v_scale, ptrdiff_t count)
{
    const v16 divisor = v16_set(sum);
    for (ptrdiff_t t = 0; t < count; t += 16) {
        const ptrdiff_t part = count - t < 16 ? count - t : 16;
        v16 w = v16_div(part == 16 ? v16_load(e + t) : v16_load_part(e + t, part), divisor);
        if (v_scale)
            w = v16_mul(w, part == 16 ? v16_load(v_scale + t) : v16_load_part(v_scale + t, part));
        if (part == 16)
            v16_store(e + t, w);
        else
            v16_store_part(e + t, w, part);
    }
}

/* Copy the outputs of all queries; returns whether one is not finite. */
static int write_outputs(const float *acc, ptrdiff_t queries, ptrdiff_t d, float *out)
{
    int bad = 0;
    for (ptrdiff_t j = 0; j < queries; j++) {
        memcpy(out + j * d, acc + j * padded_to(d, 16), (size_t)d * sizeof *out);
        bad |= first_bad_value(out + j * d, d) >= 0;
    }
    return bad;
}

/* Where the rows of the next block of a list begin; NULL where there is none to ask for. */
static const char *rows_ahead(const struct reader *r, const char *rows, ptrdiff_t row_bytes)
{
    const ptrdiff_t token = r->blocks ? next_token(r) : -1;
    return token < 0 ? NULL : rows + token * row_bytes;
}

/* Blocks of a list are asked for this many runs before they are used: as long as memory takes. */
enum { RUNS_AHEAD = 2 };

/* What of K or of V a list of blocks reads: rows, and for int8 the scale of each. */
struct side {
    const char *rows;
    const float *scale;
    ptrdiff_t row_bytes;
};

static struct side k_side(const struct kv_rows *rows, ptrdiff_t kv_head)
{
    const int q8 = rows->k_scale != NULL;
    return (struct side){
        (const char *)rows->k + row_size(kv_head * rows->k_head_stride, q8),
        q8 ? rows->k_scale + kv_head * rows->k_scale_stride : NULL, row_size(rows->d, q8),
    };
}

static struct side v_side(const struct kv_rows *rows, ptrdiff_t kv_head)
{
    const int q8 = rows->v_scale != NULL;
    return (struct side){
        (const char *)rows->v + row_size(kv_head * rows->v_head_stride, q8),
        q8 ? rows->v_scale + kv_head * rows->v_scale_stride : NULL, row_size(rows->d, q8),
    };
}

/* Ask for the scales of the next run of `r`, and return where its rows begin, which are asked for
 * while others are computed with; NULL if there is none. */
static const char *next_ahead(struct reader *r, const struct side *side)
{
    ptrdiff_t first, run = next_run(r, RUN_TOKENS, &first);
    if (run == 0)
        return NULL;
    if (side->scale)
        prefetch((const char *)(side->scale + first), run * (ptrdiff_t)sizeof(float));
    return side->rows + first * side->row_bytes;
}

/* Ask for the first blocks of K that attend_rows will read. */
static void fetch_first_blocks(const struct kv_rows *rows, ptrdiff_t kv_head,
                               const int32_t *blocks, ptrdiff_t count, ptrdiff_t block_size)
{
    struct reader r = start_reading(rows, blocks, count, block_size);
    const struct side side = k_side(rows, kv_head);
    for (int i = 0; i < RUNS_AHEAD; i++) {
        struct reader same = r;
        ptrdiff_t first, run = next_run(&same, RUN_TOKENS, &first);
        const char *start = next_ahead(&r, &side);
        if (start)
            prefetch(start, run * side.row_bytes);
    }
}

static ptrdiff_t attend_rows(const float *q, ptrdiff_t queries, const struct kv_rows *rows,
                             ptrdiff_t kv_head, const int32_t *blocks, ptrdiff_t count,
                             ptrdiff_t block_size, float *scratch, float *out)
{
    const ptrdiff_t d = rows->d, padded = padded_to(d, 16);
    const int q8 = rows->k_scale != NULL;
    const struct side k = k_side(rows, kv_head), v = v_side(rows, kv_head);
    const float inv_sqrt_d = 1.0f / sqrtf((float)d);
    const struct reader start = start_reading(rows, blocks, count, block_size);

    ptrdiff_t tokens = 0, first, run;
    for (struct reader r = start; (run = next_run(&r, PTRDIFF_MAX, &first)) > 0;)
        tokens += run;
    const ptrdiff_t stride = padded_to(tokens, 16);
    float *padded_q = aligned(scratch), *acc = padded_q + queries * padded;
    float *scores = acc + queries * padded;
    pad_queries(q, queries, d, padded_q);

    /* `later` runs ahead of the reading: to the end of K, and then over the first of V. */
    struct reader later = start, later_v = start;
    for (int i = 0; i < RUNS_AHEAD; i++)
        next_run(&later, RUN_TOKENS, &first);
    ptrdiff_t position = 0;
    for (struct reader r = start; (run = next_run(&r, RUN_TOKENS, &first)) > 0; position += run) {
        const char *ahead = NULL;
        if (blocks) {
            ahead = next_ahead(&later, &k);
            if (!ahead)
                ahead = next_ahead(&later_v, &v);
        }
        dots_of_run(padded_q, queries, k.rows + first * k.row_bytes, run, d, q8, ahead,
                    scores + position, stride);
        for (ptrdiff_t j = 0; j < queries; j++)
            scale_scores(scores + j * stride + position, q8 ? k.scale + first : NULL, run,
                         inv_sqrt_d);
    }

    ptrdiff_t status = ATTEND_DONE;
    float *sums = scores + queries * stride;
    for (ptrdiff_t j = 0; j < queries; j++) {
        ptrdiff_t bad = first_bad_value(scores + j * stride, tokens);
        if (bad >= 0) {  /* the queries before it may still have an error of their own */
            status = token_at(start, bad);
            queries = j;
            break;
        }
        sums[j] = exp_scores(scores + j * stride, tokens);
    }

    memset(acc, 0, (size_t)(queries * padded) * sizeof *acc);
    position = 0;
    for (struct reader r = start; (run = next_run(&r, RUN_TOKENS, &first)) > 0; position += run) {
        for (ptrdiff_t j = 0; j < queries; j++)
            divide_weights(scores + j * stride + position, sums[j], q8 ? v.scale + first : NULL,
                           run);
        sums_of_run(acc, queries, scores + position, stride, v.rows + first * v.row_bytes, run, d,
                    q8, blocks ? next_ahead(&later_v, &v) : NULL);
    }
    return write_outputs(acc, queries, d, out) ? ATTEND_BAD_OUTPUT : status;
}
