/* NEON with SDOT, the int8 dot product: Armv8.2 CPUs such as the Cortex-A76 and A55 of the board. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#define V16_NEON
#define V16_DOTPROD
#include "variant.h"

VARIANT_TABLE(kernels_dotprod, "dotprod");
#if defined(__clang__)
#pragma clang attribute pop
#endif
