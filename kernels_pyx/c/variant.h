/* All operations, compiled for one variant. A file in variants/ names the variant, says which
 * instructions the compiler may use, chooses a v16, and includes this. Everything but the table is
 * static, so no function of one variant can be called by another. */
#include "kernels.h"
#include "parallel.h"
#include "workspace.h"
#include "v16.h"

#include "quantize.c"
#include "attention.c"
#include "selection.c"
#include "prefill.c"
#include "layers.c"
#include "linear.c"
#include "steps.c"
#include "decoder.c"
#include "pack.c"
#include "measure.c"

#define VARIANT_TABLE(identifier, text)                                                            \
    const struct kernels identifier = {                                                            \
        .name = text,                                                                              \
        .quantize = &quantize_kernels,                                                             \
        .attention = &attention_kernels,                                                           \
        .selection = &selection_kernels,                                                           \
        .prefill = &prefill_kernels,                                                               \
        .layers = &layer_kernels,                                                                  \
        .linear = &linear_kernels,                                                                 \
        .steps = &step_kernels,                                                                    \
        .decoder = &decoder_kernels,                                                               \
        .pack = &pack_kernels,                                                                 \
        .measure = &measure_kernels,                                                               \
    }
