/* Attention of one query per head over the rows of a KV cache. */
#ifndef COURSE_ATTENTION_H
#define COURSE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

struct attention_kernels {
    int none_yet;
};

#endif
