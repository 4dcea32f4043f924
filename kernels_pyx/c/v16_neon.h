/* v16 as four NEON registers: lanes 0 to 3, 4 to 7, 8 to 11, 12 to 15. */
#include <arm_neon.h>

typedef struct { float32x4_t a, b, c, d; } v16;

enum { V16_ACCUMULATORS = 4 };  /* half of the 32 registers */

#define V16_ALL(f, x, y) (v16){f((x).a, (y).a), f((x).b, (y).b), f((x).c, (y).c), f((x).d, (y).d)}

static inline v16 v16_set(float x)
{
    float32x4_t r = vdupq_n_f32(x);
    return (v16){r, r, r, r};
}
static inline v16 v16_load(const float *x)
{
    return (v16){vld1q_f32(x), vld1q_f32(x + 4), vld1q_f32(x + 8), vld1q_f32(x + 12)};
}
static inline void v16_store(float *x, v16 r)
{
    vst1q_f32(x, r.a), vst1q_f32(x + 4, r.b), vst1q_f32(x + 8, r.c), vst1q_f32(x + 12, r.d);
}
/* int8 to int16 to int32 to float: each step doubles the width of a value. */
static inline v16 v16_load_i8(const int8_t *x)
{
    int8x16_t bytes = vld1q_s8(x);
    int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_high_s8(bytes);
    return (v16){vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_high_s16(low)),
                 vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_high_s16(high))};
}

static inline v16 v16_add(v16 x, v16 y) { return V16_ALL(vaddq_f32, x, y); }
static inline v16 v16_sub(v16 x, v16 y) { return V16_ALL(vsubq_f32, x, y); }
static inline v16 v16_mul(v16 x, v16 y) { return V16_ALL(vmulq_f32, x, y); }
static inline v16 v16_div(v16 x, v16 y) { return V16_ALL(vdivq_f32, x, y); }
static inline v16 v16_max(v16 x, v16 y) { return V16_ALL(vmaxq_f32, x, y); }
static inline v16 v16_fma(v16 x, v16 y, v16 z)
{
    return (v16){vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b),
                 vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}

/* Lanes i and i + 8, then i and i + 4. */
static inline float32x4_t v16_quarters(v16 x)
{
    return vaddq_f32(vaddq_f32(x.a, x.c), vaddq_f32(x.b, x.d));
}

/* Not vaddvq_f32: it adds neighbours first, which gives other bits. */
static inline float v16_sum(v16 x)
{
    float32x4_t y = v16_quarters(x);
    return vpadds_f32(vadd_f32(vget_low_f32(y), vget_high_f32(y)));
}

static inline void v16_sum4(float *sums, v16 p, v16 q, v16 r, v16 s)
{
    float32x4_t w = v16_quarters(p), x = v16_quarters(q), y = v16_quarters(r), z = v16_quarters(s);
    float32x4_t wx = vaddq_f32(vcombine_f32(vget_low_f32(w), vget_low_f32(x)),
                               vcombine_f32(vget_high_f32(w), vget_high_f32(x)));
    float32x4_t yz = vaddq_f32(vcombine_f32(vget_low_f32(y), vget_low_f32(z)),
                               vcombine_f32(vget_high_f32(y), vget_high_f32(z)));
    vst1q_f32(sums, vpaddq_f32(wx, yz));
}

static inline float v16_max_lane(v16 x)
{
    return vmaxvq_f32(vmaxq_f32(vmaxq_f32(x.a, x.c), vmaxq_f32(x.b, x.d)));
}

static inline uint32x4_t v4_not_finite(float32x4_t x)
{
    const uint32x4_t exponent = vdupq_n_u32(0x7f800000);
    return vceqq_u32(vandq_u32(vreinterpretq_u32_f32(x), exponent), exponent);
}
static inline int v16_not_finite(v16 x)
{
    uint32x4_t ab = vorrq_u32(v4_not_finite(x.a), v4_not_finite(x.b));
    uint32x4_t cd = vorrq_u32(v4_not_finite(x.c), v4_not_finite(x.d));
    return vmaxvq_u32(vorrq_u32(ab, cd)) != 0;
}

static inline float32x4_t v4_raise(float32x4_t a, float32x4_t counter)
{
    int32x4_t n = vshlq_n_s32(vreinterpretq_s32_f32(counter), 23);
    return vreinterpretq_f32_s32(vaddq_s32(vreinterpretq_s32_f32(a), n));
}
static inline v16 v16_raise(v16 a, v16 counter) { return V16_ALL(v4_raise, a, counter); }

static inline float32x4_t v4_zero_below(float32x4_t x, float32x4_t limited, float32x4_t limit)
{
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(x), vcgeq_f32(limited, limit)));
}
static inline v16 v16_zero_below(v16 x, v16 limited, float limit)
{
    float32x4_t l = vdupq_n_f32(limit);
    return (v16){v4_zero_below(x.a, limited.a, l), v4_zero_below(x.b, limited.b, l),
                 v4_zero_below(x.c, limited.c, l), v4_zero_below(x.d, limited.d, l)};
}

#undef V16_ALL
