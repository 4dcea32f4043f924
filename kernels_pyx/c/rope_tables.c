/* cos and sin of the RoPE angles. The C library's differ in bits between machines, so they are
 * computed here, in double with + - * / alone: each of those is rounded the same way everywhere.
 * The error in double is below 1e-14, so a result rounded to float is the nearest float in all but
 * about one of a million cases, and else the one beside it. */

/* log2 of a normal float above 0. x = 2^e m with m between sqrt(1/2) and sqrt(2); ln m is the
 * series 2 (s + s^3/3 + s^5/5 + ...) in s = (m - 1) / (m + 1), |s| < 0.172: 10 terms leave
 * 1e-17. */
static double log2_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    int exponent = (bits >> 23) - 127;
    bits = (bits & 0x7fffff) | 0x3f800000;
    memcpy(&x, &bits, sizeof x);  /* 1 <= x < 2 */
    double m = x;
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent++;
    }
    double s = (m - 1.0) / (m + 1.0), square = s * s, sum = 0.0;
    for (int k = 19; k >= 1; k -= 2)
        sum = sum * square + 1.0 / k;
    return exponent + 2.0 * s * sum * 1.4426950408889634;
}

/* 2^x for |x| < 1000: 2^n exp(r ln 2) with a whole n and |r| <= 1/2; exp is its Taylor polynomial
 * of degree 14, which leaves 1e-19. */
static double exp2_of(double x)
{
    const double magic = 6755399441055744.0;  /* 1.5 * 2^52: there doubles are the integers */
    double n = (x + magic) - magic, r = (x - n) * 0.6931471805599453, sum = 1.0, power;
    for (int k = 14; k >= 1; k--)
        sum = sum * r / k + 1.0;
    int64_t bits = ((int64_t)n + 1023) << 52;
    memcpy(&power, &bits, sizeof power);
    return sum * power;
}

/* cos and sin of |x| < 2^31. x = n pi/2 + r with |r| <= pi/4; n pi/2 is subtracted in parts of pi/2
 * that have 22 bits, so that n times a part is exact. Taylor polynomials of degree 16 and 15 leave
 * 5e-17. The four quarters of a turn swap the two and change signs. */
static void cos_sin(double x, float *cos, float *sin)
{
    const double magic = 6755399441055744.0;
    double n = (x * 0.6366197723675814 + magic) - magic;
    double r = x - n * 0x1.921fb8p+0;
    r -= n * -0x1.5dde98p-23;
    r -= n * 0x1.846988p-48;
    r -= n * 0x1.8cc51701b839ap-72;
    double square = r * r, c = 1.0, s = 1.0;
    for (int k = 15; k >= 1; k -= 2) {
        c = 1.0 - c * square * (1.0 / (k * (k + 1)));
        if (k > 1)
            s = 1.0 - s * square * (1.0 / (k * (k - 1)));
    }
    s *= r;
    int64_t quarter = (int64_t)n & 3;
    double swapped_c = quarter & 1 ? s : c, swapped_s = quarter & 1 ? c : s;
    *cos = (float)(quarter == 1 || quarter == 2 ? -swapped_c : swapped_c);
    *sin = (float)(quarter >= 2 ? -swapped_s : swapped_s);
}

/* theta^(2i/d), exponent and power rounded to float as in the models' training code. */
static float rope_power(float theta, ptrdiff_t i, ptrdiff_t pairs)
{
    float exponent = (float)(2 * i) / (float)(2 * pairs);
    return (float)exp2_of((double)exponent * log2_of(theta));
}

static void rope_powers(float theta, ptrdiff_t pairs, float *powers)
{
    for (ptrdiff_t i = 0; i < pairs; i++)
        powers[i] = rope_power(theta, i, pairs);
}

/* One column of the tables; the angle is a float, as in training. Returns a token whose angle is
 * too large, or -1; writes unless `cos` is NULL. */
static ptrdiff_t rope_column(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                             float frequency, float factor, float *cos, float *sin)
{
    for (ptrdiff_t t = 0; t < tokens; t++) {
        float angle = (float)positions[t] * frequency;
        if (!(angle > -2147483648.0f && angle < 2147483648.0f))
            return t;
        if (cos) {
            cos_sin((double)angle, cos + t * pairs, sin + t * pairs);
            cos[t * pairs] *= factor;
            sin[t * pairs] *= factor;
        }
    }
    return -1;
}

static ptrdiff_t rope_angles(const int64_t *positions, ptrdiff_t tokens, const float *frequencies,
                             ptrdiff_t pairs, float factor, float *cos, float *sin)
{
    for (ptrdiff_t i = 0; i < pairs; i++) {
        ptrdiff_t bad = rope_column(positions, tokens, pairs, frequencies[i], factor, NULL, NULL);
        if (bad >= 0)
            return bad;
    }
    for (ptrdiff_t i = 0; i < pairs; i++)
        rope_column(positions, tokens, pairs, frequencies[i], factor, cos + i, sin + i);
    return -1;
}

static ptrdiff_t rope_tables(const int64_t *positions, ptrdiff_t tokens, ptrdiff_t pairs,
                             float theta, float *cos, float *sin)
{
    for (ptrdiff_t i = 0; i < pairs; i++) {
        float frequency = 1.0f / rope_power(theta, i, pairs);
        ptrdiff_t bad = rope_column(positions, tokens, pairs, frequency, 1.0f, NULL, NULL);
        if (bad >= 0)
            return bad;
    }
    for (ptrdiff_t i = 0; i < pairs; i++)
        rope_column(positions, tokens, pairs, 1.0f / rope_power(theta, i, pairs), 1.0f, cos + i,
                    sin + i);
    return -1;
}
