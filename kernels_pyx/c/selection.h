/* Probe scores of blocks, and the choice of the blocks that a query head reads. */
#ifndef COURSE_SELECTION_H
#define COURSE_SELECTION_H

#include <stddef.h>
#include <stdint.h>

struct selection_kernels {
    int none_yet;
};

#endif
