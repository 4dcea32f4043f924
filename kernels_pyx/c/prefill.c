/* Prefill attention. Every query row is what the decode kernel two_pass makes of it, bit for bit:
 *
 *     score[t]  = dot(q, k[t]) * (1 / sqrt(d))       16 sums, as in score_tile
 *     e[t]      = v16_exp(score[t] - max of scores)
 *     weight[t] = e[t] / sum of e                    16 sums over t, added by halves
 *     out[j]    = fma(weight[t], v[t][j], out[j])    from 0, t ascending
 *
 * so a prompt may be cut into chunks anywhere, and decode may check what prefill made. */
#include "prefill.h"
#include "prefill_tiles.h"

#include <stdlib.h>

enum {
    PREFILL_BAND = 4 * TILE_ROWS,  /* query rows whose scores are in memory together */
    PREFILL_TOKENS = 128,          /* tokens whose V rows serve a band before the next are read */
};

/* Scratch of one thread: floats, in this order. */
struct prefill_scratch {
    float *keys;     /* packed keys of the KV head */
    float *values;   /* V rows padded to whole vectors, where d is none */
    float *queries;  /* the packed tiles of a band */
    float *scores;   /* [PREFILL_BAND][tokens, rounded up]: scores, then weights */
    float *out;      /* [PREFILL_BAND][padded] */
    float *waiting;  /* for score_tile */
};

struct prefill_work {
    const struct prefill_input *in;
    int keys_apart;  /* whether packed keys and padded values are not in the threads' scratch */
    ptrdiff_t importance_from, padded, tokens, heads_per_piece;
    float *out, *importance, *scratch;
    size_t scratch_size;
    ptrdiff_t *status;  /* one per head */
};

/* Floats of a thread's scratch without keys and values. */
static size_t prefill_scratch_size(ptrdiff_t padded, ptrdiff_t tokens)
{
    return (size_t)(PREFILL_BAND * padded + PREFILL_BAND * tokens + PREFILL_BAND * padded)
           + TILE_SCRATCH;
}

/* Floats of the keys and values in it. */
static size_t prefill_rows_size(const struct prefill_input *in, ptrdiff_t padded, ptrdiff_t tokens)
{
    return (size_t)(tokens * padded + (in->d % 16 ? in->n * padded : 0));
}

static struct prefill_scratch prefill_scratch_of(const struct prefill_work *work, int thread)
{
    const struct prefill_input *in = work->in;
    struct prefill_scratch s;
    s.keys = work->scratch + (size_t)thread * work->scratch_size;
    s.values = s.keys + (work->keys_apart ? 0 : work->tokens * work->padded);
    s.queries = s.values + (in->d % 16 && !work->keys_apart ? in->n * work->padded : 0);
    s.scores = s.queries + PREFILL_BAND * work->padded;
    s.out = s.scores + PREFILL_BAND * work->tokens;
    s.waiting = s.out + PREFILL_BAND * work->padded;
    return s;
}

struct softmax_sum { float largest, total; };  /* of the scores; of their exp(score - largest) */

/* Make the weights of a row from its n > 0 scores, in place; there is room for whole vectors.
 * Returns a token whose score is not finite, or PREFILL_DONE. */
static ptrdiff_t prefill_softmax(float *scores, ptrdiff_t n, struct softmax_sum *sum)
{
    ptrdiff_t end = tile_round_up(n, 16);
    v16 largest = v16_set(scores[0]), total = v16_set(0.0f);
    int bad = 0;
    for (ptrdiff_t t = n; t < end; t++)
        scores[t] = scores[0];  /* changes neither the maximum nor what is finite */
    for (ptrdiff_t t = 0; t < end; t += 16)
        bad |= v16_not_finite(v16_load(scores + t));
    if (bad) {
        ptrdiff_t t = 0;
        while (isfinite(scores[t]))
            t++;
        return t;
    }
    for (ptrdiff_t t = 0; t < end; t += 16)
        largest = v16_max(v16_load(scores + t), largest);
    largest = v16_set(v16_max_lane(largest));
    for (ptrdiff_t t = n; t < end; t++)
        scores[t] = -INFINITY;  /* becomes a weight of 0 */
    for (ptrdiff_t t = 0; t < end; t += 16) {
        v16 e = v16_exp(v16_sub(v16_load(scores + t), largest));
        total = v16_add(total, e);
        v16_store(scores + t, e);
    }
    sum->largest = v16_max_lane(largest);
    sum->total = v16_sum(total);
    total = v16_set(sum->total);
    for (ptrdiff_t t = 0; t < end; t += 16)
        v16_store(scores + t, v16_div(v16_load(scores + t), total));
    return PREFILL_DONE;
}

static void prefill_add_weights(float *importance, const float *weights, ptrdiff_t n)
{
    ptrdiff_t t = 0;
    for (; t + 16 <= n; t += 16)
        v16_store(importance + t, v16_add(v16_load(importance + t), v16_load(weights + t)));
    for (; t < n; t++)
        importance[t] += weights[t];
}

static ptrdiff_t least_visible(const int64_t *visible, ptrdiff_t rows)
{
    int64_t least = visible[0];
    for (ptrdiff_t r = 1; r < rows; r++)
        least = visible[r] < least ? visible[r] : least;
    return (ptrdiff_t)least;
}

static ptrdiff_t most_visible(const int64_t *visible, ptrdiff_t rows)
{
    int64_t most = visible[0];
    for (ptrdiff_t r = 1; r < rows; r++)
        most = visible[r] > most ? visible[r] : most;
    return (ptrdiff_t)most;
}

/* Scores of a band of `rows` queries: those that a row does not read are made too, to fill tiles,
 * and left alone. */
static void band_scores(const struct prefill_work *work, const struct prefill_scratch *s,
                        const int64_t *visible, ptrdiff_t rows)
{
    float scale = 1.0f / sqrtf((float)work->in->d);
    ptrdiff_t end = most_visible(visible, rows);
    for (ptrdiff_t block = 0; block < end; block += TILE_KEYS)
        for (ptrdiff_t row = 0; row < rows; row += TILE_ROWS) {
            ptrdiff_t count = rows - row < TILE_ROWS ? rows - row : TILE_ROWS;
            ptrdiff_t last = most_visible(visible + row, count);
            for (ptrdiff_t t = 0; t < TILE_KEYS && block + t < last; t += TILE_VECTORS * 16)
                score_tile(s->queries + row * work->padded,
                           s->keys + block * work->padded + t, work->padded, scale,
                           s->scores + row * work->tokens + block + t, work->tokens, s->waiting);
        }
}

/* Outputs of a band from its weights. What all rows of a tile read is added for them together, the
 * rest of each row, which lies behind, alone: so every row adds in ascending order. */
static void band_outputs(const struct prefill_work *work, const struct prefill_scratch *s,
                         const float *values, const int64_t *visible, ptrdiff_t rows)
{
    ptrdiff_t padded = work->padded, wide = padded / 16 / TILE_VECTORS * TILE_VECTORS * 16;
    ptrdiff_t end = most_visible(visible, rows);
    memset(s->out, 0, (size_t)(PREFILL_BAND * padded) * sizeof *s->out);
    for (ptrdiff_t block = 0; block < end; block += PREFILL_TOKENS)
        for (ptrdiff_t row = 0; row < rows; row += TILE_ROWS) {
            ptrdiff_t shared = least_visible(visible + row,
                                             rows - row < TILE_ROWS ? rows - row : TILE_ROWS);
            ptrdiff_t count = shared - block < PREFILL_TOKENS ? shared - block : PREFILL_TOKENS;
            const float *weights = s->scores + row * work->tokens + block;
            const float *from = values + block * padded;
            float *to = s->out + row * padded;
            for (ptrdiff_t j = 0; j < wide; j += TILE_VECTORS * 16)
                value_tile(weights, work->tokens, from + j, padded, count, to + j, padded,
                           TILE_VECTORS);
            for (ptrdiff_t j = wide; j < padded; j += 16)
                value_tile(weights, work->tokens, from + j, padded, count, to + j, padded, 1);
        }
    for (ptrdiff_t row = 0; row < rows; row++) {
        ptrdiff_t tile = row / TILE_ROWS * TILE_ROWS;
        ptrdiff_t t = least_visible(visible + tile,
                                    rows - tile < TILE_ROWS ? rows - tile : TILE_ROWS);
        float *to = s->out + row * padded;
        for (; t < visible[row]; t++) {
            v16 w = v16_set(s->scores[row * work->tokens + t]);
            for (ptrdiff_t j = 0; j < padded; j += 16)
                v16_store(to + j, v16_fma(w, v16_load(values + t * padded + j), v16_load(to + j)));
        }
    }
}

/* Pack the tiles of a band of `rows` queries. */
static void prefill_pack_band(const struct prefill_work *work, const struct prefill_scratch *s,
                              const float *q, ptrdiff_t rows)
{
    ptrdiff_t d = work->in->d;
    memset(s->queries, 0, (size_t)(PREFILL_BAND * work->padded) * sizeof *s->queries);
    for (ptrdiff_t r = 0; r < rows; r++)
        tile_pack_query(q + r * d, d, r % TILE_ROWS,
                        s->queries + r / TILE_ROWS * TILE_ROWS * work->padded);
}

/* Rows of V with zeros up to whole vectors. */
static void prefill_pad_values(const float *v, ptrdiff_t n, ptrdiff_t d, float *values)
{
    ptrdiff_t padded = tile_round_up(d, 16);
    for (ptrdiff_t t = 0; t < n; t++)
        for (ptrdiff_t j = 0; j < padded; j++)
            values[t * padded + j] = j < d ? v[t * d + j] : 0.0f;
}

/* 1 if whole vectors of numbers are finite. */
static int prefill_finite(const float *x, ptrdiff_t padded)
{
    int bad = 0;
    for (ptrdiff_t j = 0; j < padded; j += 16)
        bad |= v16_not_finite(v16_load(x + j));
    return !bad;
}

/* One query head, band after band; the keys are packed. */
static ptrdiff_t prefill_head(const struct prefill_work *work, const struct prefill_scratch *s,
                              const float *values, ptrdiff_t head)
{
    const struct prefill_input *in = work->in;
    const float *q = in->q + head * in->rows * in->d;
    float *out = work->out + head * in->rows * in->d;
    for (ptrdiff_t first = 0; first < in->rows; first += PREFILL_BAND) {
        ptrdiff_t rows = in->rows - first < PREFILL_BAND ? in->rows - first : PREFILL_BAND;
        const int64_t *visible = in->visible + first;
        struct softmax_sum sum;
        prefill_pack_band(work, s, q + first * in->d, rows);
        band_scores(work, s, visible, rows);
        for (ptrdiff_t r = 0; r < rows; r++) {
            float *weights = s->scores + r * work->tokens;
            ptrdiff_t n = (ptrdiff_t)visible[r];
            ptrdiff_t bad = n ? prefill_softmax(weights, n, &sum) : PREFILL_DONE;
            if (bad != PREFILL_DONE)
                return bad;
            if (work->importance && first + r >= work->importance_from)
                prefill_add_weights(work->importance + head * in->n, weights, n);
        }
        band_outputs(work, s, values, visible, rows);
        for (ptrdiff_t r = 0; r < rows; r++) {
            if (!prefill_finite(s->out + r * work->padded, work->padded))
                return PREFILL_BAD_OUTPUT;
            memcpy(out + (first + r) * in->d, s->out + r * work->padded,
                   (size_t)in->d * sizeof *out);
        }
    }
    return PREFILL_DONE;
}

/* The query heads of one KV head, or one query head where KV heads are too few for the threads. */
static void prefill_piece(void *context, ptrdiff_t index, int thread)
{
    const struct prefill_work *work = context;
    const struct prefill_input *in = work->in;
    struct prefill_scratch s = prefill_scratch_of(work, thread);
    ptrdiff_t first = index * work->heads_per_piece;
    ptrdiff_t kv_head = first * in->num_kv_heads / in->num_heads;
    const float *values = in->v + kv_head * in->v_head_stride;
    tile_pack_keys(in->k + kv_head * in->k_head_stride, in->n, in->d, s.keys);
    if (in->d % 16) {
        prefill_pad_values(values, in->n, in->d, s.values);
        values = s.values;
    }
    for (ptrdiff_t h = first; h < first + work->heads_per_piece; h++)
        work->status[h] = prefill_head(work, &s, values, h);
}

static double largest_magnitude(const float *x, ptrdiff_t heads, ptrdiff_t head_stride,
                                ptrdiff_t size)
{
    float largest = 0.0f;
    for (ptrdiff_t h = 0; h < heads; h++, x += head_stride) {
        int32_t bits = max_magnitude_bits(x, size);
        float magnitude;
        memcpy(&magnitude, &bits, sizeof magnitude);
        if (!isfinite(magnitude))
            return INFINITY;
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest;
}

/* 1 if neither a score nor a mean of V rows can come near the largest float. */
static int cannot_overflow(const struct prefill_input *in)
{
    double q = largest_magnitude(in->q, 1, 0, in->num_heads * in->rows * in->d);
    double k = largest_magnitude(in->k, in->num_kv_heads, in->k_head_stride, in->n * in->d);
    double v = largest_magnitude(in->v, in->num_kv_heads, in->v_head_stride, in->n * in->d);
    return q * k * (double)in->d < 1e38 && v < 1e38;
}

static ptrdiff_t prefill_run(struct prefill_work *work, ptrdiff_t pieces, int threads)
{
    ptrdiff_t result = PREFILL_DONE;
    parallel_for(pieces, threads, prefill_piece, work);
    for (ptrdiff_t h = work->in->num_heads - 1; h >= 0; h--)
        if (work->status[h] != PREFILL_DONE)
            result = work->status[h];
    return result;
}

static ptrdiff_t prefill_attention(const struct prefill_input *in, ptrdiff_t importance_from,
                                   int threads, float *out, float *importance)
{
    ptrdiff_t padded = tile_round_up(in->d, 16), tokens = tile_round_up(in->n, TILE_KEYS);
    threads = useful_threads(
        2 * (double)in->num_heads * (double)in->rows * (double)in->n * (double)in->d, threads);
    struct prefill_work work = {
        .in = in, .importance_from = importance_from, .padded = padded, .tokens = tokens,
        .out = out, .importance = importance,
        .heads_per_piece = in->num_kv_heads < threads ? 1 : in->num_heads / in->num_kv_heads,
        .scratch_size = prefill_scratch_size(padded, tokens) + prefill_rows_size(in, padded, tokens),
    };
    ptrdiff_t pieces = in->num_heads / work.heads_per_piece, result = PREFILL_NO_MEMORY;
    int used = (int)(pieces < threads ? pieces : threads);
    size_t outputs = (size_t)(in->num_heads * in->rows * in->d);
    size_t sums = importance ? (size_t)(in->num_heads * in->n) : 0;
    float *aside = NULL;  /* where outputs wait until it is known that all of them are finite */
    work.scratch = take_workspace((size_t)used * work.scratch_size * sizeof *work.scratch);
    work.status = malloc((size_t)in->num_heads * sizeof *work.status);
    if (work.scratch && work.status && cannot_overflow(in)) {
        result = prefill_run(&work, pieces, used);
    } else if (work.scratch && work.status
               && (aside = take_workspace((outputs + sums) * sizeof *aside)) != NULL) {
        work.out = aside;
        if (importance) {
            work.importance = aside + outputs;
            memcpy(work.importance, importance, sums * sizeof *aside);
        }
        result = prefill_run(&work, pieces, used);
        if (result == PREFILL_DONE) {
            memcpy(out, aside, outputs * sizeof *aside);
            if (importance)
                memcpy(importance, work.importance, sums * sizeof *aside);
        }
    }
    give_workspace(aside);
    give_workspace(work.scratch);
    free(work.status);
    return result;
}

#include "antidiagonal.c"
#include "block_sums.c"
#include "partial_attention.c"

static const struct prefill_kernels prefill_kernels = {
    .attention = prefill_attention,
    .partial = partial_attention,
    .merge = merge_parts,
    .antidiagonal_scores = antidiagonal_scores,
    .block_sums = block_sums,
};
