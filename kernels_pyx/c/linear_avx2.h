/* The sums inside a block (linear_portable.h) with AVX2. */

enum { BLOCK_X = 4 };

typedef struct { __m256i low, high; } s16;

static inline v16 v16_from_s16(s16 a)
{
    return (v16){_mm256_cvtepi32_ps(a.low), _mm256_cvtepi32_ps(a.high)};
}

/* float_from_f16 for eight values. (F16C has an instruction for it, but is a feature of its own.) */
static inline __m256 v8_load_f16(const uint16_t *x)
{
    __m256i half = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    __m256i rest = _mm256_and_si256(half, _mm256_set1_epi32(0x7fff));
    __m256i sign = _mm256_slli_epi32(_mm256_sub_epi32(half, rest), 16);
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(rest), _mm256_set1_ps(0x1p-24f));
    __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(rest, 13),
                                    _mm256_set1_epi32((127 - 15) << 23));
    __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x0400), rest);
    __m256i special = _mm256_cmpgt_epi32(rest, _mm256_set1_epi32(0x7bff));
    bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(small), is_small);
    bits = _mm256_or_si256(bits, _mm256_and_si256(special, _mm256_set1_epi32(0x7f800000)));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, sign));
}

static inline v16 v16_load_f16(const uint16_t *x)
{
    return (v16){v8_load_f16(x), v8_load_f16(x + 8)};
}

static inline __m256i broadcast_four(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm256_set1_epi32(four);
}

/* maddubs multiplies unsigned with signed bytes and adds neighbours to int16, where it saturates.
 * With the weight's sign moved to x the sum of two products is at most 2 * 128 * 127 = 32,512, also
 * for a weight of -128: x is never -128. (The other way round, 128 * 128 * 2 would not fit.) */
TILE_FUNCTION void q8_0_block(s16 *sum, const int nx, const int8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    const __m256i ones = _mm256_set1_epi16(1);
    (void)start;
    UNROLL for (int i = 0; i < nx; i++)
        sum[i].low = sum[i].high = _mm256_setzero_si256();
    UNROLL for (int c = 0; c < 8; c++) {
        __m256i w0 = _mm256_loadu_si256((const __m256i *)(codes + 64 * c));
        __m256i w1 = _mm256_loadu_si256((const __m256i *)(codes + 64 * c + 32));
        __m256i size0 = _mm256_abs_epi8(w0), size1 = _mm256_abs_epi8(w1);
        UNROLL for (int i = 0; i < nx; i++) {
            __m256i four = broadcast_four(x + 32 * i + 4 * c);
            __m256i two0 = _mm256_maddubs_epi16(size0, _mm256_sign_epi8(four, w0));
            __m256i two1 = _mm256_maddubs_epi16(size1, _mm256_sign_epi8(four, w1));
            sum[i].low = _mm256_add_epi32(sum[i].low, _mm256_madd_epi16(two0, ones));
            sum[i].high = _mm256_add_epi32(sum[i].high, _mm256_madd_epi16(two1, ones));
        }
    }
}

/* Codes of four bits have no sign, and 8 sums of two products, 8 * 2 * 15 * 127 = 30,480, fit an
 * int16: one widening at the end does for the whole block. */
TILE_FUNCTION void q4_0_block(s16 *sum, const int nx, const uint8_t *codes, const int8_t *x,
                              const int32_t *start)
{
    const __m256i ones = _mm256_set1_epi16(1), low_bits = _mm256_set1_epi8(15);
    __m256i narrow[BLOCK_X][2];
    UNROLL for (int i = 0; i < nx; i++)
        narrow[i][0] = narrow[i][1] = _mm256_setzero_si256();
    UNROLL for (int g = 0; g < 4; g++)
        UNROLL for (int half = 0; half < 2; half++) {
            __m256i two = _mm256_loadu_si256((const __m256i *)(codes + 64 * g + 32 * half));
            __m256i low = _mm256_and_si256(two, low_bits);
            __m256i high = _mm256_and_si256(_mm256_srli_epi16(two, 4), low_bits);
            UNROLL for (int i = 0; i < nx; i++) {
                __m256i first = broadcast_four(x + 32 * i + 4 * g);
                __m256i second = broadcast_four(x + 32 * i + 16 + 4 * g);
                narrow[i][half] = _mm256_add_epi16(narrow[i][half],
                                                   _mm256_maddubs_epi16(low, first));
                narrow[i][half] = _mm256_add_epi16(narrow[i][half],
                                                   _mm256_maddubs_epi16(high, second));
            }
        }
    UNROLL for (int i = 0; i < nx; i++) {
        __m256i from = _mm256_set1_epi32(start[i]);
        sum[i].low = _mm256_add_epi32(from, _mm256_madd_epi16(narrow[i][0], ones));
        sum[i].high = _mm256_add_epi32(from, _mm256_madd_epi16(narrow[i][1], ones));
    }
}
