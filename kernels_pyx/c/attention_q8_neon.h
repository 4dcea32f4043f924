/* Dots of an int8 query with int8 rows on NEON; q8_dot in attention_q8.c is the definition. */

ALWAYS_INLINE int32x4_t group_sums(int8x16_t q0, int8x16_t q1, int8x16_t k0, int8x16_t k1,
                                   int32x4_t sums)
{
#if defined(V16_DOTPROD)
    return vdotq_s32(vdotq_s32(sums, k0, q0), k1, q1);
#else
    /* Two products fit into 16 bits: 2 * 128 * 127 = 32512. */
    int16x8_t low = vmlal_high_s8(vmull_s8(vget_low_s8(k0), vget_low_s8(q0)), k0, q0);
    int16x8_t high = vmlal_high_s8(vmull_s8(vget_low_s8(k1), vget_low_s8(q1)), k1, q1);
    return vpadalq_s16(vpadalq_s16(sums, low), high);
#endif
}

/* An empty piece of assembly that claims to read and change four registers. It computes nothing,
 * but the compiler must have loaded all four before it and cannot use one of them earlier: so the
 * loads stay side by side, where two of them become one instruction. */
#define TOGETHER(a, b, c, d) __asm__("" : "+w"(a), "+w"(b), "+w"(c), "+w"(d))

/* 1.5 * 2^23: here floats are the integers, so an int32 that counts on from this one's bits is, read
 * as a float, 1.5 * 2^23 plus the count, as long as the count stays below 2^22 either way. */
enum { FLOAT_COUNTER = 0x4b400000, COUNTED_GROUPS = 8 };  /* 8 * 32 * 127 * 128 < 2^22 */

/* The products of 32 values, added to the sums of four rows. */
ALWAYS_INLINE void add_group_of_4(const int8_t *q, const int8_t *k, ptrdiff_t d, int32x4_t *x)
{
    int8x16_t q0 = vld1q_s8(q), q1 = vld1q_s8(q + 16), key[4][2];
    UNROLL for (int r = 0; r < 4; r++) {
        key[r][0] = vld1q_s8(k + r * d);
        key[r][1] = vld1q_s8(k + r * d + 16);
    }
    TOGETHER(key[0][0], key[0][1], key[1][0], key[1][1]);
    TOGETHER(key[2][0], key[2][1], key[3][0], key[3][1]);
    UNROLL for (int r = 0; r < 4; r++)
        x[r] = group_sums(q0, q1, key[r][0], key[r][1], x[r]);
}
#undef TOGETHER

/* Lane r becomes the sum of all four lanes of x[r]. */
ALWAYS_INLINE int32x4_t sums_of_4(const int32x4_t *x)
{
    return vpaddq_s32(vpaddq_s32(x[0], x[1]), vpaddq_s32(x[2], x[3]));
}

/* Dots with rows four by four, with one scale for the query; returns how many rows that were. The
 * sums run on from row to row, and what four rows add is the difference: one subtraction in place of
 * four registers to clear. An int32 that overflows in that goes on at the other end, and the
 * difference is still right. */
ALWAYS_INLINE ptrdiff_t q8_dots_by_row(const int8_t *q, const float *q_scale, const int8_t *k,
                                       ptrdiff_t num_rows, ptrdiff_t d, const char *ahead,
                                       float *restrict dots)
{
    const int32x4_t zero = vdupq_n_s32(0);
    int32x4_t x[4] = {zero, zero, zero, zero}, before = zero;
    ptrdiff_t r = 0;
    for (; r + 4 <= num_rows; r += 4) {
        if (ahead)
            prefetch(ahead + r * d, 4 * d);
        for (ptrdiff_t c = 0; c < d; c += 32)
            add_group_of_4(q + c, k + r * d + c, d, x);
        const int32x4_t now = sums_of_4(x);
        vst1q_f32(dots + r, vmulq_n_f32(vcvtq_f32_s32(vsubq_s32(now, before)), *q_scale));
        before = now;
    }
    return r;
}

/* Dots with four rows. The sums of a row run on from group to group; what a group adds is the
 * difference of two counters, as floats: exact, and a subtraction is cheaper than a conversion. The
 * counter starts in lane 0 alone: sums_of_4 adds four lanes, and in that it has to be once. */
ALWAYS_INLINE void q8_dot4(const int8_t *q, const float *q_scale, const int32_t *offsets,
                           const int8_t *k, ptrdiff_t d, ptrdiff_t group, float *dots)
{
    (void)offsets, (void)group;  /* GROUP: q8_dots_by_row does the others */
    const int32x4_t start = vsetq_lane_s32(FLOAT_COUNTER, vdupq_n_s32(0), 0);
    int32x4_t x[4] = {start, start, start, start};
    float32x4_t s = vdupq_n_f32(0.0f), before = vdupq_n_f32(12582912.0f);
    for (ptrdiff_t g = 0; g < d / GROUP; g++) {
        if (g > 0 && g % COUNTED_GROUPS == 0) {
            UNROLL for (int r = 0; r < 4; r++)
                x[r] = start;
            before = vdupq_n_f32(12582912.0f);
        }
        add_group_of_4(q + g * GROUP, k + g * GROUP, d, x);
        float32x4_t now = vreinterpretq_f32_s32(sums_of_4(x));
        s = vfmaq_n_f32(s, vsubq_f32(now, before), q_scale[g]);
        before = now;
    }
    vst1q_f32(dots, s);
}
