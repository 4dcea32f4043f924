/* NEON: every aarch64 CPU, such as the Cortex-A72. */
#define V16_NEON
#include "variant.h"

VARIANT_TABLE(kernels_neon, "neon");
