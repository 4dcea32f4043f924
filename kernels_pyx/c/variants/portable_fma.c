/* Plain C again, for x86 CPUs with a fused multiply-add: fmaf becomes one instruction. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "variant.h"

VARIANT_TABLE(kernels_portable_fma, "portable");
#if defined(__clang__)
#pragma clang attribute pop
#endif
