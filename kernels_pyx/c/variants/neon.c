/* NEON: every aarch64 CPU, such as the Cortex-A72. */
#if !defined(__clang__)
/* gcc orders instructions before it chooses registers, and then has too few of them: with this many
 * vectors at work it stores some and loads them again. */
#pragma GCC optimize("no-schedule-insns")
#endif
#define V16_NEON
#include "variant.h"

VARIANT_TABLE(kernels_neon, "neon");
