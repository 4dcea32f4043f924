#include "selection.h"

static const struct selection_kernels selection_kernels = {0};
