#include "linear.h"

#include <stdlib.h>

/* The tiles below are loops of constant length over small arrays, which become registers only where
 * the compiler inlines and unrolls them. */
#define TILE_FUNCTION static inline __attribute__((always_inline))

/* Split `count` into equal bands, a few for each thread: the last band to end is a short wait. */
static ptrdiff_t band_length(ptrdiff_t count, int threads)
{
    ptrdiff_t length = threads > 1 ? count / (8 * (ptrdiff_t)threads) : count;
    return length > 0 ? length : 1;
}

/* How many rows of x the next tile takes, of `left`: `most`, then halves of it. */
static ptrdiff_t tile_rows(ptrdiff_t left, ptrdiff_t most)
{
    while (most > left)
        most /= 2;
    return most;
}

#include "linear_f32.c"
#if defined(V16_AVX512)
#include "linear_avx512.h"
#elif defined(V16_AVX2)
#include "linear_avx2.h"
#elif defined(V16_NEON)
#include "linear_neon.h"
#else
#include "linear_portable.h"
#endif
#include "linear_blocks.c"

static const struct linear_kernels linear_kernels = {
    .f32 = linear_f32,
    .q8_0 = linear_q8_0,
    .q4_0 = linear_q4_0,
    .quantize_activations = quantize_activations,
};

#undef TILE_FUNCTION
