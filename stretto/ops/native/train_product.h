// A product of two matrices in fp32, rounded to bf16. The right operand is packed once, for all threads; each thread
// packs parts of the left one that stay in its second-level cache.
#pragma once

#include <omp.h>

#include "matrix.h"

extern "C" {

// c [rows, columns] = a [rows, depth] · b [depth, columns]. A stride is the distance of rows where numbers of a row lie side by side, else
// that of columns.
struct StrettoProduct {
    int32_t rows, columns, depth, num_threads;
    const float *a, *b;
    int64_t a_stride, b_stride;
    int32_t a_by_row, b_by_row;  // whether the numbers of a row lie side by side
    float* c;                    // row-major
    int32_t adds;                // to what c holds
};
}

namespace stretto {
namespace {

#if defined(STRETTO_BF16)

constexpr int PANEL = 256;  // most rows of a task: with PART of depth, half a megabyte

inline void matrix_product(const StrettoProduct& s) {
    const Operand left{s.a, size_t(s.a_stride), s.a_by_row != 0}, right{s.b, size_t(s.b_stride), s.b_by_row == 0};
    const size_t depth_tiles = tiles_of(s.depth, TILE_DEPTH), columns = s.columns;
    HalfBuffer packed(packed_numbers(columns, s.depth));
    // about four tasks for each thread
    const int panel = std::clamp(s.rows / (4 * s.num_threads) / (2 * TILE_ROWS), 1, PANEL / (2 * TILE_ROWS)) * 2 * TILE_ROWS;
#pragma omp parallel num_threads(s.num_threads)
    {
#pragma omp for schedule(static)
        for (int n = 0; n < s.columns; n += TILE_ROWS)
            pack_lines<false>(right, n, std::min(n + TILE_ROWS, s.columns), s.columns, s.depth, packed.at);
        Tiles tiles(true);
        tiles.shape(TILE_TOKENS);
        HalfBuffer rows(packed_numbers(panel, std::min(PART, s.depth)));
#pragma omp for schedule(dynamic, 1)
        for (int m = 0; m < s.rows; m += panel) {
            const int num = std::min(panel, s.rows - m);
            for (int k = 0; k < s.depth; k += PART) {
                const int depth = std::min(PART, s.depth - k);
                const int num_tiles = int(tiles_of(depth, TILE_DEPTH));
                pack_lines<true>(left.from(m, k), 0, num, num, depth, rows.at);
                const Packed a{rows.at, num_tiles * TILE_SIZE}, b{packed.at + k / TILE_DEPTH * TILE_SIZE, depth_tiles * TILE_SIZE};
                const auto compute = k || s.adds ? multiply<true> : multiply<false>;
                compute(a, b, num_tiles, s.c + m * columns, columns, num, s.columns);
            }
        }
    }
}

#else

inline void matrix_product(const StrettoProduct&) {}

#endif

}  // namespace
}  // namespace stretto
