/* Tiles of prefill: the loops in which nearly all of its time is spent. */

/* A tile is 5 or 6 query rows by 1 or 4 vectors of 16 tokens (scores) or of 16 outputs (values), so
 * that its sums stay in registers: 24 of the 32 of AVX-512, 20 of the 32 of NEON, 12 of the 16 of
 * AVX2. (2 rows in plain C: whoever has no registers to fill need not wait for the compiler.) */
enum {
#if defined(V16_NEON)
    TILE_ROWS = 5,
#elif !V16_IN_REGISTERS
    TILE_ROWS = 2,
#else
    TILE_ROWS = 6,
#endif
#if defined(V16_AVX512)
    TILE_VECTORS = 4,
#else
    TILE_VECTORS = 1,
#endif
    TILE_SIZE = TILE_ROWS * TILE_VECTORS * 16,
    TILE_SCRATCH = 5 * TILE_SIZE,  /* floats that score_tile needs */
    TILE_KEYS = 64,                /* tokens whose keys are packed together */
};

static inline ptrdiff_t tile_round_up(ptrdiff_t x, ptrdiff_t multiple)
{
    return (x + multiple - 1) / multiple * multiple;
}

/* Keys k[n][d] by blocks of 64 tokens, transposed: packed[block][i][token], with i up to a multiple
 * of 16, so that one vector holds the same element of 16 tokens. What is not there is 0. */
static void tile_pack_keys(const float *k, ptrdiff_t n, ptrdiff_t d, float *packed)
{
    ptrdiff_t padded = tile_round_up(d, 16);
    for (ptrdiff_t first = 0; first < n; first += TILE_KEYS, packed += padded * TILE_KEYS) {
        ptrdiff_t tokens = n - first < TILE_KEYS ? n - first : TILE_KEYS;
        if (tokens < TILE_KEYS || d < padded)
            memset(packed, 0, (size_t)(padded * TILE_KEYS) * sizeof *packed);
        for (ptrdiff_t band = 0; band < d; band += 16) {  /* 4 KB at a time stay in the cache */
            ptrdiff_t end = band + 16 < d ? band + 16 : d;
            for (ptrdiff_t t = 0; t < tokens; t++)
                for (ptrdiff_t i = band; i < end; i++)
                    packed[i * TILE_KEYS + t] = k[(first + t) * d + i];
        }
    }
}

/* Place `row` of a packed tile of queries: packed[i][row] = q[i], zeros behind d. */
static void tile_pack_query(const float *q, ptrdiff_t d, ptrdiff_t row, float *packed)
{
    ptrdiff_t padded = tile_round_up(d, 16);
    for (ptrdiff_t i = 0; i < padded; i++)
        packed[i * TILE_ROWS + row] = i < d ? q[i] : 0.0f;
}

/* Scores of a tile of packed queries with TILE_VECTORS * 16 packed tokens: the dot as every kernel
 * defines it, times `scale`, to scores[row * stride + token].
 *
 * That dot has 16 sums, sum j over the elements j, j + 16, j + 32 ..., which are added by halves:
 * 8 sums of j and j + 8, then 4, 2, 1. The lanes of a vector are 16 tokens here, not the 16 sums of
 * one token, so no vector must be summed up at the end. The sums are taken in the order 0, 8, 4,
 * 12, 2 ...: then the additions by halves are those of a counter in binary. After sum number t,
 * each trailing 1 of t says that a sum of the same level waits to be added to. */
static inline void score_tile(const float *q, const float *keys, ptrdiff_t padded, float scale,
                              float *scores, ptrdiff_t stride, float *waiting)
{
    static const unsigned char order[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    for (int turn = 0; turn < 16; turn++) {
        v16 sum[TILE_ROWS][TILE_VECTORS];
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
            UNROLL for (int c = 0; c < TILE_VECTORS; c++)
                sum[r][c] = v16_set(0.0f);
        for (ptrdiff_t i = order[turn]; i < padded; i += 16) {
            v16 key[TILE_VECTORS];
            UNROLL for (int c = 0; c < TILE_VECTORS; c++)
                key[c] = v16_load(keys + i * TILE_KEYS + 16 * c);
            UNROLL for (int r = 0; r < TILE_ROWS; r++) {
                v16 x = v16_set(q[i * TILE_ROWS + r]);
                UNROLL for (int c = 0; c < TILE_VECTORS; c++)
                    sum[r][c] = v16_fma(x, key[c], sum[r][c]);
            }
        }
        float *level = waiting;
        for (int bit = 1; turn & bit; bit *= 2, level += TILE_SIZE)
            UNROLL for (int r = 0; r < TILE_ROWS; r++)
                UNROLL for (int c = 0; c < TILE_VECTORS; c++)
                    sum[r][c] = v16_add(v16_load(level + (r * TILE_VECTORS + c) * 16), sum[r][c]);
        UNROLL for (int r = 0; r < TILE_ROWS; r++)
            UNROLL for (int c = 0; c < TILE_VECTORS; c++)
                v16_store(level + (r * TILE_VECTORS + c) * 16, sum[r][c]);
    }
    const float *result = waiting + 4 * TILE_SIZE;
    UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int c = 0; c < TILE_VECTORS; c++)
            v16_store(scores + r * stride + 16 * c,
                      v16_mul(v16_load(result + (r * TILE_VECTORS + c) * 16), v16_set(scale)));
}

/* Add `count` weighted V rows to a tile of outputs, 16 * vectors of each row:
 * out[row][j] = fma(weights[row][t], values[t][j], out[row][j]), t ascending. */
ALWAYS_INLINE void value_tile(const float *weights, ptrdiff_t weight_stride, const float *values,
                              ptrdiff_t value_stride, ptrdiff_t count, float *out,
                              ptrdiff_t out_stride, const int vectors)
{
    v16 sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            sum[r][c] = v16_load(out + r * out_stride + 16 * c);
    for (ptrdiff_t t = 0; t < count; t++) {
        v16 value[TILE_VECTORS];
        UNROLL for (int c = 0; c < vectors; c++)
            value[c] = v16_load(values + t * value_stride + 16 * c);
        UNROLL for (int r = 0; r < TILE_ROWS; r++) {
            v16 w = v16_set(weights[r * weight_stride + t]);
            UNROLL for (int c = 0; c < vectors; c++)
                sum[r][c] = v16_fma(w, value[c], sum[r][c]);
        }
    }
    UNROLL for (int r = 0; r < TILE_ROWS; r++)
        UNROLL for (int c = 0; c < vectors; c++)
            v16_store(out + r * out_stride + 16 * c, sum[r][c]);
}
