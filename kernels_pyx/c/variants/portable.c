/* Plain C for any machine: the definition of every operation. */
#include "variant.h"

#if defined(__x86_64__)
VARIANT_TABLE(kernels_portable, "portable-baseline");  /* fmaf is a call: slow */
#else
VARIANT_TABLE(kernels_portable, "portable");
#endif
