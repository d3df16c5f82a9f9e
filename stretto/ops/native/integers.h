// Products of integer weights with tokens that are quantised to 8 bits in the same groups of inputs.
//
// Weights lie in panels of PANEL rows: for each group, the codes of four inputs (8 bits) or of two times four inputs (4 bits, the first
// four in the lower bits) of one row after another, so that every lane of a vector sums a row of its own. Codes are unsigned:
// 2^(bits − 1) larger than the value. Integer sums are exact, and groups are added in rising order, so a token's result is a function
// of that token alone.
#pragma once

#include <algorithm>

#include "abi.h"
#include "product.h"

namespace stretto {

constexpr int GROUP = 32, PANEL = 16;  // inputs that share a scale, rows that lie together
constexpr int HALVES = PANEL / LANES;

typedef uint8_t ByteVec __attribute__((vector_size(4 * LANES)));
typedef int8_t SmallVec __attribute__((vector_size(LANES)));

#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool HAS_UNSIGNED_DOT = false;  // signed codes only, so codes of 8 bits lose their offset in `dot4`
#else
constexpr bool HAS_UNSIGNED_DOT = true;
#endif

// Whether `dot4` multiplies four codes of each lane by one or two instructions.
#if defined(__AVX512VNNI__) || defined(__AVX512BW__) || (defined(__FMA__) && defined(__AVX2__)) || defined(__ARM_FEATURE_DOTPROD)
constexpr bool HAS_INT_DOT = true;
#else
constexpr bool HAS_INT_DOT = false;
#endif

// A quantised token: codes of −127 to 127, and for each group the scale and the sum of the codes.
struct IntRow {
    const int8_t* codes;
    const float* scale;
    const int32_t* sum;
};

inline void quantise_row(const float* x, int width, int8_t* codes, float* scale, int32_t* sum) {
    const Vec magic = splat(12582912.0f);  // 1.5 · 2^23: adding and subtracting it rounds to nearest, ties to even
    for (int k = 0; k < width; k += GROUP) {
        Vec most = {}, not_finite = {};  // the latter becomes NaN
        for (int i = 0; i < GROUP; i += LANES) {
            const Vec v = load(x + k + i), size = v < 0.0f ? -v : v;
            most = size > most ? size : most;
            not_finite += v * 0.0f;
        }
        float largest = 0.0f;
        for (int lane = 0; lane < LANES; lane++) largest = std::max(largest, most[lane]);
        const Vec inverse = splat(largest > 0.0f ? 127.0f / largest : 0.0f);
        IntVec total = {};
        for (int i = 0; i < GROUP; i += LANES) {
            const IntVec code = __builtin_convertvector((load(x + k + i) * inverse + magic) - magic, IntVec);
            const SmallVec small = __builtin_convertvector(code, SmallVec);
            std::memcpy(codes + k + i, &small, sizeof small);
            total += __builtin_convertvector(small, IntVec);  // not `code`, whose sum may overflow where an input is not finite
        }
        int32_t all = 0;
        for (int lane = 0; lane < LANES; lane++) all += total[lane];
        scale[k / GROUP] = largest / 127.0f + stretto::sum(not_finite);
        sum[k / GROUP] = all;
    }
}

inline float half(uint16_t bits) {
    const uint32_t sign = uint32_t(bits >> 15) << 31, exponent = bits >> 10 & 31, mantissa = bits & 1023;
    if (exponent == 0) {  // subnormal
        const float size = float(mantissa) * 0x1p-24f;
        return sign ? -size : size;
    }
    const uint32_t wide = sign | (exponent + 112) << 23 | mantissa << 13;
    float result;
    std::memcpy(&result, &wide, 4);
    return result;
}

inline Vec load_halves(const uint16_t* p) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__F16C__) && defined(__AVX2__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__ARM_NEON)
    const float32x4_t parts[2] = {vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))), vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4)))};
    Vec v;
    std::memcpy(&v, parts, sizeof v);
    return v;
#else
    Vec v;
    for (int i = 0; i < LANES; i++) v[i] = half(p[i]);
    return v;
#endif
}

// acc[lane] += Σ w[4 · lane + i] · x[i] for i < 4; x is four codes of a token. IS_SMALL: all of w are below 128.
// Without an unsigned product, other w count as w − 128.
template <bool IS_SMALL>
inline IntVec dot4(IntVec acc, ByteVec w, const int8_t* x) {
    [[maybe_unused]] int32_t four;
    std::memcpy(&four, x, 4);
#if defined(__AVX512VNNI__)
    return IntVec(_mm512_dpbusd_epi32(__m512i(acc), __m512i(w), _mm512_set1_epi32(four)));
#elif defined(__AVX512BW__)
    // sums of two products must fit into 16 bits, so the highest bit of the weights is multiplied on its own
    const __m512i x4 = _mm512_set1_epi32(four);
    acc += IntVec(_mm512_madd_epi16(_mm512_maddubs_epi16(__m512i(IS_SMALL ? w : w & 127), x4), _mm512_set1_epi16(1)));
    if constexpr (!IS_SMALL) acc += IntVec(_mm512_madd_epi16(_mm512_maddubs_epi16(__m512i(w >> 7), x4), _mm512_set1_epi16(128)));
    return acc;
#elif defined(__FMA__) && defined(__AVX2__)
    const __m256i x4 = _mm256_set1_epi32(four);
    acc += IntVec(_mm256_madd_epi16(_mm256_maddubs_epi16(__m256i(IS_SMALL ? w : w & 127), x4), _mm256_set1_epi16(1)));
    if constexpr (!IS_SMALL) acc += IntVec(_mm256_madd_epi16(_mm256_maddubs_epi16(__m256i(w >> 7), x4), _mm256_set1_epi16(128)));
    return acc;
#elif defined(__ARM_FEATURE_DOTPROD)
    const int8x16_t x4 = vreinterpretq_s8_s32(vdupq_n_s32(four));
    uint8x16_t codes[2];
    int32x4_t sums[2];
    std::memcpy(codes, &w, sizeof w);
    std::memcpy(sums, &acc, sizeof acc);
    for (int i = 0; i < 2; i++) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
        sums[i] = vusdotq_s32(sums[i], codes[i], x4);
#else
        sums[i] = vdotq_s32(sums[i], vreinterpretq_s8_u8(IS_SMALL ? codes[i] : veorq_u8(codes[i], vdupq_n_u8(128))), x4);
#endif
    }
    std::memcpy(&acc, sums, sizeof acc);
    return acc;
#else
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) acc[lane] += int32_t(w[4 * lane + i]) * x[i];
    return acc;
#endif
}

inline ByteVec load_codes(const uint8_t* p) {
    ByteVec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// out[t] = PANEL rows of w, from panel `index` on, times T tokens.
template <int BITS, int T>
inline void int_panel(const StrettoIntegers& w, size_t index, const IntRow* x, int num_groups, bool is_first, float out[TILE][PANEL]) {
    constexpr int BYTES = GROUP * PANEL * BITS / 8, LINE = 4 * PANEL;  // of a group, and of four codes of each row
    constexpr int OFFSET = BITS == 8 && !HAS_UNSIGNED_DOT ? 0 : -(1 << (BITS - 1));
    const uint8_t* codes = w.codes + index * num_groups * BYTES;
    const uint16_t* scales = w.scales + index * num_groups * PANEL;
    const int8_t* zeros = w.zeros ? w.zeros + index * num_groups * PANEL : nullptr;
    Vec acc[T][HALVES];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) acc[t][h] = Vec{};
    for (int g = 0; g < num_groups; g++, codes += BYTES) {
        if (is_first)
#pragma GCC unroll 8
            for (int line = 0; line < BYTES; line += 64) __builtin_prefetch(codes + AHEAD + line, 0, 2);
        IntVec sum[T][HALVES];
#pragma GCC unroll 8
        for (int t = 0; t < T; t++)
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) sum[t][h] = OFFSET * x[t].sum[g] - IntVec{};
#pragma GCC unroll 8
        for (int line = 0; line < BYTES / LINE; line++) {
#pragma GCC unroll 2
            for (int h = 0; h < HALVES; h++) {
                const ByteVec v = load_codes(codes + line * LINE + h * 4 * LANES);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) {
                    const int8_t* four = x[t].codes + g * GROUP + line * (32 / BITS);
                    if constexpr (BITS == 8) {
                        sum[t][h] = dot4<false>(sum[t][h], v, four);
                    } else {
                        sum[t][h] = dot4<true>(sum[t][h], v & 15, four);
                        sum[t][h] = dot4<true>(sum[t][h], v >> 4, four + 4);
                    }
                }
            }
        }
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            const Vec scale = load_halves(scales + g * PANEL + h * LANES);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) acc[t][h] = fma(__builtin_convertvector(sum[t][h], Vec), scale * splat(x[t].scale[g]), acc[t][h]);
            if (zeros) {
                SmallVec zero;
                std::memcpy(&zero, zeros + g * PANEL + h * LANES, sizeof zero);
                const Vec shift = scale * __builtin_convertvector(zero, Vec);
#pragma GCC unroll 8
                for (int t = 0; t < T; t++) acc[t][h] = fma(shift, splat(-x[t].scale[g] * float(x[t].sum[g])), acc[t][h]);
            }
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) store(out[t] + h * LANES, acc[t][h]);
}

template <int BITS, int T, class Put>
inline void int_tokens(const StrettoIntegers& w, size_t index, const IntRow* x, int first, int num, int num_groups, int row, int count, Put put) {
    if constexpr (T > 0) {
        for (; num >= T; first += T, num -= T) {
            float out[TILE][PANEL];
            int_panel<BITS, T>(w, index, x + first, num_groups, first == 0, out);
            for (int t = 0; t < T; t++) put(row, count, first + t, out[t]);
        }
        int_tokens<BITS, T - 1>(w, index, x, first, num, num_groups, row, count, put);
    }
}

// Calls put(row, count, token, values) for rows [begin, end) of a matrix that starts at row `before` of w; both are multiples of PANEL.
template <class Put>
inline void int_product(const StrettoIntegers& w, size_t before, int begin, int end, const IntRow* x, int num, int width, Put put) {
    for (int row = begin; row < end; row += PANEL) {
        const int count = std::min(PANEL, end - row);
        const size_t index = (before + row) / PANEL;
        if (w.bits == 8) int_tokens<8, TILE>(w, index, x, 0, num, width / GROUP, row, count, put);
        else int_tokens<4, TILE>(w, index, x, 0, num, width / GROUP, row, count, put);
    }
}

}  // namespace stretto
