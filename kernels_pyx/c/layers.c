#include "layers.h"

static const struct layer_kernels layer_kernels = {0};
