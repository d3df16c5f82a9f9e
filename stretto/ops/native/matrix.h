// Products in bf16 for training, with the matrix unit (AMX) or, without one, with vectors (AVX512_BF16): operands and results are in fp32,
// operands are rounded to bf16 when they are packed, as torch's autocast rounds them, and sums are in fp32. Numbers below 1.2e-38 count as
// zero.
//
// An element is a sum over k in rising order, TILE_DEPTH numbers at a time, so it depends on neither the other rows nor the number of
// threads.
#pragma once

#include "blocks.h"
#include "tiles.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512BF16__)
#define STRETTO_BF16

namespace stretto {

constexpr size_t TILE_SIZE = TILE_ROWS * TILE_DEPTH;  // numbers of a packed tile
constexpr int PART = 32 * TILE_DEPTH;                 // depth of the part of an operand that stays in the second-level cache
constexpr int PART_COLUMNS = 32 * TILE_ROWS;          // columns of such a part

inline size_t tiles_of(size_t num, size_t size) { return (num + size - 1) / size; }

// Operand of a product, as lines over k: rows of the left operand, columns of the right one. Line i has its number k at
// at[i · stride + k] if it is contiguous, else at at[k · stride + i].
struct Operand {
    const float* at;
    size_t stride;
    bool is_contiguous;
    Operand from(size_t line, size_t k) const {
        return {at + (is_contiguous ? line * stride + k : k * stride + line), stride, is_contiguous};
    }
};

inline Vec load_first(const float* from, int num) {
    return num >= LANES ? load(from) : num <= 0 ? Vec{} : Vec(_mm512_maskz_loadu_ps(__mmask16((1u << num) - 1), from));
}

// 32 numbers rounded to bf16, in the bits of 16.
inline Vec rounded(Vec low, Vec high) {
    const auto both = _mm512_cvtne2ps_pbh(high, low);
    Vec v;
    std::memcpy(&v, &both, sizeof v);
    return v;
}

// Packs `num` <= TILE_ROWS lines and `depth` <= TILE_DEPTH numbers of each into a tile, and fills it with zeros. The left operand's tile
// has a row for each line; the right operand's has a row for each pair of k.
template <bool IS_LEFT>
inline void pack_tile(Operand from, int num, int depth, bfloat16* to) {
    Vec square[TILE_ROWS];
    if (from.is_contiguous) {
#pragma GCC unroll 16
        for (int i = 0; i < TILE_ROWS; i++) {
            const float* line = from.at + i * from.stride;
            square[i] = i < num ? rounded(load_first(line, depth), load_first(line + LANES, depth - LANES)) : Vec{};
        }
    } else {
        const __m512i side_by_side = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19,
                                                      3, 18, 2, 17, 1, 16, 0);
#pragma GCC unroll 16
        for (int i = 0; i < TILE_ROWS; i++) {
            const float* pair = from.at + 2 * i * from.stride;
            const Vec low = 2 * i < depth ? load_first(pair, num) : Vec{};
            const Vec high = 2 * i + 1 < depth ? load_first(pair + from.stride, num) : Vec{};
            square[i] = Vec(_mm512_castsi512_ps(_mm512_permutexvar_epi16(side_by_side, _mm512_castps_si512(__m512(rounded(low, high))))));
        }
    }
    if (IS_LEFT != from.is_contiguous) transpose(square);
    std::memcpy(to, square, sizeof square);
}

// Numbers of `num` packed lines.
inline size_t packed_numbers(size_t num, size_t depth) { return tiles_of(num, TILE_ROWS) * tiles_of(depth, TILE_DEPTH) * TILE_SIZE; }

// Packs lines [begin, end) of an operand of `num` lines, where `begin` is a multiple of TILE_ROWS; `to`: the tiles of all lines.
template <bool IS_LEFT>
inline void pack_lines(Operand from, int begin, int end, int num, int depth, bfloat16* to) {
    const size_t num_tiles = tiles_of(depth, TILE_DEPTH);
    auto pack = [&](int i, int k) {
        bfloat16* tile = to + (i / TILE_ROWS * num_tiles + k / TILE_DEPTH) * TILE_SIZE;
        pack_tile<IS_LEFT>(from.from(i, k), std::min(TILE_ROWS, num - i), std::min(TILE_DEPTH, depth - k), tile);
    };
    // in the order in which the numbers lie in memory: rows of a large matrix are pages apart
    if (from.is_contiguous) {
        for (int i = begin; i < end; i += TILE_ROWS)
            for (int k = 0; k < depth; k += TILE_DEPTH) pack(i, k);
    } else {
        for (int k = 0; k < depth; k += TILE_DEPTH)
            for (int i = begin; i < end; i += TILE_ROWS) pack(i, k);
    }
}

// Packed lines, of which every TILE_ROWS begin `step` numbers after the ones before.
struct Packed {
    const bfloat16* at;
    size_t step;
};

#if defined(STRETTO_TILES)

// Whether this process may multiply in bf16.
inline bool has_bf16() { return has_tiles(); }

// M × N tiles of c (+)= a · b. Tiles 0 to 3 are sums, 4 and 5 of the left operand, 6 and 7 of the right one.
template <int M, int N, bool ADD>
inline void tile_block(Packed a, Packed b, int num_tiles, float* c, size_t line) {
    const size_t bytes = line * sizeof *c, tile = sizeof(bfloat16[TILE_SIZE]) / TILE_ROWS;
    float *right = c + TILE_ROWS, *below = c + TILE_ROWS * line, *last = below + TILE_ROWS;
    if constexpr (ADD) {
        tile_load<0>(c, bytes);
        if constexpr (N > 1) tile_load<1>(right, bytes);
        if constexpr (M > 1) tile_load<2>(below, bytes);
        if constexpr (M > 1 && N > 1) tile_load<3>(last, bytes);
    } else {
        tile_zero<0>();
        if constexpr (N > 1) tile_zero<1>();
        if constexpr (M > 1) tile_zero<2>();
        if constexpr (M > 1 && N > 1) tile_zero<3>();
    }
    for (int k = 0; k < num_tiles; k++, a.at += TILE_SIZE, b.at += TILE_SIZE) {
        tile_load<4>(a.at, tile);
        tile_load<6>(b.at, tile);
        if constexpr (N > 1) tile_load<7>(b.at + b.step, tile);
        if constexpr (M > 1) tile_load<5>(a.at + a.step, tile);
        tile_multiply<0, 4, 6>();
        if constexpr (N > 1) tile_multiply<1, 4, 7>();
        if constexpr (M > 1) tile_multiply<2, 5, 6>();
        if constexpr (M > 1 && N > 1) tile_multiply<3, 5, 7>();
    }
    tile_store<0>(c, bytes);
    if constexpr (N > 1) tile_store<1>(right, bytes);
    if constexpr (M > 1) tile_store<2>(below, bytes);
    if constexpr (M > 1 && N > 1) tile_store<3>(last, bytes);
}

#else

inline bool has_bf16() { return true; }

// STRIP rows and N tiles' columns of c (+)= a · b: with N = 2 the sums and a row of b fill two thirds of the registers.
constexpr int STRIP = 8;
template <int N, bool ADD>
inline void strip(const bfloat16* a, Packed b, int num_tiles, float* c, size_t line) {
    __m512 sums[STRIP][N];
#pragma GCC unroll 8
    for (int row = 0; row < STRIP; row++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) sums[row][n] = ADD ? _mm512_loadu_ps(c + row * line + n * TILE_ROWS) : _mm512_setzero_ps();
    for (int k = 0; k < num_tiles; k++, a += TILE_SIZE, b.at += TILE_SIZE) {
        for (int pair = 0; pair < TILE_DEPTH; pair += 2) {
            __m512bh columns[N];
#pragma GCC unroll 2
            for (int n = 0; n < N; n++) columns[n] = __m512bh(_mm512_loadu_si512(b.at + n * b.step + pair * TILE_ROWS));
#pragma GCC unroll 8
            for (int row = 0; row < STRIP; row++) {
                int32_t both;
                std::memcpy(&both, a + row * TILE_DEPTH + pair, sizeof both);
#pragma GCC unroll 2
                for (int n = 0; n < N; n++) sums[row][n] = _mm512_dpbf16_ps(sums[row][n], __m512bh(_mm512_set1_epi32(both)), columns[n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < STRIP; row++)
#pragma GCC unroll 2
        for (int n = 0; n < N; n++) _mm512_storeu_ps(c + row * line + n * TILE_ROWS, sums[row][n]);
}

// M × N tiles of c (+)= a · b.
template <int M, int N, bool ADD>
inline void tile_block(Packed a, Packed b, int num_tiles, float* c, size_t line) {
    for (int m = 0; m < M; m++)
        for (int row = 0; row < TILE_ROWS; row += STRIP)
            strip<N, ADD>(a.at + m * a.step + row * TILE_DEPTH, b, num_tiles, c + (m * TILE_ROWS + row) * line, line);
}

#endif

// The same for `rows` and `columns`, at most two tiles of each, which need not fill their tiles.
template <bool ADD>
inline void block(Packed a, Packed b, int num_tiles, float* c, size_t line, int rows, int columns) {
    constexpr int WIDE = 2 * TILE_ROWS;
    auto compute = [&](float* to, size_t to_line) {
        if (rows > TILE_ROWS && columns > TILE_ROWS) tile_block<2, 2, ADD>(a, b, num_tiles, to, to_line);
        else if (rows > TILE_ROWS) tile_block<2, 1, ADD>(a, b, num_tiles, to, to_line);
        else if (columns > TILE_ROWS) tile_block<1, 2, ADD>(a, b, num_tiles, to, to_line);
        else tile_block<1, 1, ADD>(a, b, num_tiles, to, to_line);
    };
    if (rows % TILE_ROWS == 0 && columns % TILE_ROWS == 0) return compute(c, line);
    alignas(64) float whole[WIDE * WIDE] = {};
    if (ADD)
        for (int row = 0; row < rows; row++) std::memcpy(whole + row * WIDE, c + row * line, columns * sizeof *c);
    compute(whole, WIDE);
    for (int row = 0; row < rows; row++) std::memcpy(c + row * line, whole + row * WIDE, columns * sizeof *c);
}

// c [rows, columns] (+)= a · b over `num_tiles` tiles of k.
template <bool ADD>
inline void multiply(Packed a, Packed b, int num_tiles, float* c, size_t line, int rows, int columns) {
    constexpr int WIDE = 2 * TILE_ROWS;
    for (int part = 0; part < columns; part += PART_COLUMNS) {
        const int end = std::min(part + PART_COLUMNS, columns);
        for (int m = 0; m < rows; m += WIDE)
            for (int n = part; n < end; n += WIDE)
                block<ADD>({a.at + m / TILE_ROWS * a.step, a.step}, {b.at + n / TILE_ROWS * b.step, b.step}, num_tiles, c + m * line + n, line,
                           std::min(WIDE, rows - m), std::min(WIDE, end - n));
    }
}

struct HalfBuffer {
    Buffer buffer;
    bfloat16* at;
    explicit HalfBuffer(size_t num) : buffer((num + 1) / 2), at(reinterpret_cast<bfloat16*>(buffer.at)) {}
};

// The products of an expert layer and of attention in bf16, for one thread. Views are row-major; operands are packed in tiles.
struct HalfProducts {
    using Number = bfloat16;
    using Packing = HalfBuffer;
    static constexpr int QUERIES = 2 * TILE_ROWS;  // of attention: one tile of depth for the gradients of keys and values
    struct Weight {
        Packed lines;
        Weight columns_from(size_t begin) const { return {{lines.at + begin / TILE_ROWS * lines.step, lines.step}}; }
        Weight depth_from(size_t begin) const { return {{lines.at + begin / TILE_DEPTH * TILE_SIZE, lines.step}}; }
    };

    // A line is longer than its numbers: rows at a distance of a power of two would fall into few sets of the cache.
    static size_t line(size_t width) { return width + LANES; }
    static size_t size(size_t rows, size_t width) { return rows * line(width); }
    static View view(float* at, size_t, size_t width) { return matrix(at, line(width)); }
    static size_t weight_size(size_t width, size_t depth) { return packed_numbers(width, depth); }
    static Weight weight(const bfloat16* at, size_t depth) { return {{at, tiles_of(depth, TILE_DEPTH) * TILE_SIZE}}; }
    static void pack_rows(const float* w, size_t line, int width, int depth, bfloat16* to) {
        pack_lines<false>({w, line, true}, 0, width, width, depth, to);
    }
    static void pack_columns(const float* w, size_t line, int width, int depth, bfloat16* to) {
        pack_lines<false>({w, line, false}, 0, width, width, depth, to);
    }

    Tiles tiles{true};
    HalfBuffer left, right;
    // For views of at most `rows` rows and `width` columns.
    HalfProducts(size_t rows, size_t width)
        : left(std::max(packed_numbers(rows, width), packed_numbers(width, rows))), right(packed_numbers(width, rows)) {
        tiles.shape(TILE_TOKENS);
    }
    void multiply(View a, int rows, int depth, Weight w, int width, View c, bool adds = false) {
        pack_lines<true>({a.at, a.line, true}, 0, rows, rows, depth, left.at);
        const auto compute = adds ? multiply_packed<true> : multiply_packed<false>;
        compute(left.at, rows, depth, w.lines, width, c);
    }
    template <bool ADD>
    void multiply_transposed(View a, int rows, int depth, View b, int width, float* c) {
        pack_lines<true>({a.at, a.line, false}, 0, rows, rows, depth, left.at);
        pack_lines<false>({b.at, b.line, false}, 0, width, width, depth, right.at);
        multiply_packed<ADD>(left.at, rows, depth, weight(right.at, depth).lines, width, matrix(c, width));
    }

  private:
    template <bool ADD>
    static void multiply_packed(const bfloat16* a, int rows, int depth, Packed b, int width, View c) {
        const size_t num_tiles = tiles_of(depth, TILE_DEPTH);
        stretto::multiply<ADD>({a, num_tiles * TILE_SIZE}, b, int(num_tiles), c.at, c.line, rows, width);
    }
};

}  // namespace stretto

#else

namespace stretto {
inline bool has_bf16() { return false; }
}  // namespace stretto

#endif
