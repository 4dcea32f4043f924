#include "decoder.h"

#include <stdlib.h>
#include <time.h>

static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* What one layer computes for the next kernel of the token. */
struct decoder_scratch {
    float *q, *k, *v, *context;  /* [heads][d], [kv_heads][d] twice, [heads][d] */
    float *scale;                /* [kv_heads] */
    int8_t *int8;                /* [kv_heads][d] */
};

/* One side of the new token into the last row of each head. 0 if a number is not finite. */
static int store_side(const struct decoder_token *token, const struct kv_rows *rows,
                      const float *values, void *side, ptrdiff_t head_stride, float *scales,
                      ptrdiff_t scale_stride, const struct decoder_scratch *scratch)
{
    const ptrdiff_t heads = rows->num_kv_heads, d = rows->d, last = rows->n - 1;
    if (first_bad_row(values, heads, d) >= 0)
        return 0;
    if (scales)
        quantize_rows(values, heads, d, token->rule, scratch->int8, scratch->scale);
    for (ptrdiff_t h = 0; h < heads; h++) {
        const ptrdiff_t at = h * head_stride + last * d;
        if (scales) {
            memcpy((int8_t *)side + at, scratch->int8 + h * d, (size_t)d);
            scales[h * scale_stride + last] = scratch->scale[h];
        } else {
            memcpy((float *)side + at, values + h * d, (size_t)d * sizeof(float));
        }
    }
    return 1;
}

/* The rows of a struct kv_rows are constant to those who attend to them; the cache is not. */
static int store_token(const struct decoder_token *token, const struct kv_rows *rows,
                       const struct decoder_scratch *scratch)
{
    return store_side(token, rows, scratch->k, (void *)rows->k, rows->k_head_stride,
                      (float *)rows->k_scale, rows->k_scale_stride, scratch)
        && store_side(token, rows, scratch->v, (void *)rows->v, rows->v_head_stride,
                      (float *)rows->v_scale, rows->v_scale_stride, scratch);
}

static enum decoder_status decoder_attend(const struct decoder_token *token,
                                          const struct decoder_layer *layer,
                                          const struct decoder_scratch *scratch, int threads)
{
    if (token->sparse) {
        ptrdiff_t bad_token;
        enum sparse_status status = sparse_attention(
            scratch->q, token->heads, &layer->rows, layer->samples.k ? &layer->samples : NULL,
            token->block_size, token->n_probe, 0, &layer->choice, layer->probe, scratch->context,
            threads, &bad_token);
        return status == SPARSE_DONE ? DECODER_DONE
             : status == SPARSE_NO_MEMORY ? DECODER_NO_MEMORY : DECODER_NOT_FINITE;
    }
    const struct block_lists every_row = {NULL, 0, 0, token->block_size};
    ptrdiff_t status = two_pass(scratch->q, token->heads, &layer->rows, &every_row, threads,
                                scratch->context);
    return status == ATTEND_DONE ? DECODER_DONE
         : status == ATTEND_NO_MEMORY ? DECODER_NO_MEMORY : DECODER_NOT_FINITE;
}

static enum decoder_status step_result(enum step_status status)
{
    return status == STEP_DONE ? DECODER_DONE
         : status == STEP_NO_MEMORY ? DECODER_NO_MEMORY : DECODER_NOT_FINITE;
}

static enum decoder_status decoder_layer(struct decoder_token *token,
                                         const struct decoder_layer *layer,
                                         const struct decoder_scratch *scratch, int threads)
{
    const ptrdiff_t d = layer->rows.d;
    const struct heads_to_split split = {
        NULL, layer->q_gain, layer->k_gain, token->cos, token->sin, token->eps, 1, token->heads,
        layer->rows.num_kv_heads, d, d, d, d, scratch->q, scratch->k, scratch->v,
    };
    enum decoder_status status = step_result(attention_input(
        token->x, layer->input_gain, token->eps, &layer->qkv, &split, threads));
    if (status == DECODER_DONE && !store_token(token, &layer->rows, scratch))
        status = DECODER_NOT_FINITE;
    if (status == DECODER_DONE) {
        const double begin = seconds_now();
        status = decoder_attend(token, layer, scratch, threads);
        token->attention_seconds += seconds_now() - begin;
    }
    if (status == DECODER_DONE)
        status = step_result(attention_output(token->x, scratch->context, &layer->o, threads));
    if (status == DECODER_DONE)
        status = step_result(swiglu(token->x, layer->mlp_gain, token->eps, &layer->gate_up,
                                    &layer->down, threads));
    return status;
}

static enum decoder_status decoder_layers(struct decoder_token *token,
                                          const struct decoder_layer *layers, ptrdiff_t count,
                                          int threads)
{
    const ptrdiff_t kv_heads = layers->rows.num_kv_heads;
    const size_t queries = (size_t)(token->heads * layers->rows.d);
    const size_t keys = (size_t)(kv_heads * layers->rows.d);
    float *memory = malloc((2 * queries + 2 * keys + (size_t)kv_heads) * sizeof *memory + keys);
    if (!memory)
        return DECODER_NO_MEMORY;
    struct decoder_scratch scratch = {.q = memory, .context = memory + queries};
    scratch.k = scratch.context + queries;
    scratch.v = scratch.k + keys;
    scratch.scale = scratch.v + keys;
    scratch.int8 = (int8_t *)(scratch.scale + kv_heads);
    enum decoder_status status = DECODER_DONE;
    token->attention_seconds = 0.0;
    for (ptrdiff_t i = 0; i < count && status == DECODER_DONE; i++)
        status = decoder_layer(token, layers + i, &scratch, threads);
    free(memory);
    return status;
}

static const struct decoder_kernels decoder_kernels = {
    .layers = decoder_layers,
};
