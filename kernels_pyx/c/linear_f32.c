/* x . w for float32 weights, which stay as they are: rows of `cols` values. */

/* A tile is F32_W rows of w times F32_X rows of x (a power of two): each needs a v16 of its own,
 * and every load serves several of them. As many as the registers hold. */
#if defined(V16_AVX512)
enum { F32_W = 6, F32_X = 4 };
#elif defined(V16_AVX2)
enum { F32_W = 3, F32_X = 4 };
#else
enum { F32_W = 2, F32_X = 2 };
#endif

/* One row of x, which memory must keep busy: while x and a row of w fit the first cache together,
 * rows of w one after the other, strictly in order; longer ones four at a time, so that a part of
 * x is loaded once for four. */
enum { GEMV_W = 4, GEMV_LONG_COLS = 4096, F32_MOST_W = 6 };

/* So many bytes of x stay in the second cache while all of w passes by. */
enum { F32_BATCH_BYTES = 1 << 19 };

struct f32_product {
    const float *x, *w;
    float *packed; /* x in the order of use: [tile][chunk of 16 columns][row of the tile][16] */
    float *out;
    ptrdiff_t n, cols, rows, chunks, band;
};

static void pack_f32_tile(float *packed, const float *x, ptrdiff_t cols, ptrdiff_t tile)
{
    for (ptrdiff_t i = 0; i < tile; i++)
        for (ptrdiff_t c = 0; c * 16 < cols; c++) {
            const float *from = x + i * cols + c * 16;
            v16 chunk = cols - c * 16 < 16 ? v16_load_part(from, cols - c * 16) : v16_load(from);
            v16_store(packed + (c * tile + i) * 16, chunk);
        }
}

/* acc[j][i] += x[i] * w[j] over whole chunks of 16 columns. */
TILE_FUNCTION void f32_chunks(const int nw, const int nx, v16 acc[F32_MOST_W][F32_X],
                              const float *x, const float *w, ptrdiff_t cols, ptrdiff_t chunks)
{
    for (ptrdiff_t c = 0; c < chunks; c++, x += 16 * nx)
        UNROLL for (int j = 0; j < nw; j++) {
            v16 weights = v16_load(w + j * cols + 16 * c);
            UNROLL for (int i = 0; i < nx; i++)
                acc[j][i] = v16_fma(v16_load(x + 16 * i), weights, acc[j][i]);
        }
}

#if defined(V16_AVX2)
/* The same sums. A v16 takes two of AVX2's 16 registers, and lanes 0 to 7 do not meet lanes 8 to 15
 * before v16_sum: so the lower halves are done for some chunks, then the upper halves, each with
 * twelve sums in registers instead of six. */
enum { HALF_TILE_CHUNKS = 32 };

TILE_FUNCTION void f32_chunks_by_halves(const int nw, const int nx,
                                        v16 acc[F32_MOST_W][F32_X], const float *x,
                                        const float *w, ptrdiff_t cols, ptrdiff_t chunks)
{
    for (ptrdiff_t first = 0; first < chunks; first += HALF_TILE_CHUNKS) {
        ptrdiff_t end = first + HALF_TILE_CHUNKS < chunks ? first + HALF_TILE_CHUNKS : chunks;
        UNROLL for (int half = 0; half < 2; half++) {
            __m256 sum[F32_MOST_W][F32_X];
            UNROLL for (int j = 0; j < nw; j++)
                UNROLL for (int i = 0; i < nx; i++)
                    sum[j][i] = half ? acc[j][i].high : acc[j][i].low;
            for (ptrdiff_t c = first; c < end; c++) {
                const float *xs = x + 16 * nx * c + 8 * half, *ws = w + 16 * c + 8 * half;
                __m256 weights[F32_MOST_W];
                UNROLL for (int j = 0; j < nw; j++)
                    weights[j] = _mm256_loadu_ps(ws + j * cols);
                UNROLL for (int i = 0; i < nx; i++) {
                    __m256 values = _mm256_loadu_ps(xs + 16 * i);
                    UNROLL for (int j = 0; j < nw; j++)
                        sum[j][i] = _mm256_fmadd_ps(values, weights[j], sum[j][i]);
                }
            }
            UNROLL for (int j = 0; j < nw; j++)
                UNROLL for (int i = 0; i < nx; i++)
                    *(half ? &acc[j][i].high : &acc[j][i].low) = sum[j][i];
        }
    }
}
#endif

/* out[i][j] = x[i] . w[j] for nx rows of x and nw rows of w. */
TILE_FUNCTION void f32_tile(const int nw, const int nx, const struct f32_product *p,
                            const float *x, const float *w, float *out)
{
    v16 acc[F32_MOST_W][F32_X];
    UNROLL for (int j = 0; j < nw; j++)
        UNROLL for (int i = 0; i < nx; i++)
            acc[j][i] = v16_set(0.0f);
    ptrdiff_t whole = p->cols / 16, rest = p->cols % 16;
#if defined(V16_AVX2)
    if (nx > 1) /* one row of x waits for memory, which likes whole lines */
        f32_chunks_by_halves(nw, nx, acc, x, w, p->cols, whole);
    else
#endif
        f32_chunks(nw, nx, acc, x, w, p->cols, whole);
    x += 16 * nx * whole;
    if (rest)
        UNROLL for (int j = 0; j < nw; j++) {
            v16 weights = v16_load_part(w + j * p->cols + 16 * whole, rest);
            UNROLL for (int i = 0; i < nx; i++)
                acc[j][i] = v16_fma(v16_load(x + 16 * i), weights, acc[j][i]);
        }
    UNROLL for (int j = 0; j < nw; j++)
        UNROLL for (int i = 0; i < nx; i++)
            out[i * p->rows + j] = v16_sum(acc[j][i]);
}

TILE_FUNCTION void f32_rows(const int nw, const struct f32_product *p, ptrdiff_t row)
{
    const float *w = p->w + row * p->cols;
    for (ptrdiff_t i = 0, tile; i < p->n; i += tile) {
        tile = tile_rows(p->n - i, F32_X);
        const float *x = p->packed + i * p->chunks * 16;
        float *out = p->out + i * p->rows + row;
        switch (tile) {
        case 1: f32_tile(nw, 1, p, x, w, out); break;
        case 2: f32_tile(nw, 2, p, x, w, out); break;
#if defined(V16_AVX512) || defined(V16_AVX2)
        case 4: f32_tile(nw, 4, p, x, w, out); break;
#endif
        }
    }
}

static void f32_band(void *context, ptrdiff_t index, int thread)
{
    (void)thread;
    const struct f32_product *p = context;
    ptrdiff_t row = index * p->band;
    ptrdiff_t end = row + p->band < p->rows ? row + p->band : p->rows;
    if (p->n > 1)
        for (; row + F32_W <= end; row += F32_W)
            f32_rows(F32_W, p, row);
    else if (p->cols >= GEMV_LONG_COLS)
        for (; row + GEMV_W <= end; row += GEMV_W)
            f32_rows(GEMV_W, p, row);
    for (; row < end; row++)
        f32_rows(1, p, row);
}

static int linear_f32(const float *x, ptrdiff_t n, ptrdiff_t cols, const float *w, ptrdiff_t rows,
                      float *out, int threads)
{
    ptrdiff_t chunks = cols / 16 + (cols % 16 != 0);
    ptrdiff_t row_bytes = (chunks > 0 ? chunks : 1) * 64;
    ptrdiff_t batch = F32_BATCH_BYTES / row_bytes / F32_X * F32_X;
    batch = batch < F32_X ? F32_X : batch;
    batch = batch < n ? batch : n;
    float *packed = aligned_alloc(64, (size_t)batch * (size_t)row_bytes);
    if (!packed)
        return 0;
    threads = useful_threads((double)n * (double)rows * (double)cols, threads);
    ptrdiff_t band = (band_length(rows, threads) + 11) / 12 * 12; /* whole tiles of 2, 3 or 6 */
    for (ptrdiff_t start = 0; start < n; start += batch) {
        ptrdiff_t count = n - start < batch ? n - start : batch;
        struct f32_product p = {x + start * cols, w, packed, out + start * rows, count, cols, rows,
                                chunks, band};
        for (ptrdiff_t i = 0, tile; i < count; i += tile) {
            tile = tile_rows(count - i, F32_X);
            pack_f32_tile(packed + i * chunks * 16, p.x + i * cols, cols, tile);
        }
        parallel_for((rows + p.band - 1) / p.band, threads, f32_band, &p);
    }
    free(packed);
    return 1;
}
