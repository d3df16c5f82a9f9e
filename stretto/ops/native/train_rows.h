// Functions of single rows for training: RMS norm with its gradients, rotation of heads, and the softmax of logits. Torch composes each
// of them of operations that read and write all rows.
#pragma once

#include <omp.h>

#include <cmath>

#include "blocks.h"
#include "product.h"

extern "C" {

// Contiguous rows [num_rows, width], and one weight for each column.
struct StrettoNorm {
    int32_t num_rows, width, num_threads;
    float eps;
    const float *x, *weight;
    float *out, *scale;  // scale [num_rows] = 1 / rms: written by the forward pass
    const float* grad_out;
    float *grad_x, *grad_weight;  // grad_weight: null: not wanted
};

// Rows and heads of every position, with the channels of a head side by side.
struct StrettoRotation {
    int32_t num_rows, length, num_heads, width, half, num_threads;
    float sign;  // of the sines; -1: the inverse rotation
    const float* x;
    int64_t by_row, by_position, by_head;
    const float *cosine, *sine;  // [num_rows, length, half]
    float* out;                  // [num_rows, length, num_heads, width]
};

// Contiguous logits [num_rows, width], which become probabilities.
struct StrettoSoftmax {
    int32_t num_rows, width, num_threads;
    float* logits;
    const uint8_t* kept;  // rows that are not become zero
    float* lse;           // logsumexp of each row
};
}

namespace stretto {
namespace {

constexpr int NORM_BLOCKS = 64;  // blocks of rows whose gradients are summed alone, so that the order of a sum is fixed

inline void norm_forward(const StrettoNorm& s) {
#pragma omp parallel for schedule(static) num_threads(s.num_threads)
    for (int row = 0; row < s.num_rows; row++) {
        const float* x = s.x + size_t(row) * s.width;
        float* out = s.out + size_t(row) * s.width;
        Vec squares = {};
        for (int i = 0; i < s.width; i += LANES) {
            const Vec v = load_up_to(x + i, s.width - i);
            squares = fma(v, v, squares);
        }
        const float scale = 1.0f / std::sqrt(sum(squares) / s.width + s.eps);
        for (int i = 0; i < s.width; i += LANES) {
            const int num = s.width - i;
            store_part(out + i, load_up_to(x + i, num) * scale * load_up_to(s.weight + i, num), num);
        }
        s.scale[row] = scale;
    }
}

inline void norm_backward(const StrettoNorm& s) {
    const int rows = (s.num_rows + NORM_BLOCKS - 1) / NORM_BLOCKS;
    const Buffer all_sums(size_t(NORM_BLOCKS) * s.width);
#pragma omp parallel for schedule(static) num_threads(s.num_threads)
    for (int block = 0; block < NORM_BLOCKS; block++) {
        float* sums = all_sums.at + size_t(block) * s.width;
        std::memset(sums, 0, s.width * sizeof *sums);
        for (int row = block * rows; row < std::min((block + 1) * rows, s.num_rows); row++) {
            const float *x = s.x + size_t(row) * s.width, *grad = s.grad_out + size_t(row) * s.width;
            float* out = s.grad_x + size_t(row) * s.width;
            const Vec scale = splat(s.scale[row]);
            Vec dot = {};
            for (int i = 0; i < s.width; i += LANES) {
                const int num = s.width - i;
                const Vec g = load_up_to(grad + i, num), normed = load_up_to(x + i, num) * scale;
                store_part(sums + i, fma(g, normed, load_up_to(sums + i, num)), num);
                dot = fma(g * load_up_to(s.weight + i, num), normed, dot);
            }
            const Vec mean = splat(sum(dot) / s.width);
            for (int i = 0; i < s.width; i += LANES) {
                const int num = s.width - i;
                const Vec inner = load_up_to(grad + i, num) * load_up_to(s.weight + i, num);
                store_part(out + i, (inner - load_up_to(x + i, num) * scale * mean) * scale, num);
            }
        }
    }
    if (!s.grad_weight) return;
    for (int i = 0; i < s.width; i++) {
        float total = 0.0f;
        for (int block = 0; block < NORM_BLOCKS; block++) total += all_sums.at[size_t(block) * s.width + i];
        s.grad_weight[i] = total;
    }
}

inline void rotate_heads(const StrettoRotation& s) {
    const int pairs = s.half;
#pragma omp parallel for schedule(static) num_threads(s.num_threads) collapse(2)
    for (int row = 0; row < s.num_rows; row++)
        for (int position = 0; position < s.length; position++) {
            const size_t at = size_t(row) * s.length + position;
            const float *cosine = s.cosine + at * pairs, *sine = s.sine + at * pairs;
            for (int head = 0; head < s.num_heads; head++) {
                const float* x = s.x + row * s.by_row + position * s.by_position + head * s.by_head;
                float* out = s.out + (at * s.num_heads + head) * s.width;
                for (int i = 0; i < pairs; i += LANES) {
                    const int num = pairs - i;
                    const Vec first = load_up_to(x + i, num), second = load_up_to(x + pairs + i, num);
                    const Vec c = load_up_to(cosine + i, num), d = load_up_to(sine + i, num) * s.sign;
                    store_part(out + i, first * c - second * d, num);
                    store_part(out + pairs + i, second * c + first * d, num);
                }
                std::memcpy(out + 2 * pairs, x + 2 * pairs, (s.width - 2 * pairs) * sizeof *x);
            }
        }
}

inline void softmax_rows(const StrettoSoftmax& s) {
#pragma omp parallel for schedule(static) num_threads(s.num_threads)
    for (int row = 0; row < s.num_rows; row++) {
        float* logits = s.logits + size_t(row) * s.width;
        const float highest = highest_of(logits, s.width), total = softmax(logits, s.width);
        s.lse[row] = std::log(total) + highest;
        const float factor = s.kept[row] ? 1.0f / total : 0.0f;
        map(logits, s.width, [&](Vec v, int) { return v * factor; });
    }
}

}  // namespace
}  // namespace stretto
