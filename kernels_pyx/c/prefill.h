/* Prefill: attention of many query rows, each over its own prefix of the KV rows, all at once or
 * part by part; and the antidiagonal scores by which prefill policies choose blocks.
 *
 * Query head h reads KV head h * num_kv_heads / num_heads. The numbers are defined in prefill.c. */
#ifndef COURSE_PREFILL_H
#define COURSE_PREFILL_H

#include <stddef.h>
#include <stdint.h>

/* What attention is computed from. */
struct prefill_input {
    const float *q;                          /* [num_heads][rows][d], finite */
    const float *k, *v;                      /* [num_kv_heads][n][d], each head contiguous */
    const int64_t *visible;                  /* [rows]: row i reads tokens 0 to visible[i] - 1 */
    ptrdiff_t num_heads, num_kv_heads, rows, n, d;
    ptrdiff_t k_head_stride, v_head_stride;  /* values from one head to the next */
};

/* What the mass of blocks is computed from; rows and columns are those of antidiagonal scores. */
struct block_sums_input {
    const float *scores;            /* [heads][rows][columns] */
    ptrdiff_t heads, rows, columns;
    ptrdiff_t size;                 /* rows, and columns, of a block */
    ptrdiff_t seen;                 /* columns that are no padding, at least 1 */
    ptrdiff_t causal_from;          /* row r sees columns up to causal_from + r; -1: all */
    ptrdiff_t first_row, last_row;  /* rows outside of first_row to last_row - 1 count nothing */
    float rate;
};

/* What the functions return: a token >= 0 if the score of its K row is not finite, or one of
 * these. Of several errors that of the first head and query is returned. Only where all is done
 * something is written. */
enum { PREFILL_DONE = -1, PREFILL_BAD_OUTPUT = -2, PREFILL_NO_MEMORY = -3 };

struct prefill_kernels {
    /* out[num_heads][rows][d]; zeros where visible[i] is 0. Unless `importance` is NULL, row h of
     * importance[num_heads][n] gets the softmax weights of head h's rows from `importance_from`
     * on added, row after row. */
    ptrdiff_t (*attention)(const struct prefill_input *in, ptrdiff_t importance_from, int threads,
                           float *out, float *importance);

    /* Attention over the n > 0 rows of `in`, a part of the context, in blocks of `block_size` rows
     * (the last one may be shorter), each merged in ascending order into out[num_heads][rows][d]
     * and lse[num_heads][rows], natural logarithms, of the parts before: zeros and -inf where there
     * are none. Unless `reads`[blocks][num_kv_heads] is NULL, its flags say which KV heads' query
     * heads read which block. After an error `out` and `lse` hold anything. */
    ptrdiff_t (*partial)(const struct prefill_input *in, ptrdiff_t block_size,
                         const unsigned char *reads, int threads, float *out, double *lse);

    /* Merge parts with their LSEs, part[rows][d] and part_lse[rows], into out and lse of the parts
     * before, as `partial` merges a block: out[rows][d], lse[rows]. */
    void (*merge)(const float *part, const double *part_lse, ptrdiff_t rows, ptrdiff_t d,
                  int threads, float *out, double *lse);

    /* out[num_heads][q_rows / s][k_rows / s], where s = stride divides both:
     * out[h][m][n] = sum over i < s of q[h][m s + s - 1 - i] . k[n s + i], one dot of s * d
     * products. q [num_heads][q_rows][d] and k [num_kv_heads][k_rows][d], both with a head stride.
     * PREFILL_BAD_OUTPUT where a sum is not finite. */
    ptrdiff_t (*antidiagonal_scores)(const float *q, ptrdiff_t num_heads, ptrdiff_t q_rows,
                                     ptrdiff_t q_head_stride, const float *k,
                                     ptrdiff_t num_kv_heads, ptrdiff_t k_rows,
                                     ptrdiff_t k_head_stride, ptrdiff_t d, ptrdiff_t stride,
                                     int threads, float *out);

    /* out[heads][rows / size][columns / size], rounded up: the softmax mass of every block, defined
     * in block_sums.c. PREFILL_BAD_OUTPUT where a score is not finite. */
    ptrdiff_t (*block_sums)(const struct block_sums_input *in, int threads, float *out);
};

#endif
