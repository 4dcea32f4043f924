/* Prefill attention: many query rows, each over a prefix of the rows. */
#ifndef COURSE_PREFILL_H
#define COURSE_PREFILL_H

#include <stddef.h>
#include <stdint.h>

struct prefill_kernels {
    int none_yet;
};

#endif
