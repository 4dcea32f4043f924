/* Attention of one query per head over the rows of a KV cache (decode).
 *
 * Query head h reads KV head h * num_kv_heads / num_heads, so `group` = num_heads / num_kv_heads
 * query heads share the rows of a KV head; they are served together, and a row is read from memory
 * once for all of them. Tokens are read block by block in the order of a list of block ids, or all
 * from 0 to n - 1. The numbers are defined in attention.c. */
#ifndef COURSE_ATTENTION_H
#define COURSE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

/* K and V rows of one layer, head-major: each head's rows [n][d] are contiguous. */
struct kv_rows {
    const void *k, *v;                           /* int8_t with scales, float without */
    const float *k_scale, *v_scale;              /* one per row; both NULL for float rows */
    ptrdiff_t num_kv_heads, n, d;
    ptrdiff_t k_head_stride, v_head_stride;      /* values from one head to the next */
    ptrdiff_t k_scale_stride, v_scale_stride;    /* scales from one head to the next */
};

/* Which blocks are read, in which order. Block b is the tokens from b * block_size on; the last
 * block of a cache may be short. Ids are in range, and no list holds one twice. */
struct block_lists {
    const int32_t *ids;                          /* [lists][count]; NULL: all tokens in order */
    ptrdiff_t lists;                             /* one per query head, or one per KV head */
    ptrdiff_t count, block_size;
};

/* The longest row of single_pass_q8_row: so many products of 127 and -128 still fit into an int32. */
enum { MAX_ROW_D = INT32_MAX / (127 * 128) / 32 * 32 };

/* What an attention function returns: a token >= 0 if the score of its K row is not finite, or one
 * of these. Of several errors that of the first query head is returned; `out` is then undefined. */
enum { ATTEND_DONE = -1, ATTEND_BAD_OUTPUT = -2, ATTEND_NO_MEMORY = -3 };

/* q and out: [num_heads][d], q finite. */
typedef ptrdiff_t attention_function(const float *q, ptrdiff_t num_heads,
                                     const struct kv_rows *rows, const struct block_lists *blocks,
                                     int threads, float *out);

struct attention_kernels {
    attention_function *two_pass;        /* all scores, softmax, then V */
    attention_function *single_pass;     /* online softmax, 32 tokens at a time */
    attention_function *single_pass_q8;  /* int8 rows, query quantized per 32 values; d % 32 == 0 */
    attention_function *single_pass_q8_row;  /* the same, one query scale a row; d <= MAX_ROW_D */
    void (*exp)(const float *x, ptrdiff_t count, float *out);  /* v16_exp of every value */
};

/* For other families of the same variant (attention.c is included before them), static in
 * attention.c: two_pass of `queries` query vectors q[queries][d] over one list of blocks of one KV
 * head; `blocks` NULL reads all n tokens. Returns as above, never ATTEND_NO_MEMORY. `scratch` has
 * room for attend_rows_scratch floats; `tokens` is at least the number of tokens read, for instance
 * min(n, count * block_size).
 *
 *     size_t attend_rows_scratch(ptrdiff_t queries, ptrdiff_t tokens, ptrdiff_t d);
 *     ptrdiff_t attend_rows(const float *q, ptrdiff_t queries, const struct kv_rows *rows,
 *                           ptrdiff_t kv_head, const int32_t *blocks, ptrdiff_t count,
 *                           ptrdiff_t block_size, float *scratch, float *out);
 */

#endif
