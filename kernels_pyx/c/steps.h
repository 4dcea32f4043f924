/* What a decoder layer does to one token before, after and instead of attention, each step in one
 * go: its threads start once, and what one product gives the next does not leave the caches. The
 * bits are those of the kernels that do the same one after the other (layers.h, linear.h). */
#ifndef COURSE_STEPS_H
#define COURSE_STEPS_H

#include "layers.h"
#include "linear.h"

enum step_status {
    STEP_DONE,
    STEP_BAD_MEAN,    /* the mean square of x plus eps is not finite or is 0 */
    STEP_BAD_NORMED,  /* x, normed and times the gain, is not finite */
    STEP_BAD_RESULT,  /* what comes of it is not finite */
    STEP_NO_MEMORY
};

/* All columns are multiples of 32, so are the rows of `gate_up`; those of `qkv` are whole heads
 * of a multiple of 16 values. Rows are at least 1. */
struct step_kernels {
    /* Norm x, multiply it by qkv and split the heads into `out`, of which tokens is 1 and
     * `stacked` is not read. Where a number is not finite some of it may be written. */
    enum step_status (*attention_input)(const float *x, const float *gain, float eps,
                                        const struct weight_matrix *qkv,
                                        const struct heads_to_split *out, int threads);

    /* x[w.rows] += w . context, which is finite. */
    enum step_status (*attention_output)(float *x, const float *context,
                                         const struct weight_matrix *w, int threads);

    /* x += down . (SiLU(gate . h) * (up . h)), where h is x normed and the gate's rows lie above
     * the up's. x changes only where all is finite. */
    enum step_status (*swiglu)(float *x, const float *gain, float eps,
                               const struct weight_matrix *gate_up,
                               const struct weight_matrix *down, int threads);
};

#endif
