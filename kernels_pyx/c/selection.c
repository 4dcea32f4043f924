#include "selection.h"

#include <stdlib.h>

static ptrdiff_t first_not_finite(const float *x, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i += 16) {
        v16 values = count - i < 16 ? v16_load_part(x + i, count - i) : v16_load(x + i);
        if (v16_not_finite(values))
            for (;; i++)
                if (!(x[i] - x[i] == 0.0f))
                    return i;
    }
    return -1;
}

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

static const struct selection_kernels selection_kernels = {
    probe_scores, first_not_finite, importance_sums, select_blocks,
};
