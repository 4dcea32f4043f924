/* Which of the compiled variants this CPU runs. */
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#endif

extern const struct kernels kernels_portable;

/* WITHOUT_...: setup.py says so of a variant that this compiler could not compile. */
#if defined(__x86_64__)
extern const struct kernels kernels_portable_fma, kernels_avx2, kernels_avx512;

int runnable_kernels(const struct kernels **found)
{
    int count = 0;
    __builtin_cpu_init();
    int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#ifndef WITHOUT_AVX512
    if (fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512vnni"))
        found[count++] = &kernels_avx512;
#endif
#ifndef WITHOUT_AVX2
    if (fma)
        found[count++] = &kernels_avx2;
#endif
#ifndef WITHOUT_PORTABLE_FMA
    if (fma)
        found[count++] = &kernels_portable_fma;  /* the same source, with fmaf as one instruction */
#endif
    found[count++] = &kernels_portable;
    return count;
}

#elif defined(__aarch64__)
extern const struct kernels kernels_neon, kernels_dotprod;

#ifndef WITHOUT_DOTPROD
static int has_dotprod(void)
{
#if defined(__linux__)
    /* Not /proc/cpuinfo: under emulation that shows another machine. */
    return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0;
#else
    return 1;  /* every aarch64 machine of Apple has it */
#endif
}
#endif

int runnable_kernels(const struct kernels **found)
{
    int count = 0;
#ifndef WITHOUT_DOTPROD
    if (has_dotprod())
        found[count++] = &kernels_dotprod;
#endif
#ifndef WITHOUT_NEON
    found[count++] = &kernels_neon;
#endif
    found[count++] = &kernels_portable;
    return count;
}

#else

int runnable_kernels(const struct kernels **found)
{
    found[0] = &kernels_portable;
    return 1;
}

#endif
