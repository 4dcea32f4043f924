/* The sums inside a block (linear_portable.h) with AVX-512 VNNI. */

enum { BLOCK_X = 8 };

typedef __m512i s16;

static inline v16 v16_from_s16(s16 a) { return _mm512_cvtepi32_ps(a); }
static inline v16 v16_load_f16(const uint16_t *x)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)x));
}

/* Four values of a row of x, for every row of the panel. */
static inline __m512i broadcast_four(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

/* vpdpbusd adds four products of an unsigned and a signed byte to each int32. A code with its sign
 * bit flipped is, unsigned, the code + 128, also where it is -128; start takes the 128 away. Not
 * vpdpbusds, which saturates. */
TILE_FUNCTION void q8_0_block(s16 *sum, const int nx, const int8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    UNROLL for (int i = 0; i < nx; i++)
        sum[i] = _mm512_set1_epi32(start[i]);
    UNROLL for (int c = 0; c < 8; c++) {
        __m512i w = _mm512_loadu_si512(codes + 64 * c);
        w = _mm512_xor_si512(w, _mm512_set1_epi8(-128));
        UNROLL for (int i = 0; i < nx; i++)
            sum[i] = _mm512_dpbusd_epi32(sum[i], w, broadcast_four(x + 32 * i + 4 * c));
    }
}

TILE_FUNCTION void q4_0_block(s16 *sum, const int nx, const uint8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    const __m512i low_bits = _mm512_set1_epi8(15);
    UNROLL for (int i = 0; i < nx; i++)
        sum[i] = _mm512_set1_epi32(start[i]);
    UNROLL for (int g = 0; g < 4; g++) {
        __m512i two = _mm512_loadu_si512(codes + 64 * g);
        __m512i low = _mm512_and_si512(two, low_bits);
        __m512i high = _mm512_and_si512(_mm512_srli_epi16(two, 4), low_bits);
        UNROLL for (int i = 0; i < nx; i++) {
            sum[i] = _mm512_dpbusd_epi32(sum[i], low, broadcast_four(x + 32 * i + 4 * g));
            sum[i] = _mm512_dpbusd_epi32(sum[i], high, broadcast_four(x + 32 * i + 16 + 4 * g));
        }
    }
}
