#include "prefill.h"

static const struct prefill_kernels prefill_kernels = {0};
