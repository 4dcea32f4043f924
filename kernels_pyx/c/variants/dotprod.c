/* NEON with SDOT, the int8 dot product: Armv8.2 CPUs such as the Cortex-A76 and A55 of the board. */
#if defined(__clang__)
#ifndef __ARM_FEATURE_DOTPROD
#define __ARM_FEATURE_DOTPROD 1  /* without it the arm_neon.h of clang 14 and 15 lacks vdotq_s32 */
#endif
#pragma clang attribute push(__attribute__((target("dotprod"))), apply_to = function)
#else
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#if !defined(__clang__)
/* gcc orders instructions before it chooses registers, and then has too few of them: with this many
 * vectors at work it stores some and loads them again. */
#pragma GCC optimize("no-schedule-insns")
#endif
#define V16_NEON
#define V16_DOTPROD
#include "variant.h"

VARIANT_TABLE(kernels_dotprod, "dotprod");
#if defined(__clang__)
#pragma clang attribute pop
#endif
