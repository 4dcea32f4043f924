/* Probe scores of blocks, the choice of the blocks that a query head reads, and sparse attention.
 *
 * Block b of a context of n tokens holds tokens b * block_size up to (b + 1) * block_size; the last
 * one may be short. Of a block of `length` tokens the probe reads every step-th K row from the
 * first, step = max(1, length / n_probe). */
#ifndef COURSE_SELECTION_H
#define COURSE_SELECTION_H

#include <stddef.h>
#include <stdint.h>

#include "attention.h"

/* How a layer's blocks are chosen, and where the choice is written.
 *
 * importance [n_blocks] or NULL. Of k blocks, `reserved` are chosen by importance and the rest by
 * probe score, from the largest down, ties to the lower index; then, if the last block is not
 * chosen and a block was left out, it replaces the probe block with the lowest score (of equals
 * the earliest chosen). order [heads][k] receives the blocks in order of choice, ids the same
 * ascending; recency and evicted [heads] the block that came in last and the one that it
 * replaced, or -1. */
struct choice {
    const float *importance;
    ptrdiff_t n_blocks, k, reserved;
    int32_t *order, *ids, *recency, *evicted;
};

/* What sparse_attention returns. BAD_PROBE: a score in `scores` is not finite. BAD_SCORE: a
 * K row that was read, *bad_token, is not finite or its score is not. BAD_OUTPUT: a V row. */
enum sparse_status { SPARSE_DONE, SPARSE_BAD_PROBE, SPARSE_BAD_SCORE, SPARSE_BAD_OUTPUT,
                     SPARSE_NO_MEMORY };

struct selection_kernels {
    /* scores [heads][n_blocks]: the largest q . k (times the row's scale) of the sampled rows; NaN
     * where one of them is not finite. heads is a multiple of rows->num_kv_heads; of rows, only K
     * and its scales are read. samples: NULL, or the sampled rows of the first blocks (full ones)
     * copied together, so that they are read in order; the others are sampled in place. */
    void (*probe_scores)(const float *q, ptrdiff_t heads, const struct kv_rows *rows,
                         const struct kv_rows *samples, ptrdiff_t block_size, ptrdiff_t n_probe,
                         float *scores, int threads);

    /* Index of the first of `count` values that is NaN or infinite, or -1. */
    ptrdiff_t (*first_bad_value)(const float *x, ptrdiff_t count);

    /* sums [n_blocks]: the values of each block added one after the other, from 0. */
    void (*importance_sums)(const float *importance, ptrdiff_t n, ptrdiff_t block_size,
                            float *sums);

    /* Choose the blocks of every head from finite scores [heads][n_blocks]. 0 if there is no
     * memory, else 1. */
    int (*select_blocks)(const float *scores, ptrdiff_t heads, const struct choice *choice);

    /* Probe, choose, and attend (two_pass) over the chosen blocks in ascending order. With
     * `shared`, the query heads of a KV head share one choice, by the largest of their probe
     * scores; `scores` then holds that for each of them. q and out [heads][d]. */
    enum sparse_status (*sparse_attention)(const float *q, ptrdiff_t heads,
                                           const struct kv_rows *rows,
                                           const struct kv_rows *samples, ptrdiff_t block_size,
                                           ptrdiff_t n_probe, int shared,
                                           const struct choice *choice, float *scores, float *out,
                                           int threads, ptrdiff_t *bad_token);
};

#endif
