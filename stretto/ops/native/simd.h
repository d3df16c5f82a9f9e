// Vector types of the compiler's extension: one source for AVX2, AVX-512 and NEON.
//
// A reduction always adds LANES partial sums in rising order of k, then the partial sums as a fixed tree (`sum`). Nothing here
// depends on the number of tokens in a step, so a token's result does not either.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>

#if defined(__FMA__) && defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace stretto {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Vec __attribute__((vector_size(4 * LANES)));
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef int32_t IntVec __attribute__((vector_size(4 * LANES)));
typedef uint32_t BitVec __attribute__((vector_size(4 * LANES)));
typedef uint16_t HalfVec __attribute__((vector_size(2 * LANES)));

struct bfloat16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }

inline float widen(bfloat16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float result;
    std::memcpy(&result, &bits, 4);
    return result;
}

inline void narrow(float x, float& to) { to = x; }

// Round to nearest, ties to even, as torch does, except that a NaN whose lower bits are nearly all ones (from 0x7fff8000) becomes a zero.
// Arithmetic by itself produces no such NaN.
inline void narrow(float x, bfloat16& to) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    to.bits = uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const bfloat16* p) {
#if defined(__AVX512F__)  // GCC 12 generates four instructions for the generic form below
    BitVec bits = BitVec(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))) << 16;
#elif defined(__FMA__) && defined(__AVX2__)
    BitVec bits = BitVec(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))) << 16;
#else
    HalfVec half;
    std::memcpy(&half, p, sizeof half);
    BitVec bits = __builtin_convertvector(half, BitVec) << 16;
#endif
    Vec v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

// The last num < LANES elements, followed by zeros.
template <class W>
inline Vec load_part(const W* p, int num) {
    Vec v = {};
    for (int i = 0; i < num; i++) v[i] = widen(p[i]);
    return v;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec splat(float x) { return x - Vec{}; }

// a · b + c with one rounding if the processor has the instruction. Written explicitly, with contraction turned off
// (-ffp-contract=off), because compilers decide case by case: GCC tuned for Zen fuses in some instances of a template and not in
// others, and results would depend on the batch.
inline Vec fma(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__) && defined(__AVX2__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

[[gnu::always_inline]] inline Vec4 fold(Vec v) {
#if defined(__AVX512F__)
    Vec8 half = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    Vec8 half = v;
#endif
    return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

[[gnu::always_inline]] inline Vec4 pairs(Vec4 a, Vec4 b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

// Sums of four vectors at once, each as the same tree as in `sum`.
[[gnu::always_inline]] inline Vec4 sum4(Vec a, Vec b, Vec c, Vec d) { return pairs(pairs(fold(a), fold(b)), pairs(fold(c), fold(d))); }

inline float sum(Vec v) {
    Vec4 q = fold(v);
    return (q[0] + q[1]) + (q[2] + q[3]);
}

// e^x to about 1 ulp (Cephes' expf: range reduction by ln 2 in two parts, polynomial of degree 6). Below −87: about 1e-38.
inline Vec exp(Vec x) {
    const Vec low = splat(-87.33f), high = splat(88.37f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    const Vec magic = splat(12582912.0f);  // 1.5 · 2^23: after adding it, the low bits are the nearest integer
    Vec shifted = fma(x, splat(1.44269504f), magic);
    Vec n = shifted - magic;
    Vec r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.9875691500e-4f);
    for (float coefficient : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
        p = fma(p, r, splat(coefficient));
    p = fma(p * r, r, r) + 1.0f;
    IntVec exponent;
    std::memcpy(&exponent, &shifted, sizeof exponent);
    IntVec bits;
    std::memcpy(&bits, &p, sizeof bits);
    bits += exponent << 23;  // the shift drops the bits of the magic number
    std::memcpy(&p, &bits, sizeof p);
    return p;
}

inline Vec sigmoid(Vec x) { return 1.0f / (1.0f + exp(-x)); }

// Applies f to LANES elements of x[0, n) at a time, in place; the tail uses the same arithmetic.
template <class F>
inline void map(float* x, int n, F f) {
    int i = 0;
    for (; i + LANES <= n; i += LANES) store(x + i, f(load(x + i), i));
    if (i < n) {
        Vec v = f(load_part(x + i, n - i), i);
        for (int j = i; j < n; j++) x[j] = v[j - i];
    }
}

}  // namespace stretto
