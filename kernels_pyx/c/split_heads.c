/* The rows of a projection, which hold a token's heads one after the other, become the rows of
 * attention: head-major, query and key heads normed (rms_norm) and turned (rope), with the bits of
 * these two. */

enum { SPLIT_PIECES = 32 };

struct split_work {
    const struct heads_to_split *in;
    ptrdiff_t band;                /* tokens of a piece */
    ptrdiff_t bad[SPLIT_PIECES];   /* the first token of each that went wrong, or -1 */
};

/* One head of one token. Returns 1 if a number is not finite; `out` holds some numbers then. */
static int split_row(const struct heads_to_split *in, const float *gain, ptrdiff_t t,
                     const float *x, float *out)
{
    const float *cos = in->cos + t * (in->d / 2), *sin = in->sin + t * (in->d / 2);
    ptrdiff_t pairs = in->d / 2;
    int bad = 0;
    if (gain) {
        float mean = mean_square(x, in->d) + in->eps;
        if (!isfinite(mean) || mean == 0.0f)
            return 1;
        normed_row(x, gain, in->d, sqrtf(mean), out);
        x = out;
    }
    for (ptrdiff_t i = 0; i < pairs; i += 16)
        bad |= rope_pairs(x + i, cos + i, sin + i, pairs, pairs - i < 16 ? pairs - i : 16, out + i);
    return bad;
}

static int split_token(const struct heads_to_split *in, ptrdiff_t t)
{
    const float *x = in->stacked + t * (in->heads + 2 * in->kv_heads) * in->d;
    int bad = 0;
    for (ptrdiff_t h = 0; h < in->heads; h++, x += in->d)
        bad |= split_row(in, in->q_gain, t, x, in->q + h * in->q_head_stride + t * in->d);
    for (ptrdiff_t h = 0; h < in->kv_heads; h++, x += in->d)
        bad |= split_row(in, in->k_gain, t, x, in->k + h * in->k_head_stride + t * in->d);
    for (ptrdiff_t h = 0; h < in->kv_heads; h++, x += in->d)
        memcpy(in->v + h * in->v_head_stride + t * in->d, x, (size_t)in->d * sizeof *x);
    return bad;
}

static void split_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    struct split_work *work = context;
    ptrdiff_t t = index * work->band, end = t + work->band;
    end = end < work->in->tokens ? end : work->in->tokens;
    work->bad[index] = -1;
    for (; t < end && work->bad[index] < 0; t++)
        if (split_token(work->in, t))
            work->bad[index] = t;
}

static ptrdiff_t split_heads(const struct heads_to_split *in, int threads)
{
    struct split_work work = {.in = in, .band = (in->tokens + SPLIT_PIECES - 1) / SPLIT_PIECES};
    ptrdiff_t pieces = work.band ? (in->tokens + work.band - 1) / work.band : 0;
    double numbers = (double)in->tokens * (double)(in->heads + in->kv_heads) * (double)in->d;
    /* A number takes some 8 multiply-adds: a division, and a square, 4 products and 2 sums. */
    parallel_for(pieces, useful_threads(8 * numbers, threads), split_piece, &work);
    for (ptrdiff_t i = 0; i < pieces; i++)
        if (work.bad[i] >= 0)
            return work.bad[i];
    return -1;
}
