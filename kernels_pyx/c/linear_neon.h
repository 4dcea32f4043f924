/* The sums inside a block (linear_portable.h) with NEON, with and without its dot product. */

enum { BLOCK_X = 2 };

typedef struct { int32x4_t quarter[4]; } s16;

static inline v16 v16_from_s16(s16 s)
{
    return (v16){vcvtq_f32_s32(s.quarter[0]), vcvtq_f32_s32(s.quarter[1]),
                 vcvtq_f32_s32(s.quarter[2]), vcvtq_f32_s32(s.quarter[3])};
}

static inline float32x4_t v4_load_f16(const uint16_t *x)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x)));
}
static inline v16 v16_load_f16(const uint16_t *x)
{
    return (v16){v4_load_f16(x), v4_load_f16(x + 4), v4_load_f16(x + 8), v4_load_f16(x + 12)};
}

#if defined(V16_DOTPROD)

/* Lane n of sdot adds the products of four codes of each of four rows with values 4 n to 4 n + 3 of
 * sixteen of x. It wraps and never saturates; the sums fit. */
#define DOT_STEP(lane, w, x16)                                                                     \
    UNROLL for (int q = 0; q < 4; q++)                                                             \
        UNROLL for (int i = 0; i < nx; i++)                                                        \
            sum[i].quarter[q] = vdotq_laneq_s32(sum[i].quarter[q], w(lane, q), x16[i], lane)

TILE_FUNCTION void q8_0_block(s16 *sum, const int nx, const int8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    (void)start;
    UNROLL for (int i = 0; i < nx; i++)
        UNROLL for (int q = 0; q < 4; q++)
            sum[i].quarter[q] = vdupq_n_s32(0);
    UNROLL for (int half = 0; half < 2; half++) {
        int8x16_t sixteen[BLOCK_X];
        UNROLL for (int i = 0; i < nx; i++)
            sixteen[i] = vld1q_s8(x + 32 * i + 16 * half);
#define CODES(lane, q) vld1q_s8(codes + 64 * (4 * half + (lane)) + 16 * (q))
        DOT_STEP(0, CODES, sixteen);
        DOT_STEP(1, CODES, sixteen);
        DOT_STEP(2, CODES, sixteen);
        DOT_STEP(3, CODES, sixteen);
#undef CODES
    }
}

TILE_FUNCTION void q4_0_block(s16 *sum, const int nx, const uint8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    int8x16_t first[BLOCK_X], second[BLOCK_X];
    UNROLL for (int i = 0; i < nx; i++) {
        first[i] = vld1q_s8(x + 32 * i);
        second[i] = vld1q_s8(x + 32 * i + 16);
        UNROLL for (int q = 0; q < 4; q++)
            sum[i].quarter[q] = vdupq_n_s32(start[i]);
    }
#define BYTES(g, q) vld1q_u8(codes + 64 * (g) + 16 * (q))
#define LOW(g, q) vreinterpretq_s8_u8(vandq_u8(BYTES(g, q), vdupq_n_u8(15)))
#define HIGH(g, q) vreinterpretq_s8_u8(vshrq_n_u8(BYTES(g, q), 4))
    DOT_STEP(0, LOW, first);
    DOT_STEP(0, HIGH, second);
    DOT_STEP(1, LOW, first);
    DOT_STEP(1, HIGH, second);
    DOT_STEP(2, LOW, first);
    DOT_STEP(2, HIGH, second);
    DOT_STEP(3, LOW, first);
    DOT_STEP(3, HIGH, second);
#undef BYTES
#undef LOW
#undef HIGH
}

#undef DOT_STEP

#else /* without the dot product */

/* Four values of a row of x, twice: for two rows of the panel. */
static inline int8x8_t four_twice(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return vreinterpret_s8_s32(vdup_n_s32(four));
}

/* Products of bytes are int16; two of them, at most 2 * 128 * 127 = 32,512, can be added there
 * before vpadal adds neighbours to int32. */
TILE_FUNCTION void q8_0_block(s16 *sum, const int nx, const int8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    (void)start;
    UNROLL for (int q = 0; q < 4; q++) {
        int32x4_t low[BLOCK_X], high[BLOCK_X]; /* two partial sums for each of two rows */
        UNROLL for (int i = 0; i < nx; i++)
            low[i] = high[i] = vdupq_n_s32(0);
        UNROLL for (int c = 0; c < 8; c += 2) {
            int8x16_t w0 = vld1q_s8(codes + 64 * c + 16 * q);
            int8x16_t w1 = vld1q_s8(codes + 64 * c + 64 + 16 * q);
            UNROLL for (int i = 0; i < nx; i++) {
                int8x8_t x0 = four_twice(x + 32 * i + 4 * c);
                int8x8_t x1 = four_twice(x + 32 * i + 4 * c + 4);
                int16x8_t two = vmull_s8(vget_low_s8(w0), x0);
                low[i] = vpadalq_s16(low[i], vmlal_s8(two, vget_low_s8(w1), x1));
                two = vmull_s8(vget_high_s8(w0), x0);
                high[i] = vpadalq_s16(high[i], vmlal_s8(two, vget_high_s8(w1), x1));
            }
        }
        UNROLL for (int i = 0; i < nx; i++)
            sum[i].quarter[q] = vpaddq_s32(low[i], high[i]);
    }
}

/* Here all 8 products of a lane, at most 8 * 15 * 127 = 15,240, fit an int16. */
TILE_FUNCTION void q4_0_block(s16 *sum, const int nx, const uint8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    UNROLL for (int q = 0; q < 4; q++) {
        int16x8_t low[BLOCK_X], high[BLOCK_X];
        UNROLL for (int i = 0; i < nx; i++)
            low[i] = high[i] = vdupq_n_s16(0);
        UNROLL for (int g = 0; g < 4; g++) {
            uint8x16_t two = vld1q_u8(codes + 64 * g + 16 * q);
            int8x16_t w0 = vreinterpretq_s8_u8(vandq_u8(two, vdupq_n_u8(15)));
            int8x16_t w1 = vreinterpretq_s8_u8(vshrq_n_u8(two, 4));
            UNROLL for (int i = 0; i < nx; i++) {
                int8x8_t x0 = four_twice(x + 32 * i + 4 * g);
                int8x8_t x1 = four_twice(x + 32 * i + 16 + 4 * g);
                low[i] = vmlal_s8(low[i], vget_low_s8(w0), x0);
                low[i] = vmlal_s8(low[i], vget_low_s8(w1), x1);
                high[i] = vmlal_s8(high[i], vget_high_s8(w0), x0);
                high[i] = vmlal_s8(high[i], vget_high_s8(w1), x1);
            }
        }
        UNROLL for (int i = 0; i < nx; i++)
            sum[i].quarter[q] = vaddq_s32(vdupq_n_s32(start[i]),
                                          vpaddq_s32(vpaddlq_s16(low[i]), vpaddlq_s16(high[i])));
    }
}

#endif
