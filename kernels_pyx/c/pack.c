#include "pack.h"

#include <string.h>

/* The first float32 that rounds to infinity as float16. */
#define BEYOND_HALF 65520.0f

static ptrdiff_t first_too_large(const float *x, ptrdiff_t rows, ptrdiff_t cols, float divisor)
{
    for (ptrdiff_t r = 0; r < rows; r++) {
        int32_t bits = max_magnitude_bits(x + r * cols, cols);
        float m;
        memcpy(&m, &bits, sizeof m);
        if (!(m / divisor < BEYOND_HALF))
            return r;
    }
    return -1;
}

/* float16 of |f| < 65520, ties to even. */
static uint16_t half_of(float f)
{
    uint32_t bits, sign;
    memcpy(&bits, &f, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= MAGNITUDE_MASK;
    if (bits < 0x38800000) { /* below 2^-14: at the size of 0.5 a float's last bit is 2^-24 */
        float shifted;
        memcpy(&shifted, &bits, sizeof shifted);
        shifted += 0.5f;
        memcpy(&bits, &shifted, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    bits += 0xfff + (bits >> 13 & 1);
    return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

/* 1 / d, and 0 for a block of zeros or so near that 1 / d is infinite: up to 2^-128. */
static float inverse_of(float d)
{
    return (d < 0 ? -d : d) <= 0x1p-128f ? 0.0f : 1.0f / d;
}

static float pack_block_q8_0(const float *x, uint8_t *codes)
{
    int32_t bits = max_magnitude_bits(x, 32);
    float m, d, inverse;
    memcpy(&m, &bits, sizeof m);
    d = m / 127.0f;
    inverse = inverse_of(d);
    for (int i = 0; i < 32; i++)
        codes[i] = (uint8_t)(int8_t)round_half_away(x[i] * inverse);
    return d;
}

/* The value of largest magnitude of 32, the first of equals. As integers: bits without their sign
 * are ordered like magnitudes, for either sign one maximum. */
static float largest_of(const float *x)
{
    int32_t positive = INT32_MIN, negative = INT32_MIN, bits[32];
    float largest;
    memcpy(bits, x, sizeof bits);
    for (int i = 0; i < 32; i++) {
        int32_t flipped = bits[i] ^ INT32_MIN;
        positive = bits[i] > positive ? bits[i] : positive;
        negative = flipped > negative ? flipped : negative;
    }
    int32_t wanted = positive > negative ? positive : negative ^ INT32_MIN;
    if (positive == negative)
        for (int i = 31; i >= 0; i--)
            if ((bits[i] & MAGNITUDE_MASK) == positive)
                wanted = bits[i];
    memcpy(&largest, &wanted, sizeof largest);
    return largest;
}

static float pack_block_q4_0(const float *x, uint8_t *codes)
{
    float d = largest_of(x) / -8.0f, inverse = inverse_of(d);
    uint8_t code[32];
    for (int i = 0; i < 32; i++) {
        int32_t c = (int32_t)(x[i] * inverse + 8.5f);
        code[i] = (uint8_t)(c > 15 ? 15 : c);
    }
    for (int i = 0; i < 16; i++)
        codes[i] = (uint8_t)(code[i] | code[i + 16] << 4);
    return d;
}

struct packing {
    const float *x;
    ptrdiff_t rows, blocks, band;
    uint8_t *codes;
    uint16_t *scales;
};

static inline __attribute__((always_inline)) void
pack_panel(const struct packing *p, ptrdiff_t panel, ptrdiff_t bytes,
           float (*block)(const float *x, uint8_t *codes))
{
    ptrdiff_t first = panel * 16, lanes = p->rows - first < 16 ? p->rows - first : 16;
    uint8_t *codes = p->codes + panel * p->blocks * bytes * 16;
    uint16_t *scales = p->scales + panel * p->blocks * 16;
    uint8_t fresh[32];
    for (ptrdiff_t b = 0; b < p->blocks; b++, codes += bytes * 16, scales += 16)
        for (ptrdiff_t lane = 0; lane < 16; lane++) {
            memset(fresh, 0, sizeof fresh);
            scales[lane] = 0;
            if (lane < lanes)
                scales[lane] = half_of(block(p->x + ((first + lane) * p->blocks + b) * 32, fresh));
            for (ptrdiff_t four = 0; four < bytes / 4; four++)
                memcpy(codes + (four * 16 + lane) * 4, fresh + four * 4, 4);
        }
}

static void pack_band_q8_0(void *context, ptrdiff_t index, int thread)
{
    const struct packing *p = context;
    ptrdiff_t panels = (p->rows + 15) / 16, panel = index * p->band;
    (void)thread;
    for (ptrdiff_t end = panel + p->band; panel < end && panel < panels; panel++)
        pack_panel(p, panel, 32, pack_block_q8_0);
}

static void pack_band_q4_0(void *context, ptrdiff_t index, int thread)
{
    const struct packing *p = context;
    ptrdiff_t panels = (p->rows + 15) / 16, panel = index * p->band;
    (void)thread;
    for (ptrdiff_t end = panel + p->band; panel < end && panel < panels; panel++)
        pack_panel(p, panel, 16, pack_block_q4_0);
}

static void pack(struct packing p, piece_of_work run, int threads)
{
    ptrdiff_t panels = (p.rows + 15) / 16;
    threads = useful_threads((double)p.rows * (double)p.blocks * 32, threads);
    p.band = band_length(panels, threads);
    parallel_for((panels + p.band - 1) / p.band, threads, run, &p);
}

static void pack_q8_0(const float *x, ptrdiff_t rows, ptrdiff_t cols, int8_t *codes,
                      uint16_t *scales, int threads)
{
    struct packing p = {.x = x, .rows = rows, .blocks = cols / 32, .codes = (uint8_t *)codes,
                        .scales = scales};
    pack(p, pack_band_q8_0, threads);
}

static void pack_q4_0(const float *x, ptrdiff_t rows, ptrdiff_t cols, uint8_t *codes,
                      uint16_t *scales, int threads)
{
    struct packing p = {.x = x, .rows = rows, .blocks = cols / 32, .codes = codes,
                        .scales = scales};
    pack(p, pack_band_q4_0, threads);
}

static const struct pack_kernels pack_kernels = {
    .first_too_large = first_too_large,
    .q8_0 = pack_q8_0,
    .q4_0 = pack_q4_0,
};
