// Products of a row-major weight with a few token rows, norms, rotation, softmax, and weighted sums of values.
#pragma once

#include <cmath>

#include "simd.h"

namespace stretto {

constexpr int AHEAD = 4096;  // prefetch distance in bytes: blocks are too short for the processor's own prefetcher

#if defined(__AVX512F__)
constexpr int TILE = 6;  // tokens of a register tile: 4 · TILE sums and the operands fit into the vector registers
#else
constexpr int TILE = 3;
#endif
constexpr int NEAR = 2 * TILE;  // tokens that stay in the first-level cache while the rows of a block are read (our choice)

// Keeps a value in its register. GCC would load it again for each use, and loads limit the speed of a tile.
inline void keep(Vec& v) {
#if defined(__AVX512F__)
    asm("" : "+v"(v));
#elif defined(__AVX__)
    asm("" : "+x"(v));
#endif
}

// acc[r][t] += w[r][k, k + LANES) · x[t][k, k + LANES)
template <int R, int T, class W>
inline void column(const W* __restrict w, size_t stride, const float* const* xs, int k, Vec acc[R][T]) {
    Vec x[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        x[t] = load(xs[t] + k);
        keep(x[t]);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
        Vec row = load(w + r * stride + k);
#pragma GCC unroll 8
        for (int t = 0; t < T; t++) acc[r][t] = fma(row, x[t], acc[r][t]);
    }
}

// out[t][r] = w[r] · x[t] for R weight rows (8, 4 or 1) and T tokens; `is_first`: the rows are read from memory, not from a cache.
// All loops over R and T are unrolled, or the compiler would keep the sums in memory.
template <int R, int T, class W>
inline void tile(const W* __restrict w, size_t stride, const float* const* x, int width, bool is_first, float out[TILE][8]) {
    constexpr int LINE = 64 / int(sizeof(W));  // elements of a cache line
    constexpr int VECTORS = LINE / LANES > 0 ? LINE / LANES : 1;
    Vec acc[R][T];
    const float* xs[T];
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        xs[t] = x[t];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) acc[r][t] = Vec{};
    }
    int k = 0;
    const int ahead = AHEAD / int(sizeof(W)) < width ? AHEAD / int(sizeof(W)) : width;
    const ptrdiff_t next_tile = ptrdiff_t(R * stride) - width;
    for (; k + VECTORS * LANES <= width; k += VECTORS * LANES) {
        if (is_first) {  // into the second-level cache, which has more fill buffers; after the end of a row comes the row R below
            const W* soon = w + k + ahead + (k + ahead < width ? 0 : next_tile);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) __builtin_prefetch(soon + r * stride, 0, 2);
        }
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) column<R, T>(w, stride, xs, k + v * LANES, acc);
    }
    for (; k + LANES <= width; k += LANES) column<R, T>(w, stride, xs, k, acc);
    if (k < width) {
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec row = load_part(w + r * stride + k, width - k);
#pragma GCC unroll 8
            for (int t = 0; t < T; t++) acc[r][t] = fma(row, load_part(xs[t] + k, width - k), acc[r][t]);
        }
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
        if constexpr (R == 1) {
            out[t][0] = sum(acc[0][t]);
        } else {
#pragma GCC unroll 2
            for (int r = 0; r < R; r += 4) {
                Vec4 sums = sum4(acc[r][t], acc[r + 1][t], acc[r + 2][t], acc[r + 3][t]);
                std::memcpy(out[t] + r, &sums, sizeof sums);
            }
        }
    }
}

template <int R, int T, class W, class Put>
inline void tiles(const W* w, size_t stride, int row, const float* const* x, int first, int width, Put put) {
    float out[TILE][8];
    tile<R, T>(w + row * stride, stride, x + first, width, first == 0, out);
    for (int t = 0; t < T; t++) put(row, R, first + t, out[t]);
}

template <int R, int T, class W, class Put>
inline void rest(const W* w, size_t stride, int row, const float* const* x, int first, int num, int width, Put put) {
    if constexpr (T > 0) {
        if (num == T) tiles<R, T>(w, stride, row, x, first, width, put);
        else rest<R, T - 1>(w, stride, row, x, first, num, width, put);
    }
}

// R weight rows for tokens [t, last).
template <int R, class W, class Put>
inline void rows_of(const W* w, size_t stride, int row, const float* const* x, int t, int last, int width, Put put) {
    for (; t + TILE <= last; t += TILE) tiles<R, TILE>(w, stride, row, x, t, width, put);
    rest<R, TILE - 1>(w, stride, row, x, t, last - t, width, put);
}

// Calls put(row, count, token, values) with values[0, count) = w[row, row + count) · x[token], for rows [begin, end) and all tokens.
// Each weight row is read from memory once, for the first few tokens; for later tokens it is in the second-level cache.
template <class W, class Put>
inline void product(const W* w, size_t stride, int begin, int end, const float* const* x, int num, int width, Put put) {
    if (num == 1) {  // with one token, sums of four rows are too few to fill the pipelines
        for (; begin + 8 <= end; begin += 8) tiles<8, 1>(w, stride, begin, x, 0, width, put);
    }
    for (int first = 0; first < num; first += NEAR) {
        const int last = first + NEAR < num ? first + NEAR : num;
        int row = begin;
        for (; row + 4 <= end; row += 4) rows_of<4>(w, stride, row, x, first, last, width, put);
        for (; row < end; row++) rows_of<1>(w, stride, row, x, first, last, width, put);
    }
}

// out = x / rms(x) · weight
template <class W>
inline void rms_norm(const float* x, const W* weight, int width, float eps, float* out) {
    Vec acc = {};
    int i = 0;
    for (; i + LANES <= width; i += LANES) acc += load(x + i) * load(x + i);
    if (i < width) {
        Vec part = load_part(x + i, width - i);
        acc += part * part;
    }
    float scale = 1.0f / std::sqrt(sum(acc) / width + eps);
    for (int j = 0; j < width; j++) out[j] = x[j] * scale * widen(weight[j]);
}

// Rotates channel pairs i and i + half; channels from 2·half on are not changed.
inline void rotate(float* x, const float* cosine, const float* sine, int half) {
    for (int i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cosine[i] - second * sine[i];
        x[i + half] = second * cosine[i] + first * sine[i];
    }
}

inline float highest_of(const float* x, int num) {
    Vec best = splat(x[0]);
    int i = 0;
    for (; i + LANES <= num; i += LANES) {
        Vec v = load(x + i);
        best = v > best ? v : best;
    }
    float highest = x[0];
    for (int lane = 0; lane < LANES; lane++) highest = best[lane] > highest ? best[lane] : highest;
    for (; i < num; i++) highest = x[i] > highest ? x[i] : highest;
    return highest;
}

// Overwrites scores with e^(score − highest); returns their sum.
inline float softmax(float* scores, int num) {
    const Vec highest = splat(highest_of(scores, num));
    Vec acc = {};
    int i = 0;
    for (; i + LANES <= num; i += LANES) {
        Vec e = exp(load(scores + i) - highest);
        store(scores + i, e);
        acc += e;
    }
    if (i < num) {
        Vec e = exp(load_part(scores + i, num - i) - highest);
        for (int lane = 0; lane < num - i; lane++) scores[i + lane] = e[lane];
        acc += load_part(scores + i, num - i);
    }
    return sum(acc);
}

// out[h][c] += Σ_t p[h][t] · v[t][c] for NH heads and NV vectors of channels.
template <int NH, int NV, class W>
inline void weigh(const W* v, size_t stride, int num, const float* p, size_t p_stride, float* out, size_t out_stride) {
    Vec acc[NH][NV];
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 8
        for (int c = 0; c < NV; c++) acc[h][c] = load(out + h * out_stride + c * LANES);
    for (int t = 0; t < num; t++) {
#pragma GCC unroll 8
        for (int c = 0; c < NV; c++) {
            Vec value = load(v + t * stride + c * LANES);
#pragma GCC unroll 8
            for (int h = 0; h < NH; h++) acc[h][c] = fma(value, splat(p[h * p_stride + t]), acc[h][c]);
        }
    }
#pragma GCC unroll 8
    for (int h = 0; h < NH; h++)
#pragma GCC unroll 8
        for (int c = 0; c < NV; c++) store(out + h * out_stride + c * LANES, acc[h][c]);
}

template <int NH, class W>
inline void weigh_heads(const W* v, size_t stride, int num, const float* p, size_t p_stride, int width, float* out) {
    int c = 0;
    for (; c + 4 * LANES <= width; c += 4 * LANES) weigh<NH, 4>(v + c, stride, num, p, p_stride, out + c, width);
    for (; c + LANES <= width; c += LANES) weigh<NH, 1>(v + c, stride, num, p, p_stride, out + c, width);
    for (; c < width; c++)
        for (int h = 0; h < NH; h++)
            for (int t = 0; t < num; t++) out[h * width + c] += p[h * p_stride + t] * widen(v[t * stride + c]);
}

}  // namespace stretto
