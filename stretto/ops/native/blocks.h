// Products of fp32 matrices whose operands lie in the second-level cache, for training (train.cpp).
//
// A tile of MR rows and NR columns of the result stays in registers while k runs in rising order. An element is therefore a sum whose
// order depends on neither the other rows nor the number of threads.
#pragma once

#include <algorithm>
#include <new>

#include "simd.h"

namespace stretto {

constexpr int NR = 2 * LANES;  // columns of a register tile
#if defined(__AVX512F__)
constexpr int MR = 12;  // rows: 2 · MR sums and the operands fit into the vector registers
#elif defined(__FMA__) && defined(__AVX2__)
constexpr int MR = 6;
#else
constexpr int MR = 4;
#endif
constexpr int DEPTH = 256;          // columns of a block: NR columns of the other operand, DEPTH deep, fit into the first-level cache
constexpr int LINE = DEPTH + 16;    // distance of the rows of a block; powers of two would fall into few sets of the cache

// Element (row, column) is at[column / DEPTH * block + row * line + column % DEPTH].
struct View {
    float* at;
    size_t line, block;
    float* place(size_t row, size_t column) const { return at + column / DEPTH * block + row * line + column % DEPTH; }
    // The columns from `column` on, up to the end of its block.
    View from(size_t column) const { return {place(0, column), line, block}; }
};

inline View matrix(float* at, size_t width) { return {at, width, DEPTH}; }

// A buffer of `rows` rows in blocks of DEPTH columns with rows of LINE.
inline View blocked(float* at, size_t rows) { return {at, LINE, rows * LINE}; }
inline size_t blocked_size(size_t rows, size_t width) { return (width + DEPTH - 1) / DEPTH * rows * LINE; }

inline void store_part(float* to, Vec v, int num) {
    if (num >= LANES) store(to, v);
    else std::memcpy(to, &v, num * sizeof(float));
}

inline Vec load_up_to(const float* from, int num) { return num >= LANES ? load(from) : load_part(from, num); }

// c[m][n] (+)= Σ_k a(m, k) · b[k][n] for M rows and at most NR columns. a(m, k): a[m · LINE + k], or a[k · LINE + m] if TRANSPOSED.
template <int M, bool TRANSPOSED, bool ADD>
inline void register_tile(const float* a, const float* b, size_t b_line, int depth, float* c, size_t c_line, int columns) {
    Vec acc[M][2];
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = Vec{};
    for (int k = 0; k < depth; k++, b += b_line) {
        const Vec left = load(b), right = load(b + LANES);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const Vec x = splat(TRANSPOSED ? a[m] : a[m * LINE]);
            acc[m][0] = fma(x, left, acc[m][0]);
            acc[m][1] = fma(x, right, acc[m][1]);
        }
        a += TRANSPOSED ? LINE : 1;
    }
#pragma GCC unroll 16
    for (int m = 0; m < M; m++) {
#pragma GCC unroll 2
        for (int h = 0; h < 2; h++) {
            float* to = c + m * c_line + h * LANES;
            const int num = columns - h * LANES;
            if (num <= 0) continue;
            store_part(to, ADD ? load_up_to(to, num) + acc[m][h] : acc[m][h], num);
        }
    }
}

template <int M, bool TRANSPOSED, bool ADD>
inline void rest_tile(int rows, const float* a, const float* b, size_t b_line, int depth, float* c, size_t c_line, int columns) {
    if constexpr (M > 0) {
        if (rows == M) register_tile<M, TRANSPOSED, ADD>(a, b, b_line, depth, c, c_line, columns);
        else rest_tile<M - 1, TRANSPOSED, ADD>(rows, a, b, b_line, depth, c, c_line, columns);
    }
}

// NR columns of c, all rows.
template <bool TRANSPOSED, bool ADD>
inline void column_panel(const float* a, int rows, const float* b, size_t b_line, int depth, float* c, size_t c_line, int columns) {
    const size_t a_step = TRANSPOSED ? MR : MR * LINE;
    int row = 0;
    for (; row + MR <= rows; row += MR, a += a_step) register_tile<MR, TRANSPOSED, ADD>(a, b, b_line, depth, c + row * c_line, c_line, columns);
    if (row < rows) rest_tile<MR - 1, TRANSPOSED, ADD>(rows - row, a, b, b_line, depth, c + row * c_line, c_line, columns);
}

// Panels of NR columns of a weight [width, depth] for products x · wᵀ, or of [depth, width] for x · w; zeros after the last column.
// `line`: distance of the weight's rows.
inline size_t packed_size(size_t width, size_t depth) { return (width + NR - 1) / NR * NR * depth; }

inline void pack_transposed(const float* w, size_t line, int width, int depth, float* to) {
    for (int n = 0; n < width; n += NR, to += size_t(NR) * depth) {
        const int num = std::min(NR, width - n);
        for (int j = 0; j < NR; j++)
            for (int k = 0; k < depth; k++) to[size_t(k) * NR + j] = j < num ? w[size_t(n + j) * line + k] : 0.0f;
    }
}

inline void pack(const float* w, size_t line, int width, int depth, float* to) {
    for (int n = 0; n < width; n += NR) {
        const int num = std::min(NR, width - n);
        for (int k = 0; k < depth; k++, to += NR) {
            std::memcpy(to, w + k * line + n, num * sizeof(float));
            if (num < NR) std::memset(to + num, 0, (NR - num) * sizeof(float));
        }
    }
}

// c [rows, width] = a [rows, depth] · packed, or that added to c; a is blocked. `panel`: distance of the panels, at least NR · depth.
inline void product(View a, int rows, int depth, const float* packed, size_t panel, int width, View c, bool adds = false) {
    for (int n = 0; n < width; n += NR, packed += panel) {
        for (int k = 0; k < depth; k += DEPTH) {
            const auto compute = k == 0 && !adds ? column_panel<false, false> : column_panel<false, true>;
            compute(a.place(0, k), rows, packed + size_t(k) * NR, NR, std::min(DEPTH, depth - k), c.place(0, n), c.line, std::min(NR, width - n));
        }
    }
}

// c [rows, width] (+)= aᵀ · b, for a [depth, rows] and b [depth, width], both blocked; row-major c.
template <bool ADD>
inline void transposed_product(View a, int rows, int depth, View b, int width, float* c) {
    for (int n = 0; n < width; n += NR)
        for (int m = 0; m < rows; m += DEPTH)
            column_panel<true, ADD>(a.place(0, m), std::min(DEPTH, rows - m), b.place(0, n), LINE, depth, c + size_t(m) * width + n, width,
                                    std::min(NR, width - n));
}

struct Buffer {
    float* at;
    explicit Buffer(size_t num) : at(static_cast<float*>(::operator new(std::max<size_t>(num, 1) * sizeof(float), std::align_val_t(64)))) {}
    Buffer(const Buffer&) = delete;
    ~Buffer() { ::operator delete(at, std::align_val_t(64)); }
};

// The products of an expert layer and of attention in fp32, for one thread. Views are blocked; the right operand is packed in panels of
// columns. `HalfProducts` in matrix.h has the same functions in bf16.
struct WideProducts {
    using Number = float;
    using Packing = Buffer;
    static constexpr int QUERIES = 48;  // of attention, whose scores lie in the cache; a multiple of MR
    struct Weight {
        const float* at;
        size_t panel;
        Weight columns_from(size_t begin) const { return {at + begin / NR * panel, panel}; }
        Weight depth_from(size_t begin) const { return {at + begin * NR, panel}; }
    };

    static size_t size(size_t rows, size_t width) { return blocked_size(rows, width); }
    static View view(float* at, size_t rows, size_t) { return blocked(at, rows); }
    static size_t weight_size(size_t width, size_t depth) { return packed_size(width, depth); }
    static Weight weight(const float* at, size_t depth) { return {at, NR * depth}; }
    // A weight [width, depth], for x · wᵀ, or [depth, width], for x · w. `line`: distance of its rows.
    static void pack_rows(const float* w, size_t line, int width, int depth, float* to) { pack_transposed(w, line, width, depth, to); }
    static void pack_columns(const float* w, size_t line, int width, int depth, float* to) { pack(w, line, width, depth, to); }

    WideProducts(size_t, size_t) {}
    // c [rows, width] (+)= a · w
    void multiply(View a, int rows, int depth, Weight w, int width, View c, bool adds = false) {
        product(a, rows, depth, w.at, w.panel, width, c, adds);
    }
    // c [rows, width] (+)= aᵀ · b for a [depth, rows] and b [depth, width]; row-major c.
    template <bool ADD>
    void multiply_transposed(View a, int rows, int depth, View b, int width, float* c) {
        transposed_product<ADD>(a, rows, depth, b, width, c);
    }
};

}  // namespace stretto
