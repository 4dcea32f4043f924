/* AVX-512 with VNNI, the int8 dot product: x86 servers from 2019 on, AMD from Zen 4. */
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")
#endif
#define V16_AVX512
#include "variant.h"

VARIANT_TABLE(kernels_avx512, "avx512");
#if defined(__clang__)
#pragma clang attribute pop
#endif
