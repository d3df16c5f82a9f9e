// Softmax attention of whole rows in fp32, forward and backward.
//
// A task is one query head of one row of the batch. The scores of QUERIES queries lie in the cache, with all keys between the first and
// the last that one of them sees. The backward pass computes them again from the kept logsumexp. Gradients of keys and values are summed
// over queries in rising order, then over the heads of their group, so no result depends on the number of threads.
#pragma once

#include <omp.h>

#include <cmath>
#include <vector>

#include "blocks.h"

extern "C" {

// Element (row, head, position, channel) of a tensor is at[row · by_row + head · by_head + position · by_position + channel].
struct StrettoHeads {
    float* at;
    int64_t by_row, by_head, by_position;
};

struct StrettoAttention {
    int32_t num_rows, num_heads, num_kv_heads, length, width, num_threads;
    float scale;
    int32_t mask_rows;    // 1: all rows have one mask
    const uint8_t* mask;  // [mask_rows, length, length], 1 where a query sees a key; null: causal
    StrettoHeads q, k, v, out;
    float* lse;  // [rows, heads, length], logsumexp of the scores: written by the forward pass
    StrettoHeads grad_out, grad_q, grad_k, grad_v;
};
}

namespace stretto {

constexpr int QUERIES = 48;  // a multiple of MR

struct AttentionPass {
    const StrettoAttention& s;
    const int length, width;

    explicit AttentionPass(const StrettoAttention& shape) : s(shape), length(shape.length), width(shape.width) {}

    static float* place(const StrettoHeads& x, int row, int head, int position) {
        return x.at + row * x.by_row + head * x.by_head + position * x.by_position;
    }

    // Queries [begin, end) and the keys that they see, from `low`, a multiple of NR, to `high`.
    struct Span {
        int begin, end, low, high;
        int num() const { return end - begin; }
        int keys() const { return high - low; }
    };

    const uint8_t* mask_of(int row, int query) const { return s.mask + ((s.mask_rows > 1 ? row : 0) * size_t(length) + query) * length; }

    Span span(int row, int begin) const {
        const int end = std::min(begin + QUERIES, length);
        if (!s.mask) return {begin, end, 0, end};
        int low = length, high = 0;
        for (int query = begin; query < end; query++) {
            const uint8_t* seen = mask_of(row, query);
            if (const void* first = std::memchr(seen, 1, length)) low = std::min(low, int(static_cast<const uint8_t*>(first) - seen));
            int last = length;
            while (last > high && !seen[last - 1]) last--;
            high = std::max(high, last);
        }
        low = std::min(low, high) / NR * NR;
        return {begin, end, low, std::max(high, low + 1)};
    }

    // Rows of a head, times a factor, into a block.
    void copy(const StrettoHeads& from, int row, int head, const Span& at, float factor, View to) const {
        for (int t = 0; t < at.num(); t++) {
            std::memcpy(to.place(t, 0), place(from, row, head, at.begin + t), width * sizeof(float));
            if (factor != 1.0f) map(to.place(t, 0), width, [&](Vec v, int) { return v * factor; });
        }
    }

    // Lanes of the keys from `key` on that `query` sees.
    IntVec seen(const uint8_t* mask, int query, int key, int num) const {
        IntVec index;
        for (int i = 0; i < LANES; i++) index[i] = i;
        if (!mask) return index < std::min(query - key + 1, num) - IntVec{};
        IntVec value = {};
        if (num >= LANES) {
            typedef uint8_t Bytes __attribute__((vector_size(LANES)));
            Bytes bytes;
            std::memcpy(&bytes, mask + key, sizeof bytes);
            value = __builtin_convertvector(bytes, IntVec);
        } else {
            for (int i = 0; i < num; i++) value[i] = mask[key + i];
        }
        return value != 0;
    }

    // Calls f(lanes, place of the score, seen lanes, number of lanes) along the keys of a query.
    template <class F>
    void over_keys(int row, const Span& at, int t, View scores, F f) const {
        const uint8_t* mask = s.mask ? mask_of(row, at.begin + t) : nullptr;
        for (int j = 0; j < at.keys(); j += LANES) {
            const int num = std::min(LANES, at.keys() - j);
            f(j, scores.place(t, j), seen(mask, at.begin + t, at.low + j, num), num);
        }
    }

    void forward() const {
        const size_t keys_size = packed_size(length, width), values_size = packed_size(width, length);
#pragma omp parallel num_threads(s.num_threads)
        {
            Buffer packed(keys_size + values_size), block(blocked_size(QUERIES, length)), queries(QUERIES * LINE);
            const View scores = blocked(block.at, QUERIES), q = blocked(queries.at, QUERIES);
            float *keys = packed.at, *values = packed.at + keys_size;
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < s.num_rows * s.num_heads; task++) {
                const int row = task / s.num_heads, head = task % s.num_heads, kv = head * s.num_kv_heads / s.num_heads;
                pack_transposed(place(s.k, row, kv, 0), s.k.by_position, length, width, keys);
                pack(place(s.v, row, kv, 0), s.v.by_position, width, length, values);
                for (int begin = 0; begin < length; begin += QUERIES) {
                    const Span at = span(row, begin);
                    copy(s.q, row, head, at, s.scale, q);
                    product(q, at.num(), width, keys + size_t(at.low) * width, size_t(NR) * width, at.keys(), scores);
                    float sums[QUERIES];
                    for (int t = 0; t < at.num(); t++) sums[t] = softmax(row, head, at, t, scores);
                    float* out = place(s.out, row, head, begin);
                    product(scores, at.num(), at.keys(), values + size_t(at.low) * NR, size_t(NR) * length, width, {out, size_t(s.out.by_position), DEPTH});
                    for (int t = 0; t < at.num(); t++)
                        map(out + t * s.out.by_position, width, [&](Vec v, int) { return v * (1.0f / sums[t]); });
                }
            }
        }
    }

    // Overwrites scores with exp(score − largest), 0 for keys that are not seen; returns their sum and writes the logsumexp.
    float softmax(int row, int head, const Span& at, int t, View scores) const {
        Vec most = splat(-INFINITY);
        over_keys(row, at, t, scores, [&](int, const float* p, IntVec is_seen, int num) {
            const Vec v = is_seen ? load_up_to(p, num) : splat(-INFINITY);
            most = v > most ? v : most;
        });
        float largest = most[0];
        for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
        Vec total = {};
        over_keys(row, at, t, scores, [&](int, float* p, IntVec is_seen, int num) {
            const Vec v = is_seen ? exp(load_up_to(p, num) - largest) : Vec{};
            total += v;
            store_part(p, v, num);
        });
        const float all = sum(total);
        s.lse[(size_t(row) * s.num_heads + head) * length + at.begin + t] = largest + std::log(all);
        return all;
    }

    void backward() const {
        const size_t keys_size = packed_size(length, width), size = packed_size(width, length), one = size_t(length) * width;
        Buffer grads(2 * one * s.num_rows * s.num_heads);  // of keys, then of values, of each query head
#pragma omp parallel num_threads(s.num_threads)
        {
            Buffer packed(2 * keys_size + size), block(blocked_size(QUERIES, length)), slopes(blocked_size(QUERIES, length));
            Buffer queries(QUERIES * LINE), outs(QUERIES * LINE);
            const View p = blocked(block.at, QUERIES), ds = blocked(slopes.at, QUERIES), q = blocked(queries.at, QUERIES), dy = blocked(outs.at, QUERIES);
            float *keys = packed.at, *values = keys + keys_size, *key_rows = values + keys_size;
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < s.num_rows * s.num_heads; task++) {
                const int row = task / s.num_heads, head = task % s.num_heads, kv = head * s.num_kv_heads / s.num_heads;
                float *grad_k = grads.at + 2 * one * task, *grad_v = grad_k + one;
                std::memset(grad_k, 0, 2 * one * sizeof(float));
                pack_transposed(place(s.k, row, kv, 0), s.k.by_position, length, width, keys);
                pack_transposed(place(s.v, row, kv, 0), s.v.by_position, length, width, values);
                pack(place(s.k, row, kv, 0), s.k.by_position, width, length, key_rows);
                for (int begin = 0; begin < length; begin += QUERIES) {
                    const Span at = span(row, begin);
                    copy(s.q, row, head, at, s.scale, q);
                    copy(s.grad_out, row, head, at, 1.0f, dy);
                    product(q, at.num(), width, keys + size_t(at.low) * width, size_t(NR) * width, at.keys(), p);
                    product(dy, at.num(), width, values + size_t(at.low) * width, size_t(NR) * width, at.keys(), ds);
                    for (int t = 0; t < at.num(); t++) score_gradient(row, head, at, t, dy, p, ds);
                    transposed_product<true>(p, at.keys(), at.num(), dy, width, grad_v + size_t(at.low) * width);
                    transposed_product<true>(ds, at.keys(), at.num(), q, width, grad_k + size_t(at.low) * width);
                    float* grad_q = place(s.grad_q, row, head, begin);
                    product(ds, at.num(), at.keys(), key_rows + size_t(at.low) * NR, size_t(NR) * length, width,
                            {grad_q, size_t(s.grad_q.by_position), DEPTH});
                    for (int t = 0; t < at.num(); t++) map(grad_q + t * s.grad_q.by_position, width, [&](Vec v, int) { return v * s.scale; });
                }
            }
            const int group = s.num_heads / s.num_kv_heads;
#pragma omp for schedule(static)
            for (int task = 0; task < s.num_rows * s.num_kv_heads; task++) {
                const int row = task / s.num_kv_heads, kv = task % s.num_kv_heads;
                const float* from = grads.at + 2 * one * (size_t(row) * s.num_heads + size_t(kv) * group);
                for (int t = 0; t < length; t++) {
                    sum_heads(from + size_t(t) * width, 2 * one, group, place(s.grad_k, row, kv, t));
                    sum_heads(from + one + size_t(t) * width, 2 * one, group, place(s.grad_v, row, kv, t));
                }
            }
        }
    }

    // Overwrites scores with probabilities, and the products of values with the output's gradient with the gradients of scores.
    void score_gradient(int row, int head, const Span& at, int t, View dy, View p, View ds) const {
        const float *y = place(s.out, row, head, at.begin + t), *grad = dy.place(t, 0);
        Vec total = {};
        for (int i = 0; i < width; i += LANES) total += load_up_to(y + i, width - i) * load_up_to(grad + i, width - i);
        const float mean = sum(total), lse = s.lse[(size_t(row) * s.num_heads + head) * length + at.begin + t];
        over_keys(row, at, t, p, [&](int j, float* score, IntVec is_seen, int num) {
            float* slope = ds.place(t, j);
            const Vec prob = is_seen ? exp(load_up_to(score, num) - lse) : Vec{};
            store_part(slope, prob * (load_up_to(slope, num) - mean), num);
            store_part(score, prob, num);
        });
    }

    void sum_heads(const float* from, size_t step, int num, float* to) const {
        std::memcpy(to, from, width * sizeof(float));
        for (int head = 1; head < num; head++)
            map(to, width, [&](Vec v, int i) { return v + load_up_to(from + head * step + i, width - i); });
    }
};

}  // namespace stretto
