/* What AVX2 and AVX-512 share: the sums of lanes, once each has added lanes i and i + 8. */

static inline __m128 v16_quarters(v16 a)
{
    __m256 halves = v16_halves(a);
    return _mm_add_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));
}

static inline float v16_sum(v16 a)
{
    __m128 x = v16_quarters(a);
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

static inline void v16_sum4(float *sums, v16 a, v16 b, v16 c, v16 d)
{
    __m128 w = v16_quarters(a), x = v16_quarters(b), y = v16_quarters(c), z = v16_quarters(d);
    /* movelh and movehl put lanes 0, 1 and lanes 2, 3 of two vectors together. */
    __m128 ab = _mm_add_ps(_mm_movelh_ps(w, x), _mm_movehl_ps(x, w));
    __m128 cd = _mm_add_ps(_mm_movelh_ps(y, z), _mm_movehl_ps(z, y));
    _mm_storeu_ps(sums, _mm_hadd_ps(ab, cd));
}
