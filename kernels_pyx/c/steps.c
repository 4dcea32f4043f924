#include "steps.h"

/* A row of x as a product reads it: in blocks of 32 where the weights are in blocks. */
struct prepared_row {
    float *x;
    struct activations blocks;
};

/* Bytes of a prepared row of `cols`: four for a float, 40 for a block (linear_blocks). */
static size_t row_bytes(ptrdiff_t cols) { return (size_t)cols * 4 + (size_t)(cols / 32) * 40; }

/* Bytes in whole lines, as aligned_alloc asks for. */
static size_t whole_lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

static struct prepared_row row_in(void *memory, ptrdiff_t cols)
{
    float *x = memory, *scale = x + cols;
    int32_t *start = (int32_t *)(scale + cols / 32);
    return (struct prepared_row){x, {(int8_t *)(start + cols / 32), scale, start}};
}

/* Quantize columns `first` to `end` - 1, whole blocks, for weights of this kind. */
static void prepare_blocks(struct prepared_row *row, enum weight_kind kind, const float *x,
                           ptrdiff_t first, ptrdiff_t end)
{
    struct activations a = row->blocks;
    int32_t offset = kind == Q4_0 ? 8 : 128;
    if (kind == FLOAT32)
        return;
    for (ptrdiff_t b = first / 32; b < end / 32; b++)
        a.start[b] = -offset * quantize_block(x + 32 * b, a.q + 32 * b, a.scale + b);
}

/* rms_norm of x, ready for a product. */
static enum step_status prepare_normed(struct prepared_row *row, enum weight_kind kind,
                                       const float *x, const float *gain, ptrdiff_t cols, float eps)
{
    float mean = mean_square(x, cols) + eps;
    if (!isfinite(mean) || mean == 0.0f)
        return STEP_BAD_MEAN;
    normed_row(x, gain, cols, sqrtf(mean), row->x);
    if (!all_finite(row->x, cols))
        return STEP_BAD_NORMED;
    prepare_blocks(row, kind, row->x, 0, cols);
    return STEP_DONE;
}

/* out[r - first] = x . w[r] for rows `first` to `end` - 1; `first` is a multiple of 16. */
static void product_rows(const struct prepared_row *x, const struct weight_matrix *w,
                         ptrdiff_t first, ptrdiff_t end, float *out)
{
    ptrdiff_t rows = end - first, blocks = w->cols / 32;
    if (w->kind == FLOAT32) {
        struct f32_product p = {.w = (const float *)w->codes + first * w->cols, .packed = x->x,
                                .out = out, .n = 1, .cols = w->cols, .rows = rows,
                                .chunks = w->cols / 16, .band = rows};
        f32_band(&p, 0, 0);
        return;
    }
    ptrdiff_t panel_bytes = blocks * (w->kind == Q4_0 ? 256 : 512), panel = first / 16;
    struct block_product p = {.codes = (const uint8_t *)w->codes + panel * panel_bytes,
                              .scales = w->scales + panel * blocks * 16, .out = out,
                              .activations = x->blocks, .n = 1, .cols = w->cols, .rows = rows,
                              .blocks = blocks, .band = (rows + 15) / 16, .kind = w->kind};
    panel_piece(&p, 0, 0);
}

struct input_work {
    struct prepared_row x;
    const struct weight_matrix *w;
    const struct heads_to_split *out;
    int bad;
};

/* A head is a piece: so its rows of the product are normed and turned where they are. */
static void input_piece(void *context, ptrdiff_t head, int thread)
{
    (void)thread;
    struct input_work *work = context;
    const struct heads_to_split *out = work->out;
    ptrdiff_t d = out->d, key = head - out->heads, value = key - out->kv_heads;
    float *to = key < 0 ? out->q + head * out->q_head_stride
              : value < 0 ? out->k + key * out->k_head_stride
                          : out->v + value * out->v_head_stride;
    product_rows(&work->x, work->w, head * d, (head + 1) * d, to);
    if (value < 0 && split_row(out, key < 0 ? out->q_gain : out->k_gain, 0, to, to))
        __atomic_store_n(&work->bad, 1, __ATOMIC_RELAXED);
}

static double product_size(const struct weight_matrix *w)
{
    return (double)w->rows * (double)w->cols;
}

static enum step_status attention_input(const float *x, const float *gain, float eps,
                                        const struct weight_matrix *qkv,
                                        const struct heads_to_split *out, int threads)
{
    void *memory = aligned_alloc(64, whole_lines(row_bytes(qkv->cols)));
    if (!memory)
        return STEP_NO_MEMORY;
    struct input_work work = {row_in(memory, qkv->cols), qkv, out, 0};
    enum step_status status = prepare_normed(&work.x, qkv->kind, x, gain, qkv->cols, eps);
    if (status == STEP_DONE) {
        parallel_for(out->heads + 2 * out->kv_heads, useful_threads(product_size(qkv), threads),
                     input_piece, &work);
        status = work.bad ? STEP_BAD_RESULT : STEP_DONE;
    }
    free(memory);
    return status;
}

static void add_to(float *x, const float *more, ptrdiff_t count)
{
    for (ptrdiff_t i = 0; i < count; i++)
        x[i] += more[i];
}

struct output_work {
    struct prepared_row x;
    const struct weight_matrix *w;
    ptrdiff_t band;  /* panels of a piece */
    float *product, *sum;
};

static void output_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct output_work *work = context;
    ptrdiff_t first = index * work->band * 16, end = first + work->band * 16;
    end = end < work->w->rows ? end : work->w->rows;
    product_rows(&work->x, work->w, first, end, work->product + first);
    add_to(work->sum + first, work->product + first, end - first);
}

/* How many pieces a product is; sets their length. */
static ptrdiff_t output_pieces(struct output_work *work, int threads)
{
    ptrdiff_t panels = (work->w->rows + 15) / 16;
    work->band = band_length(panels, threads);
    return (panels + work->band - 1) / work->band;
}

static enum step_status attention_output(float *x, const float *context,
                                         const struct weight_matrix *w, int threads)
{
    size_t bytes = row_bytes(w->cols);
    char *memory = aligned_alloc(64, whole_lines(bytes + (size_t)w->rows * 4));
    if (!memory)
        return STEP_NO_MEMORY;
    struct output_work work = {row_in(memory, w->cols), w, 0, (float *)(memory + bytes), x};
    threads = useful_threads(product_size(w), threads);
    if (w->kind == FLOAT32)
        memcpy(work.x.x, context, (size_t)w->cols * sizeof *context);
    prepare_blocks(&work.x, w->kind, context, 0, w->cols);
    parallel_for(output_pieces(&work, threads), threads, output_piece, &work);
    free(memory);
    return STEP_DONE;
}

struct swiglu_work {
    struct output_work down;  /* first: its pieces take the whole for it */
    struct prepared_row x;
    const struct weight_matrix *w;
    float *up;
    ptrdiff_t band;  /* blocks of 32 columns of the inner row in a piece */
    int bad;
};

/* The same columns of gate and up: so they are multiplied and quantized where they are. */
static void gate_up_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    struct swiglu_work *work = context;
    struct prepared_row *inner = &work->down.x;
    ptrdiff_t cols = work->down.w->cols;
    ptrdiff_t first = index * work->band * 32, end = first + work->band * 32;
    end = end < cols ? end : cols;
    float *gate = inner->x + first, *up = work->up + first;
    product_rows(&work->x, work->w, first, end, gate);
    product_rows(&work->x, work->w, cols + first, cols + end, up);
    int good = all_finite(gate, end - first) && all_finite(up, end - first);
    if (good) {
        silu_mul_row(gate, up, end - first, gate);
        good = all_finite(gate, end - first);
    }
    if (good)
        prepare_blocks(inner, work->down.w->kind, inner->x, first, end);
    else
        __atomic_store_n(&work->bad, 1, __ATOMIC_RELAXED);
}

static void down_piece(void *context, ptrdiff_t index, int thread)
{
    struct swiglu_work *work = context;
    if (!work->bad)
        output_piece(&work->down, index, thread);
}

static enum step_status swiglu(float *x, const float *gain, float eps,
                               const struct weight_matrix *gate_up,
                               const struct weight_matrix *down, int threads)
{
    ptrdiff_t hidden = gate_up->cols, inner = down->cols, blocks = inner / 32;
    size_t x_bytes = row_bytes(hidden), inner_bytes = row_bytes(inner);
    char *memory = aligned_alloc(64, whole_lines(x_bytes + inner_bytes + (size_t)inner * 4
                                                 + (size_t)hidden * 4));
    if (!memory)
        return STEP_NO_MEMORY;
    float *up = (float *)(memory + x_bytes + inner_bytes);
    struct swiglu_work work = {
        .down = {row_in(memory + x_bytes, inner), down, 0, up + inner, x},
        .x = row_in(memory, hidden), .w = gate_up, .up = up};
    threads = useful_threads(product_size(gate_up) + product_size(down), threads);
    work.band = band_length(blocks, threads);
    enum step_status status = prepare_normed(&work.x, gate_up->kind, x, gain, hidden, eps);
    if (status == STEP_DONE) {
        struct stage stages[] = {{(blocks + work.band - 1) / work.band, gate_up_piece},
                                 {output_pieces(&work.down, threads), down_piece}};
        parallel_stages(stages, 2, threads, &work);
        status = work.bad ? STEP_BAD_RESULT : STEP_DONE;
    }
    free(memory);
    return status;
}

static const struct step_kernels step_kernels = {
    .attention_input = attention_input,
    .attention_output = attention_output,
    .swiglu = swiglu,
};
