/* AVX2 with fused multiply-add: x86 CPUs from 2013 on. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#define V16_AVX2
#include "variant.h"

VARIANT_TABLE(kernels_avx2, "avx2");
#if defined(__clang__)
#pragma clang attribute pop
#endif
