/* Dots of an int8 query with int8 rows on NEON; q8_dot in attention_q8.c is the definition.
 *
 * The two vector pipes are what this loop is short of: docs/kernels.md counts the operations for
 * them that the definition asks for. The loop has no other but the store of its dots. */

/* Four partial sums of a group in the lanes of `sums`. SIGNS has a byte for each of eight values of
 * q: 1 where they are summed in lanes 0 and 2, -1 in lanes 1 and 3. */
#if defined(V16_DOTPROD)
#define SIGNS UINT64_C(0xffffffff01010101)
ALWAYS_INLINE int32x4_t group_sums(const int8x16_t *q, int8x16_t k0, int8x16_t k1, int32x4_t sums)
{
    return vdotq_s32(vdotq_s32(sums, k0, q[0]), k1, q[1]);
}
#else
#define SIGNS UINT64_C(0xffff0101ffff0101)
ALWAYS_INLINE int32x4_t group_sums(const int8x16_t *q, int8x16_t k0, int8x16_t k1, int32x4_t sums)
{
    /* Two products fit into 16 bits: 2 * 128 * 127 = 32512. */
    int16x8_t low = vmlal_high_s8(vmull_s8(vget_low_s8(k0), vget_low_s8(q[0])), k0, q[0]);
    int16x8_t high = vmlal_high_s8(vmull_s8(vget_low_s8(k1), vget_low_s8(q[1])), k1, q[1]);
    return vpadalq_s16(vpadalq_s16(sums, low), high);
}
#endif

/* Integers become floats without a conversion. From C = 1.5 * 2^23 on floats are the integers, so
 * an int32 sum that starts with the bits of C is, read as a float, C + a. One that starts with the
 * bits of -C and adds -b is -C + b, since there counting up makes the float smaller. The lanes are
 * C + a, -C + b, C + c, -C + d, and vpaddq_f32, which adds neighbours, leaves a + b and c + d. All
 * of it is exact: |a| <= 8 * 127 * 128 < 2^22. The minus of -b is the query's, whose values for
 * lanes 1 and 3 change their sign. */
#define COUNTERS UINT64_C(0xcb4000004b400000) /* two lanes: C, and above it -C */

ALWAYS_INLINE float32x4_t counted_sums(const int8x16_t *q, int8x16_t k0, int8x16_t k1)
{
#if defined(__clang__)
    const uint64x2_t counters = vdupq_n_u64(COUNTERS);
#else
    /* The same, but each time anew from a general register, which needs no vector pipe. Left to
     * itself, gcc does it once before the loop and copies vector registers in it. */
    uint64x2_t counters;
    __asm__ volatile("dup %0.2d, %1" : "=w"(counters) : "r"(COUNTERS));
#endif
    return vreinterpretq_f32_s32(group_sums(q, k0, k1, vreinterpretq_s32_u64(counters)));
}

/* Row r of four, at k: x[r][g] are its sums of group g, added to those of the rows before as soon
 * as that is possible, for a register less. After the last one lane r of x[0][g] is the sum of row
 * r. Returns k + d, but the empty assembly keeps the compiler from knowing that: it would add an
 * offset for each load (ld1), where a load itself can move the address on to the next. */
ALWAYS_INLINE const int8_t *add_row(const int r, const int groups, const int8x16_t (*query)[2],
                                    const int8_t *k, ptrdiff_t d, float32x4_t (*x)[4])
{
    UNROLL for (int g = 0; g < groups; g += 2) {
        const int last = g + 2 < groups ? g + 1 : groups - 1;
        if (last > g) {
            const int8x16x4_t key = vld1q_s8_x4(k);
            x[r][g] = counted_sums(query[g], key.val[0], key.val[1]);
            x[r][last] = counted_sums(query[last], key.val[2], key.val[3]);
        } else {
            x[r][g] = counted_sums(query[g], vld1q_s8(k), vld1q_s8(k + 16));
        }
        k += last + 1 < groups ? 2 * GROUP : d - g * GROUP;
        __asm__("" : "+r"(k));
        UNROLL for (int i = g; i <= last; i++) {
            if (r % 2 == 1)
                x[r - 1][i] = vpaddq_f32(x[r - 1][i], x[r][i]);
            if (r == 3)
                x[0][i] = vpaddq_f32(x[0][i], x[2][i]);
        }
    }
    return k;
}

/* s = fma(q_scale[g], sum of g, s) for the first 1, 2 or 4 groups of four rows; `first`: s is 0,
 * and as no sum is -0 and no scale 0, a product does. Returns k + 4 * d. */
ALWAYS_INLINE const int8_t *add_groups(const int groups, const int8_t *q, const float *q_scale,
                                       const int8_t *k, ptrdiff_t d, int first, float32x4_t *s)
{
    int8x16_t query[4][2];
    UNROLL for (int g = 0; g < groups; g++)
        UNROLL for (int i = 0; i < 2; i++)
            query[g][i] = vmulq_s8(vld1q_s8(q + g * GROUP + 16 * i),
                                   vreinterpretq_s8_u64(vdupq_n_u64(SIGNS)));
    float32x4_t x[4][4];
    k = add_row(0, groups, query, k, d, x);
    k = add_row(1, groups, query, k, d, x);
    k = add_row(2, groups, query, k, d, x);
    k = add_row(3, groups, query, k, d, x);
    *s = first ? vmulq_n_f32(x[0][0], q_scale[0]) : vfmaq_n_f32(*s, x[0][0], q_scale[0]);
    UNROLL for (int g = 1; g < groups; g++)
        *s = vfmaq_n_f32(*s, x[0][g], q_scale[g]);
    return k;
}

/* Dots with four rows; returns k + 4 * d. */
ALWAYS_INLINE const int8_t *q8_dot4(const int8_t *q, const float *q_scale, const int32_t *offsets,
                                    const int8_t *k, ptrdiff_t d, float *dots)
{
    (void)offsets;
    float32x4_t s = vdupq_n_f32(0.0f);
    const int8_t *next = k;
    ptrdiff_t c = 0;
    for (; c + 4 * GROUP <= d; c += 4 * GROUP)
        next = add_groups(4, q + c, q_scale + c / GROUP, k + c, d, c == 0, &s) - c;
    if (d & 2 * GROUP) {
        next = add_groups(2, q + c, q_scale + c / GROUP, k + c, d, c == 0, &s) - c;
        c += 2 * GROUP;
    }
    if (d & GROUP)
        next = add_groups(1, q + c, q_scale + c / GROUP, k + c, d, c == 0, &s) - c;
    vst1q_f32(dots, s);
    return next;
}
#undef COUNTERS
#undef SIGNS
