#include "selection.h"

#include <stdlib.h>

static void importance_sums(const float *importance, ptrdiff_t n, ptrdiff_t block_size,
                            float *sums)
{
    for (ptrdiff_t start = 0, b = 0; start < n; start += block_size, b++) {
        ptrdiff_t length = n - start < block_size ? n - start : block_size;
        float sum = 0.0f;
        for (ptrdiff_t i = 0; i < length; i++)
            sum += importance[start + i];
        sums[b] = sum;
    }
}

#include "selection_probe.c"
#include "selection_choose.c"
#include "selection_attend.c"

static const struct selection_kernels selection_kernels = {
    .probe_scores = probe_scores,
    .first_bad_value = first_bad_value,
    .importance_sums = importance_sums,
    .select_blocks = select_blocks,
    .sparse_attention = sparse_attention,
};
