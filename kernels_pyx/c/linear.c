#include "linear.h"

static const struct linear_kernels linear_kernels = {0};
