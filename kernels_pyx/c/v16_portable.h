/* The definition of v16 in plain C. fmaf rounds once; where the CPU has no such instruction the C
 * library does it in software: the same bits, twenty times slower. */

typedef struct { float lane[16]; } v16;

enum { V16_ACCUMULATORS = 4 };

#define V16_EACH for (int i = 0; i < 16; i++)

static inline v16 v16_set(float x) { v16 r; V16_EACH r.lane[i] = x; return r; }
static inline v16 v16_load(const float *x) { v16 r; V16_EACH r.lane[i] = x[i]; return r; }
static inline void v16_store(float *x, v16 a) { V16_EACH x[i] = a.lane[i]; }
static inline v16 v16_load_i8(const int8_t *x) { v16 r; V16_EACH r.lane[i] = (float)x[i]; return r; }

static inline v16 v16_add(v16 a, v16 b) { V16_EACH a.lane[i] += b.lane[i]; return a; }
static inline v16 v16_sub(v16 a, v16 b) { V16_EACH a.lane[i] -= b.lane[i]; return a; }
static inline v16 v16_mul(v16 a, v16 b) { V16_EACH a.lane[i] *= b.lane[i]; return a; }
static inline v16 v16_div(v16 a, v16 b) { V16_EACH a.lane[i] /= b.lane[i]; return a; }

/* a * b + c, rounded once. */
static inline v16 v16_fma(v16 a, v16 b, v16 c)
{
    V16_EACH c.lane[i] = fmaf(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

/* The larger of each pair; only for numbers: what becomes of a NaN differs between machines. */
static inline v16 v16_max(v16 a, v16 b)
{
    V16_EACH a.lane[i] = a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i];
    return a;
}

/* Sum of the lanes by halves: 8 sums of lanes i and i + 8, then 4, 2, 1. */
static inline float v16_sum(v16 a)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a.lane[i] += a.lane[i + half];
    return a.lane[0];
}

/* The sums of four vectors, each as v16_sum. */
static inline void v16_sum4(float *sums, v16 a, v16 b, v16 c, v16 d)
{
    sums[0] = v16_sum(a), sums[1] = v16_sum(b), sums[2] = v16_sum(c), sums[3] = v16_sum(d);
}

static inline float v16_max_lane(v16 a)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            a.lane[i] = a.lane[i] > a.lane[i + half] ? a.lane[i] : a.lane[i + half];
    return a.lane[0];
}

/* 1 if a lane is NaN or infinite: its exponent bits are all ones. */
static inline int v16_not_finite(v16 a)
{
    int bad = 0;
    for (int i = 0; i < 16; i++) {
        int32_t bits;
        memcpy(&bits, &a.lane[i], sizeof bits);
        bad |= (bits & 0x7f800000) == 0x7f800000;
    }
    return bad;
}

/* a * 2^n, where the counter is 1.5 * 2^23 + n: its last bits are n, and are added to the exponent.
 * Right where a and the result are normal numbers; elsewhere the result is any number. */
static inline v16 v16_raise(v16 a, v16 counter)
{
    for (int i = 0; i < 16; i++) {
        uint32_t bits, n;
        memcpy(&bits, &a.lane[i], sizeof bits);
        memcpy(&n, &counter.lane[i], sizeof n);
        bits += n << 23;
        memcpy(&a.lane[i], &bits, sizeof bits);
    }
    return a;
}

/* a where x >= limit, 0 elsewhere (also where x is NaN). */
static inline v16 v16_zero_below(v16 a, v16 x, float limit)
{
    V16_EACH a.lane[i] = x.lane[i] >= limit ? a.lane[i] : 0.0f;
    return a;
}

#undef V16_EACH
