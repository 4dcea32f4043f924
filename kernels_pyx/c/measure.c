#include "measure.h"

static const struct measure_kernels measure_kernels = {0};
