/* What this machine can do at most, beside which a kernel's time says something: read bandwidth,
 * float multiply-adds and int8 multiply-adds a second. */
#ifndef COURSE_MEASURE_H
#define COURSE_MEASURE_H

#include <stddef.h>
#include <stdint.h>

struct measure_kernels {
    /* Read `count` words in order; their sum modulo 2^32, so that no read can be left out. */
    uint32_t (*sum_words)(const uint32_t *x, ptrdiff_t count, int threads);

    /* Read blocks of `size` words each, the i-th from word first[i] on; the sum of them all. */
    uint32_t (*sum_blocks)(const uint32_t *x, const int64_t *first, ptrdiff_t blocks,
                           ptrdiff_t size, int threads);

    /* Do `rounds` rounds of independent multiply-adds on every thread and nothing else; return how
     * many operations that were (a multiplication and an addition are two). The second: int8
     * products summed in int32, by the instructions that the variant has for them. */
    double (*float_operations)(ptrdiff_t rounds, int threads);
    double (*int8_operations)(ptrdiff_t rounds, int threads);
};

#endif
