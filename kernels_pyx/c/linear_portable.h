/* The sums inside a block, in plain C: the definition of what the other linear_*.h do.
 *
 * s16 is sixteen int32, one for each row of a panel. */

enum { BLOCK_X = 4 }; /* rows of x at a time: a power of two, at most 8 */

typedef struct { int32_t lane[16]; } s16;

static inline v16 v16_from_s16(s16 a)
{
    v16 r;
    for (int i = 0; i < 16; i++)
        r.lane[i] = (float)a.lane[i];
    return r;
}

/* float16: a sign bit, 5 bits of exponent (0: no hidden bit; 31: infinity or NaN), 10 of mantissa.
 * Every float16 is a float32, so nothing is rounded. */
static inline float float_from_f16(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float small = (float)(int32_t)rest * 0x1p-24f; /* the value where the exponent is 0 */
    uint32_t small_bits, bits = (rest << 13) + ((127 - 15) << 23);
    memcpy(&small_bits, &small, sizeof small_bits);
    bits = rest < 0x0400 ? small_bits : bits;
    bits = rest >= 0x7c00 ? bits | 0x7f800000 : bits;
    bits |= sign;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline v16 v16_load_f16(const uint16_t *x)
{
    v16 r;
    for (int i = 0; i < 16; i++)
        r.lane[i] = float_from_f16(x[i]);
    return r;
}

/* sum[i], lane r: the products of row r of the panel and row i of nx rows of x, over a block of 32
 * columns. codes: [8][16 rows][4 columns]; x: [nx][32]; start[i] is -128 times the sum of x[i],
 * for instructions that take one factor without a sign. */
TILE_FUNCTION void q8_0_block(s16 *sum, const int nx, const int8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    (void)start;
    for (int i = 0; i < nx; i++, x += 32) {
        sum[i] = (s16){{0}};
        for (int c = 0; c < 32; c += 4)
            for (int r = 0; r < 16; r++) {
                const int8_t *w = codes + 16 * c + 4 * r;
                sum[i].lane[r] += w[0] * x[c] + w[1] * x[c + 1] + w[2] * x[c + 2]
                    + w[3] * x[c + 3];
            }
    }
}

/* The same for codes [4][16 rows][4 bytes], byte k of group g holding columns 4 g + k and
 * 16 + 4 g + k; here start[i] is -8 times the sum of x[i], since a code is the value + 8. */
TILE_FUNCTION void q4_0_block(s16 *sum, const int nx, const uint8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    for (int i = 0; i < nx; i++, x += 32) {
        for (int r = 0; r < 16; r++)
            sum[i].lane[r] = start[i];
        for (int c = 0; c < 16; c += 4)
            for (int r = 0; r < 16; r++) {
                const uint8_t *w = codes + 16 * c + 4 * r;
                for (int k = 0; k < 4; k++)
                    sum[i].lane[r] += (w[k] & 15) * x[c + k] + (w[k] >> 4) * x[c + 16 + k];
            }
    }
}
