/* One token through all decoder layers, in one call: between two kernels nothing else runs, and a
 * token of a small model waits for some hundred of them. The bits are those of the kernels called
 * one after the other (steps.h, quantize.h, attention.h, selection.h). */
#ifndef COURSE_DECODER_H
#define COURSE_DECODER_H

#include "attention.h"
#include "linear.h"
#include "quantize.h"
#include "selection.h"

/* A layer's weights and its KV cache. */
struct decoder_layer {
    const float *input_gain, *q_gain, *k_gain, *mlp_gain;  /* q_gain, k_gain: NULL for no norm */
    struct weight_matrix qkv, o, gate_up, down;
    struct kv_rows rows;     /* with the new token, which is last: its K and V are written */
    struct kv_rows samples;  /* as sparse_attention's; k NULL for none */
    struct choice choice;    /* where blocks are chosen */
    float *probe;            /* [heads][n_blocks], likewise */
};

/* What all layers share. */
struct decoder_token {
    float *x;  /* [hidden]: what the first layer reads, and what the last one leaves */
    const float *cos, *sin;
    float eps;
    ptrdiff_t heads;
    enum rounding_rule rule;  /* of int8 rows */
    int sparse;               /* blocks are chosen; else all rows are read */
    ptrdiff_t block_size, n_probe;
    double attention_seconds; /* out: choosing blocks and reading rows, of all layers */
};

enum decoder_status {
    DECODER_DONE,
    DECODER_NOT_FINITE,  /* some number is not; calling the kernels one by one says which */
    DECODER_NO_MEMORY
};

struct decoder_kernels {
    /* Sizes as in steps.h; all layers have the same KV heads, d and tokens. x and the new rows
     * are undefined where the result is not DECODER_DONE. */
    enum decoder_status (*layers)(struct decoder_token *token, const struct decoder_layer *layers,
                                  ptrdiff_t count, int threads);
};

#endif
