// Softmax attention of whole rows, forward and backward. Products are made in fp32 or in bf16, everything else in fp32.
//
// A task is one query head of one row of the batch. The scores of QUERIES queries lie in the cache. Groups of NR keys that none of these
// queries sees are left out, so rows of several documents, or of a prompt with several answers, cost what their parts cost. The backward
// pass computes the scores again from the kept logsumexp. Gradients of keys and values are summed over queries in rising order, then over
// the heads of their group, so no result depends on the number of threads.
#pragma once

#include <omp.h>

#include <cmath>
#include <vector>

#include "matrix.h"

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
    int32_t in_bf16;  // whether products are made in bf16
};
}

namespace stretto {

template <class Products>
struct AttentionPass {
    using Packing = typename Products::Packing;
    using Weight = typename Products::Weight;
    static constexpr int QUERIES = Products::QUERIES;
    const StrettoAttention& s;
    const int length, width;

    explicit AttentionPass(const StrettoAttention& shape) : s(shape), length(shape.length), width(shape.width) {}

    static float* place(const StrettoHeads& x, int row, int head, int position) {
        return x.at + row * x.by_row + head * x.by_head + position * x.by_position;
    }

    // Keys [begin, end) in one block of DEPTH columns; begin is a multiple of NR.
    struct Chunk {
        int begin, end;
        int num() const { return end - begin; }
    };

    // Queries [begin, end), and the keys that one of them sees.
    struct Span {
        int begin, end;
        std::vector<Chunk> chunks;
        int num() const { return end - begin; }
    };

    const uint8_t* mask_of(int row, int query) const { return s.mask + ((s.mask_rows > 1 ? row : 0) * size_t(length) + query) * length; }

    // The spans of every row that has a mask of its own.
    std::vector<std::vector<Span>> all_spans() const {
        std::vector<std::vector<Span>> rows(s.mask ? s.mask_rows : 1);
#pragma omp parallel for num_threads(s.num_threads) schedule(static)
        for (int row = 0; row < int(rows.size()); row++)
            for (int begin = 0; begin < length; begin += QUERIES) rows[row].push_back(span(row, begin));
        return rows;
    }

    Span span(int row, int begin) const {
        Span at = {begin, std::min(begin + QUERIES, length), {}};
        const int last = s.mask ? length : at.end;
        for (int key = 0; key < last; key += NR) {
            const int end = std::min(key + NR, last);
            if (s.mask && !any_sees(row, at, key, end)) continue;
            if (!at.chunks.empty() && at.chunks.back().end == key && key % DEPTH) at.chunks.back().end = end;
            else at.chunks.push_back({key, end});
        }
        if (at.chunks.empty()) at.chunks.push_back({0, std::min(NR, length)});
        return at;
    }

    bool any_sees(int row, const Span& at, int key, int end) const {
        for (int query = at.begin; query < at.end; query++)
            if (std::memchr(mask_of(row, query) + key, 1, end - key)) return true;
        return false;
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

    // Calls f(key, place of its score, seen lanes, number of lanes) along the keys of a query.
    template <class F>
    void over_keys(int row, const Span& at, int t, View scores, F f) const {
        const uint8_t* mask = s.mask ? mask_of(row, at.begin + t) : nullptr;
        for (const Chunk& chunk : at.chunks) {
            for (int key = chunk.begin; key < chunk.end; key += LANES) {
                const int num = std::min(LANES, chunk.end - key);
                f(key, scores.place(t, key), seen(mask, at.begin + t, key, num), num);
            }
        }
    }

    // Scores of the queries of a head, or their like: `rows` times packed keys, in the columns of the keys.
    void multiply_keys(Products& products, const Span& at, View rows, Weight keys, View scores) const {
        for (const Chunk& chunk : at.chunks)
            products.multiply(rows, at.num(), width, keys.columns_from(chunk.begin), chunk.num(), scores.from(chunk.begin));
    }

    // Sums over the keys: scores times packed rows of keys or values.
    void sum_keys(Products& products, const Span& at, View scores, Weight rows, View to) const {
        for (const Chunk& chunk : at.chunks)
            products.multiply(scores.from(chunk.begin), at.num(), chunk.num(), rows.depth_from(chunk.begin), width, to,
                              &chunk != &at.chunks.front());
    }

    // Adds to the gradient of every key: its scores times the rows of its queries.
    void add_queries(Products& products, const Span& at, View scores, View rows, float* to) const {
        for (const Chunk& chunk : at.chunks)
            products.template multiply_transposed<true>(scores.from(chunk.begin), chunk.num(), at.num(), rows, width,
                                                        to + size_t(chunk.begin) * width);
    }

    void forward() const {
        const std::vector<std::vector<Span>> spans = all_spans();
#pragma omp parallel num_threads(s.num_threads)
        {
            Products products(QUERIES, std::max(length, width));
            const Packing packed_keys(Products::weight_size(length, width)), packed_values(Products::weight_size(width, length));
            const Weight keys = Products::weight(packed_keys.at, width), values = Products::weight(packed_values.at, length);
            const Buffer block(Products::size(QUERIES, length)), queries(Products::size(QUERIES, width));
            const View scores = Products::view(block.at, QUERIES, length), q = Products::view(queries.at, QUERIES, width);
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < s.num_rows * s.num_heads; task++) {
                const int row = task / s.num_heads, head = task % s.num_heads, kv = head * s.num_kv_heads / s.num_heads;
                Products::pack_rows(place(s.k, row, kv, 0), s.k.by_position, length, width, packed_keys.at);
                Products::pack_columns(place(s.v, row, kv, 0), s.v.by_position, width, length, packed_values.at);
                for (const Span& at : spans[spans.size() > 1 ? row : 0]) {
                    copy(s.q, row, head, at, s.scale, q);
                    multiply_keys(products, at, q, keys, scores);
                    float sums[QUERIES];
                    for (int t = 0; t < at.num(); t++) sums[t] = softmax(row, head, at, t, scores);
                    float* out = place(s.out, row, head, at.begin);
                    sum_keys(products, at, scores, values, {out, size_t(s.out.by_position), DEPTH});
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
        const std::vector<std::vector<Span>> spans = all_spans();
        const size_t one = size_t(length) * width;
        Buffer grads(2 * one * s.num_rows * s.num_heads);  // of keys, then of values, of each query head
#pragma omp parallel num_threads(s.num_threads)
        {
            Products products(QUERIES, std::max(length, width));
            const Packing packed_keys(Products::weight_size(length, width)), packed_values(Products::weight_size(length, width));
            const Packing packed_rows(Products::weight_size(width, length));
            const Weight keys = Products::weight(packed_keys.at, width), values = Products::weight(packed_values.at, width);
            const Weight key_rows = Products::weight(packed_rows.at, length);
            const Buffer block(Products::size(QUERIES, length)), slopes(Products::size(QUERIES, length));
            const Buffer queries(Products::size(QUERIES, width)), outs(Products::size(QUERIES, width));
            const View p = Products::view(block.at, QUERIES, length), ds = Products::view(slopes.at, QUERIES, length);
            const View q = Products::view(queries.at, QUERIES, width), dy = Products::view(outs.at, QUERIES, width);
#pragma omp for schedule(dynamic, 1)
            for (int task = 0; task < s.num_rows * s.num_heads; task++) {
                const int row = task / s.num_heads, head = task % s.num_heads, kv = head * s.num_kv_heads / s.num_heads;
                float *grad_k = grads.at + 2 * one * task, *grad_v = grad_k + one;
                std::memset(grad_k, 0, 2 * one * sizeof(float));
                Products::pack_rows(place(s.k, row, kv, 0), s.k.by_position, length, width, packed_keys.at);
                Products::pack_rows(place(s.v, row, kv, 0), s.v.by_position, length, width, packed_values.at);
                Products::pack_columns(place(s.k, row, kv, 0), s.k.by_position, width, length, packed_rows.at);
                for (const Span& at : spans[spans.size() > 1 ? row : 0]) {
                    copy(s.q, row, head, at, s.scale, q);
                    copy(s.grad_out, row, head, at, 1.0f, dy);
                    float means[QUERIES];  // all at once, so that the processor waits for several rows of `out` at a time
                    for (int t = 0; t < at.num(); t++) means[t] = dot(place(s.out, row, head, at.begin + t), dy.place(t, 0));
                    multiply_keys(products, at, q, keys, p);
                    multiply_keys(products, at, dy, values, ds);
                    for (int t = 0; t < at.num(); t++) score_gradient(row, head, at, t, means[t], p, ds);
                    add_queries(products, at, p, dy, grad_v);
                    add_queries(products, at, ds, q, grad_k);
                    float* grad_q = place(s.grad_q, row, head, at.begin);
                    sum_keys(products, at, ds, key_rows, {grad_q, size_t(s.grad_q.by_position), DEPTH});
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

    float dot(const float* a, const float* b) const {
        Vec total = {};
        for (int i = 0; i < width; i += LANES) total += load_up_to(a + i, width - i) * load_up_to(b + i, width - i);
        return sum(total);
    }

    // Overwrites scores with probabilities, and the products of values with the output's gradient with the gradients of scores.
    // `mean`: the products' mean by probability, which is that of the output with its gradient.
    void score_gradient(int row, int head, const Span& at, int t, float mean, View p, View ds) const {
        const float lse = s.lse[(size_t(row) * s.num_heads + head) * length + at.begin + t];
        over_keys(row, at, t, p, [&](int key, float* score, IntVec is_seen, int num) {
            float* slope = ds.place(t, key);
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
