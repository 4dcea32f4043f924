/* x . w for weights in blocks of 32 columns, Q8_0 and Q4_0, packed in panels of 16 rows. */

/* So many bytes of quantized x at a time. */
enum { BLOCK_BATCH_BYTES = 1 << 21 };

/* The CPU's own prefetcher stops at the end of a page of 4 KB. This far ahead the codes are asked
 * for while a block is computed (the scales, which are fewer, from 1 KB ahead). */
enum { LINEAR_READ_AHEAD = 4096 };

/* Quantized rows of x in the order of use: [tile][block][row of the tile], each with 32 values. */
struct activations {
    int8_t *q;
    float *scale;
    int32_t *start; /* -offset times the sum of the values, for codes that are value + offset */
};

struct block_product {
    const float *x;
    const uint8_t *codes;
    const uint16_t *scales;
    float *out;
    struct activations activations;
    ptrdiff_t n, cols, rows, blocks, band;
    enum weight_kind kind;
};

/* Returns the sum of the 32 values. */
static int32_t quantize_block(const float *x, int8_t *q, float *scale)
{
    const v16 zero = v16_set(0.0f), magic = v16_set(12582912.0f);
    v16 a = v16_load(x), b = v16_load(x + 16);
    v16 size = v16_max(v16_max(a, v16_sub(zero, a)), v16_max(b, v16_sub(zero, b)));
    float m = v16_max_lane(size);
    if (m < 1e-6f)
        m = 1.0f;
    *scale = m / 127.0f;
    v16 to_int = v16_set(127.0f / m);
    /* At 1.5 * 2^23 floats are the integers, so the addition rounds, ties to even. The largest
     * product is 127 and an ulp or two, so nothing needs to be cut off at 127. */
    float whole[32];
    v16_store(whole, v16_sub(v16_add(v16_mul(a, to_int), magic), magic));
    v16_store(whole + 16, v16_sub(v16_add(v16_mul(b, to_int), magic), magic));
    int32_t sum = 0;
    for (int i = 0; i < 32; i++) {
        q[i] = (int8_t)whole[i];
        sum += q[i];
    }
    return sum;
}

static void quantize_activations(const float *x, ptrdiff_t n, ptrdiff_t cols, int8_t *q,
                                 float *scale)
{
    for (ptrdiff_t b = 0; b < n * (cols / 32); b++)
        quantize_block(x + 32 * b, q + 32 * b, scale + b);
}

/* The part of `all` that holds the tile starting with row i of x. */
static struct activations tile_at(const struct block_product *p, ptrdiff_t i)
{
    struct activations all = p->activations;
    return (struct activations){all.q + i * p->cols, all.scale + i * p->blocks,
                                all.start + i * p->blocks};
}

/* Quantize piece `index` of x: BLOCK_X rows, which are one tile, or the last few, which are some. */
static void quantize_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct block_product *p = context;
    int32_t offset = p->kind == Q4_0 ? 8 : 128;
    ptrdiff_t i = index * BLOCK_X, end = i + BLOCK_X < p->n ? i + BLOCK_X : p->n;
    for (ptrdiff_t tile; i < end; i += tile) {
        tile = tile_rows(end - i, BLOCK_X);
        struct activations a = tile_at(p, i);
        for (ptrdiff_t row = 0; row < tile; row++)
            for (ptrdiff_t b = 0; b < p->blocks; b++) {
                const float *x = p->x + (i + row) * p->cols + 32 * b;
                ptrdiff_t at = b * tile + row;
                a.start[at] = -offset * quantize_block(x, a.q + 32 * at, a.scale + at);
            }
    }
}

/* A matrix that meets one row of x is read once: its lines should not push others, such as those of
 * the interpreter between two calls, out of the caches. */
static inline void ask_for(const void *line, int once)
{
    if (once)
        __builtin_prefetch(line, 0, 0);
    else
        __builtin_prefetch(line);
}

/* One panel times nx rows of x; `lanes` rows of the panel are outputs. */
TILE_FUNCTION void panel_tile(const enum weight_kind kind, const int nx, ptrdiff_t blocks,
                              const uint8_t *codes, const uint16_t *scales, struct activations x,
                              float *out, ptrdiff_t rows, ptrdiff_t lanes)
{
    const int block_bytes = kind == Q4_0 ? 256 : 512;
    v16 acc[BLOCK_X];
    UNROLL for (int i = 0; i < nx; i++)
        acc[i] = v16_set(0.0f);
    for (ptrdiff_t b = 0; b < blocks; b++) {
        s16 sum[BLOCK_X];
        UNROLL for (int line = 0; line < block_bytes; line += 64)
            ask_for(codes + block_bytes * b + LINEAR_READ_AHEAD + line, nx == 1);
        ask_for(scales + 16 * b + LINEAR_READ_AHEAD / 8, nx == 1);
        if (kind == Q4_0)
            q4_0_block(sum, nx, codes + 256 * b, x.q + 32 * nx * b, x.start + nx * b);
        else
            q8_0_block(sum, nx, (const int8_t *)codes + 512 * b, x.q + 32 * nx * b,
                       x.start + nx * b);
        v16 w_scale = v16_load_f16(scales + 16 * b);
        UNROLL for (int i = 0; i < nx; i++) {
            v16 scale = v16_mul(w_scale, v16_set(x.scale[nx * b + i]));
            acc[i] = v16_fma(scale, v16_from_s16(sum[i]), acc[i]);
        }
    }
    UNROLL for (int i = 0; i < nx; i++)
        if (lanes == 16)
            v16_store(out + i * rows, acc[i]);
        else
            v16_store_part(out + i * rows, acc[i], lanes);
}

TILE_FUNCTION void panel_band(const enum weight_kind kind, const struct block_product *p,
                              ptrdiff_t index)
{
    ptrdiff_t panel = index * p->band, end = panel + p->band, panels = (p->rows + 15) / 16;
    for (end = end < panels ? end : panels; panel < end; panel++) {
        const uint8_t *codes = p->codes + panel * p->blocks * (kind == Q4_0 ? 256 : 512);
        const uint16_t *scales = p->scales + panel * p->blocks * 16;
        ptrdiff_t lanes = p->rows - 16 * panel < 16 ? p->rows - 16 * panel : 16;
        for (ptrdiff_t i = 0, tile; i < p->n; i += tile) {
            tile = tile_rows(p->n - i, BLOCK_X);
            struct activations x = tile_at(p, i);
            float *out = p->out + i * p->rows + 16 * panel;
#define TILE(nx) panel_tile(kind, nx, p->blocks, codes, scales, x, out, p->rows, lanes)
            switch (tile) {
            case 1: TILE(1); break;
            case 2: TILE(2); break;
#if !defined(V16_NEON)
            case 4: TILE(4); break;
#endif
#if defined(V16_AVX512)
            case 8: TILE(8); break;
#endif
            }
#undef TILE
        }
    }
}

static void panel_piece(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct block_product *p = context;
    if (p->kind == Q4_0)
        panel_band(Q4_0, p, index);
    else
        panel_band(Q8_0, p, index);
}

static int linear_blocks(struct block_product p, int threads)
{
    ptrdiff_t n = p.n, batch = BLOCK_BATCH_BYTES / p.cols / BLOCK_X * BLOCK_X;
    batch = batch < BLOCK_X ? BLOCK_X : batch;
    batch = batch < n ? batch : n;
    /* One piece of memory: 32 + 4 + 4 bytes for each block. */
    int8_t *memory = malloc((size_t)batch * (size_t)p.blocks * 40);
    if (!memory)
        return 0;
    p.activations.q = memory;
    p.activations.scale = (float *)(memory + batch * p.cols);
    p.activations.start = (int32_t *)(memory + batch * p.cols + batch * p.blocks * 4);
    threads = useful_threads((double)n * (double)p.rows * (double)p.cols, threads);
    ptrdiff_t panels = (p.rows + 15) / 16;
    p.band = band_length(panels, threads);
    for (ptrdiff_t left = n; left > 0; left -= p.n) {
        p.n = left < batch ? left : batch;
        parallel_for((p.n + BLOCK_X - 1) / BLOCK_X, threads, quantize_piece, &p);
        parallel_for((panels + p.band - 1) / p.band, threads, panel_piece, &p);
        p.x += p.n * p.cols;
        p.out += p.n * p.rows;
    }
    free(memory);
    return 1;
}

static int linear_q8_0(const float *x, ptrdiff_t n, ptrdiff_t cols, const int8_t *codes,
                       const uint16_t *scales, ptrdiff_t rows, float *out, int threads)
{
    struct block_product p = {.x = x, .codes = (const uint8_t *)codes, .scales = scales,
                              .out = out, .n = n, .cols = cols, .rows = rows,
                              .blocks = cols / 32, .kind = Q8_0};
    return linear_blocks(p, threads);
}

static int linear_q4_0(const float *x, ptrdiff_t n, ptrdiff_t cols, const uint8_t *codes,
                       const uint16_t *scales, ptrdiff_t rows, float *out, int threads)
{
    struct block_product p = {.x = x, .codes = codes, .scales = scales,
                              .out = out, .n = n, .cols = cols, .rows = rows,
                              .blocks = cols / 32, .kind = Q4_0};
    return linear_blocks(p, threads);
}
