/* Attention of one query per head: see attention.h.
 *
 * What is computed, to the bit, for one query over the tokens t = 0 .. m - 1 in the order they are
 * read (portable variant: the definition; the others give the same bits):
 *
 *     dot(q, k)   one v16 accumulator from 0, 16 values a step, fma(q, k, acc); then v16_sum
 *                 single_pass_q8: q as int8; one chain over groups g of 32 values from 0,
 *                 fma(q_scale[g], sum of g, s), where the sum of g is a whole number and exact
 *                 single_pass_q8_row: the same with all d values as the only group
 *     score[t]    dot * k_scale[t] (int8 rows) * 1/sqrt(d)
 *     two pass    e[t] = exp(score[t] - max); S: a v16 sum of e, 16 tokens a step; w[t] = e[t] / S,
 *                 * v_scale[t] for int8 rows; out[c]: chain over t of fma(w[t], v[t][c], out[c])
 *     single pass blocks of 32 tokens, w[t] = exp(score[t] - largest so far): see single_pass_tile;
 *                 out by the same chain over w[t] * v_scale[t], all blocks; at the end out[c] / S
 *
 * exp is v16_exp. What is not finite is found before anything is compared. */
#include "attention.h"

#include <stdlib.h>

/* The operations: one per entry of attention_kernels. */
enum attention_kind { TWO_PASS, SINGLE_PASS, SINGLE_PASS_Q8, SINGLE_PASS_Q8_ROW };

#include "attention_rows.c"
#include "attention_q8.c"
#include "attention_two_pass.c"
#include "attention_single_pass.c"

/* One call: all heads of a layer. A piece is a KV head; the query heads of its group share a list
 * and are served together, or have a list each and come one after the other. */
struct attention_job {
    const float *q;
    ptrdiff_t group, lists_per_group;
    const struct kv_rows *rows;
    const struct block_lists *blocks;
    enum attention_kind kind;
    float *scratch;
    size_t scratch_each;
    float *out;
    ptrdiff_t *status;  /* one per list */
};

static void attend_kv_head(void *context, ptrdiff_t kv_head, int thread)
{
    const struct attention_job *job = context;
    const ptrdiff_t d = job->rows->d, queries = job->group / job->lists_per_group;
    float *scratch = job->scratch + job->scratch_each * (size_t)thread;
    for (ptrdiff_t i = 0; i < job->lists_per_group; i++) {
        const ptrdiff_t list = kv_head * job->lists_per_group + i, head = list * queries;
        const struct block_lists *b = job->blocks;
        const int32_t *ids = b->ids ? b->ids + list * b->count : NULL;
        const float *q = job->q + head * d;
        float *out = job->out + head * d;
        if (job->kind == TWO_PASS)
            job->status[list] = attend_rows(q, queries, job->rows, kv_head, ids, b->count,
                                            b->block_size, scratch, out);
        else
            job->status[list] = single_pass_rows(q, queries, job->rows, kv_head, ids, b->count,
                                                 b->block_size, job->kind, scratch, out);
    }
}

/* Tokens of the longest list. */
static ptrdiff_t tokens_read(const struct kv_rows *rows, const struct block_lists *blocks)
{
    if (blocks->ids == NULL || blocks->count > rows->n / blocks->block_size)
        return rows->n;
    return blocks->count * blocks->block_size;
}

static ptrdiff_t attend_heads(enum attention_kind kind, const float *q, ptrdiff_t num_heads,
                              const struct kv_rows *rows, const struct block_lists *blocks,
                              int threads, float *out)
{
    const ptrdiff_t group = num_heads / rows->num_kv_heads;
    const ptrdiff_t lists = blocks->ids ? blocks->lists : rows->num_kv_heads;
    const ptrdiff_t queries = num_heads / lists;
    const double values = (double)tokens_read(rows, blocks) * (double)rows->d;
    threads = useful_threads(2 * (double)num_heads * values, threads);
    if (threads > rows->num_kv_heads)
        threads = (int)rows->num_kv_heads;
    size_t each = kind == TWO_PASS
        ? attend_rows_scratch(queries, tokens_read(rows, blocks), rows->d)
        : single_pass_scratch(queries, rows->d);
    float *scratch = each > SIZE_MAX / sizeof *scratch / (size_t)threads
        ? NULL : take_workspace(each * sizeof *scratch * (size_t)threads);
    ptrdiff_t *status = malloc((size_t)lists * sizeof *status), found = ATTEND_NO_MEMORY;
    if (scratch && status) {
        struct attention_job job = {q, group, lists / rows->num_kv_heads, rows, blocks, kind,
                                    scratch, each, out, status};
        parallel_for(rows->num_kv_heads, threads, attend_kv_head, &job);
        found = ATTEND_DONE;
        for (ptrdiff_t i = 0; i < lists && found == ATTEND_DONE; i++)
            found = status[i];
    }
    give_workspace(scratch);
    free(status);
    return found;
}

static ptrdiff_t two_pass(const float *q, ptrdiff_t num_heads, const struct kv_rows *rows,
                          const struct block_lists *blocks, int threads, float *out)
{
    return attend_heads(TWO_PASS, q, num_heads, rows, blocks, threads, out);
}

static ptrdiff_t single_pass(const float *q, ptrdiff_t num_heads, const struct kv_rows *rows,
                             const struct block_lists *blocks, int threads, float *out)
{
    return attend_heads(SINGLE_PASS, q, num_heads, rows, blocks, threads, out);
}

static ptrdiff_t single_pass_q8(const float *q, ptrdiff_t num_heads, const struct kv_rows *rows,
                                const struct block_lists *blocks, int threads, float *out)
{
    return attend_heads(SINGLE_PASS_Q8, q, num_heads, rows, blocks, threads, out);
}

static ptrdiff_t single_pass_q8_row(const float *q, ptrdiff_t num_heads,
                                    const struct kv_rows *rows, const struct block_lists *blocks,
                                    int threads, float *out)
{
    return attend_heads(SINGLE_PASS_Q8_ROW, q, num_heads, rows, blocks, threads, out);
}

static void exp_each(const float *x, ptrdiff_t count, float *out)
{
    for (ptrdiff_t i = 0; i < count; i += 16) {
        ptrdiff_t part = count - i < 16 ? count - i : 16;
        v16_store_part(out + i, v16_exp(v16_load_part(x + i, part)), part);
    }
}

static const struct attention_kernels attention_kernels = {
    .two_pass = two_pass,
    .single_pass = single_pass,
    .single_pass_q8 = single_pass_q8,
    .single_pass_q8_row = single_pass_q8_row,
    .exp = exp_each,
};
