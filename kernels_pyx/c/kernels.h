/* All operations of one variant. Every family header defines its own part of the table. */
#ifndef COURSE_KERNELS_H
#define COURSE_KERNELS_H

#include "attention.h"
#include "decoder.h"
#include "layers.h"
#include "linear.h"
#include "measure.h"
#include "pack.h"
#include "prefill.h"
#include "quantize.h"
#include "selection.h"
#include "steps.h"

struct kernels {
    const char *name;
    const struct quantize_kernels *quantize;
    const struct attention_kernels *attention;
    const struct selection_kernels *selection;
    const struct prefill_kernels *prefill;
    const struct layer_kernels *layers;
    const struct linear_kernels *linear;
    const struct step_kernels *steps;
    const struct decoder_kernels *decoder;
    const struct pack_kernels *pack;
    const struct measure_kernels *measure;
};

/* Fill `found` with the variants that were compiled and that this CPU runs, best first; return
 * how many. `found` has room for MAX_VARIANTS. */
enum { MAX_VARIANTS = 4 };
int runnable_kernels(const struct kernels **found);

#endif
