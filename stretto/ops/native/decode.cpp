// One step of the whole network in one parallel region.
//
// Every phase distributes tasks to the threads and ends with a barrier. A task computes a block of weight rows for all tokens, so
// each weight is read from memory once per step, for any number of tokens. Work that takes less time than a barrier is done by
// every thread for itself.
// A token's result is a function of that token alone: reductions have one order (simd.h), and the outputs of a token's experts
// are added in rising order of id.
//
// Letters: N tokens, A tokens that run a layer, D hidden, E experts, S slots (a token and one of its experts).

#include <omp.h>

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <vector>

#include "abi.h"
#include "barrier.h"
#include "integers.h"
#include "product.h"
#include "sample.h"
#include "tiles.h"

namespace stretto {

// A thread's share of a phase's tasks. The thread takes them from the front, so the memory that it prefetches is its own next
// block. Threads that have finished their own share take tasks from the back of others.
struct alignas(64) Share {
    // The next of tasks [begin, end), or −1 if none is left.
    long take(long begin, long end, bool is_own) {
        uint64_t seen = taken.load(std::memory_order_relaxed);
        for (;;) {
            const long first = begin + long(seen & 0xffffffff), last = end - long(seen >> 32);
            if (first >= last) return -1;
            if (taken.compare_exchange_weak(seen, seen + (is_own ? 1 : uint64_t(1) << 32), std::memory_order_relaxed))
                return is_own ? first : last - 1;
        }
    }

  private:
    std::atomic<uint64_t> taken{0};  // low half: tasks taken from the front, high half: from the back
};

constexpr int PHASES = 23;  // most phases of a layer; a step has five more: embedding, norm, packing, quantisation, head
constexpr int OWN = 4096;  // most elements that every thread norms, packs or quantises for itself: about two microseconds

// Tokens of a product: rows of fp32 and, for products in tiles or with integers, the same rows in packed form.
struct Inputs {
    const float* const* rows;
    const bfloat16* packed;
    const IntRow* integers;
    int num;
};

template <class T>
inline void grow(std::vector<T>& v, size_t num) {
    if (v.size() < num) v.resize(num);
}

// Quantised tokens.
struct IntRows {
    std::vector<IntRow> rows;
    std::vector<int8_t> codes;
    std::vector<float> scales;
    std::vector<int32_t> sums;

    void reserve(size_t num, size_t width) {
        grow(rows, num), grow(codes, num * width), grow(scales, num * width / GROUP), grow(sums, num * width / GROUP);
    }

    void fill(int i, const float* x, int width) {
        const size_t first = size_t(i) * width / GROUP;
        quantise_row(x, width, &codes[first * GROUP], &scales[first], &sums[first]);
        rows[i] = {&codes[first * GROUP], &scales[first], &sums[first]};
    }
};

// Buffers of a step. They grow and never shrink.
struct Buffers {
    std::vector<float> x, h, qkv, attended, gate, up, shared_gate, shared_up, router, weight;
    std::vector<int32_t> chosen, active, active_start;
    std::vector<bfloat16> packed, packed_slots;
    IntRows int_rows, int_slots;
};

template <class W>
class Decoder {
  public:
    Decoder(const StrettoShape& shape, const StrettoLayer* layers) : s(shape), layers(layers, layers + shape.num_layers) {
        has_integers = shape.int_head.bits;
        for (const auto& layer : this->layers)
            for (const auto* each : {&layer.int_qkv, &layer.int_out, &layer.int_gate_up, &layer.int_down, &layer.int_shared_gate_up,
                                     &layer.int_shared_down})
                has_integers |= each->bits != 0;
    }

    void step(const StrettoStep& step) {
        prepare(step);
        std::vector<Share> shares((size_t(PHASES) * s.num_layers + 5) * step.num_threads);
        Barrier barrier;
#pragma omp parallel num_threads(step.num_threads)
        Worker(*this, step, shares, barrier).run();
    }

  private:
    struct Worker;

    void prepare(const StrettoStep& step) {
        const size_t num = step.num_tokens;
        size_t inner = 1, shared = 1, experts = 1;
        for (const auto& layer : layers) {
            inner = std::max<size_t>(inner, size_t(layer.inner) * (layer.num_experts ? s.route_slots : 1));
            shared = std::max<size_t>(shared, layer.shared_inner);
            experts = std::max<size_t>(experts, layer.num_experts);
        }
        const size_t queries = size_t(s.num_heads) * s.head_dim, kv = size_t(s.num_kv_heads) * s.head_dim;
        grow(b.x, num * s.hidden);
        grow(b.h, num * s.hidden);
        grow(b.qkv, num * (queries + 2 * kv));
        grow(b.attended, num * queries);
        grow(b.gate, num * inner);
        grow(b.up, num * inner);
        grow(b.shared_gate, num * shared);
        grow(b.shared_up, num * shared);
        grow(b.router, num * experts);
        grow(b.weight, num * s.route_slots);
        int widest = std::max(s.hidden, int(queries));
        for (const auto& layer : layers) widest = std::max({widest, layer.inner, layer.shared_inner});
        if (has_integers) b.int_rows.reserve(num, widest), b.int_slots.reserve(num * s.route_slots, widest);
        if (uses_tiles) {
            const size_t size = TILE_TOKENS * packed_width(widest), slots = num * s.route_slots;
            grow(b.packed, (num + TILE_TOKENS - 1) / TILE_TOKENS * size);
            grow(b.packed_slots, std::min(slots, slots / TILE_TOKENS + experts) * size);  // each expert may have one span that is not full
        }
        b.chosen.resize(num * s.route_slots);
        b.active.clear();
        b.active_start.assign(1, 0);
        are_apart = true;  // tokens of a sequence are neighbours, with the same table
        for (int n = 1; n < step.num_tokens; n++) are_apart &= step.table[n] != step.table[n - 1];
        for (int layer = 0; layer < s.num_layers; layer++) {
            for (int n = 0; n < step.num_tokens; n++)
                if (step.choices[long(step.subnet[n]) * s.num_layers + layer].active) b.active.push_back(n);
            b.active_start.push_back(int32_t(b.active.size()));
        }
    }

    StrettoShape s;
    std::vector<StrettoLayer> layers;
    Buffers b;
    const bool uses_tiles = std::is_same_v<W, bfloat16> && has_tiles();
    bool has_integers = false;
    bool are_apart = false;     // whether all tokens of the step belong to different sequences
};

template <class W>
struct Decoder<W>::Worker {
    Decoder& d;
    const StrettoStep& step;
    std::vector<Share>& shares;
    Barrier& barrier;
    const StrettoShape& s = d.s;
    Buffers& b = d.b;
    const int num_threads = omp_get_num_threads(), thread = omp_get_thread_num();
    long phase = 0;
    int layer_index = 0, num_active = 0;
    const int32_t* active = nullptr;
    std::vector<const float*> rows, slots, slot_x;  // rows of tokens, of slots after gate_up, and of slots before it
    std::vector<int32_t> slot_token, slot_start, used;
    std::vector<float> normed, slot_weight, scores;
    std::vector<double> selection, group_score;  // fp32 values for a softmax router
    std::vector<bfloat16> own, own_slots, own_queries;  // rows that each thread packs for itself
    IntRows own_ints, own_int_slots;                    // rows that each thread quantises for itself
    std::vector<IntRow> int_slot_x;                     // quantised slots before gate_up
    const IntRow *int_rows = nullptr, *int_slots = nullptr;  // quantised `rows`, and slots
    std::vector<Span> spans, slot_spans, runs;
    std::vector<int32_t> first_span;  // by expert: index in slot_spans
    const bfloat16 *packed = nullptr, *packed_slots = nullptr;  // packed `rows` and slots
    Tiles tiles{d.uses_tiles};

    Worker(Decoder& d, const StrettoStep& step, std::vector<Share>& shares, Barrier& barrier)
        : d(d), step(step), shares(shares), barrier(barrier) {}

    void run() {
        const int hidden = s.hidden;
        rows.resize(step.num_tokens);
        each(step.num_tokens, [&](int n) {
            const W* from = static_cast<const W*>(s.embedding) + size_t(step.token[n]) * hidden;
            for (int i = 0; i < hidden; i++) b.x[size_t(n) * hidden + i] = widen(from[i]);
            if (step.write_routes) clear_routes(n);
        });
        for (layer_index = 0; layer_index < s.num_layers; layer_index++) {
            active = b.active.data() + b.active_start[layer_index];
            num_active = b.active_start[layer_index + 1] - b.active_start[layer_index];
            if (num_active == 0) continue;
            const StrettoLayer& layer = d.layers[layer_index];
            attention(layer);
            if (layer.num_experts) moe(layer);
            else dense(layer);
        }
        logits();
    }

    // Calls f(i) for i in [0, num), distributed over the threads, then waits for all threads.
    template <class F>
    void each(long num, F f) {
        Share* of = &shares[size_t(phase++) * step.num_threads];
        for (int turn = 0; turn < num_threads; turn++) {
            const int whose = (thread + turn) % num_threads;
            const long begin = num * whose / num_threads, end = num * (whose + 1) / num_threads;
            for (long i; (i = of[whose].take(begin, end, turn == 0)) >= 0;) f(int(i));
        }
        barrier.wait(num_threads);
    }

    // Rows per task: few enough for an even distribution, enough for streaming from memory.
    int block(long num_rows) const {
        const long even = num_rows / (8L * step.num_threads), least = d.uses_tiles ? 2 * TILE_ROWS : d.has_integers ? PANEL : 8;
        return int(std::clamp(even / least * least, least, 64L));
    }

    template <class F>
    void blocks(long num_rows, F f) {
        const int size = block(num_rows);
        each((num_rows + size - 1) / size, [&](int i) { f(i * size, int(std::min<long>(num_rows, long(i + 1) * size))); });
    }

    float* x_of(int a) { return b.x.data() + size_t(active[a]) * s.hidden; }
    const StrettoChoice& choice(int a) const { return step.choices[size_t(step.subnet[active[a]]) * s.num_layers + layer_index]; }

    void point(const std::vector<float>& from, size_t width, int num) {
        for (int a = 0; a < num; a++) rows[a] = from.data() + a * width;
    }

    // Rows x of the spans `of`, packed for tiles by every thread for itself (into `mine`) or by all together (into `all`); null if
    // products use fp32 rows.
    const bfloat16* pack(const float* const* x, const std::vector<Span>& of, int width, std::vector<bfloat16>& mine, std::vector<bfloat16>& all) {
#if defined(STRETTO_TILES)
        if (!d.uses_tiles) return nullptr;
        const bool is_own = long(of.size()) * width <= OWN;
        const size_t size = TILE_TOKENS * packed_width(width);
        std::vector<bfloat16>& to = is_own ? mine : all;
        if (is_own) grow(to, of.size() * size);
        auto one = [&](int i) { pack_span(x, of[i], width, &to[i * size]); };
        if (is_own)
            for (int i = 0; i < int(of.size()); i++) one(i);
        else each(of.size(), one);
        return to.data();
#else
        return nullptr;
#endif
    }

    // Rows x, quantised by every thread for itself (into `mine`) or by all together (into `all`).
    const IntRow* quantise(const float* const* x, int num, int width, IntRows& mine, IntRows& all) {
        const bool is_own = long(num) * width <= OWN;
        if (is_own) {
            mine.reserve(num, width);
            for (int i = 0; i < num; i++) mine.fill(i, x[i], width);
        } else each(num, [&](int i) { all.fill(i, x[i], width); });
        return (is_own ? mine : all).rows.data();
    }

    // Packs the first `num` of `rows` for tiles, and quantises them for integer weights.
    void pack_rows(int num, int width) {
        if (d.has_integers && width % GROUP == 0) int_rows = quantise(rows.data(), num, width, own_ints, b.int_rows);
        spans.clear();
        for (int first = 0; first < num; first += TILE_TOKENS) spans.push_back({first, std::min(TILE_TOKENS, num - first), num == 1});
        packed = pack(rows.data(), spans, width, own, d.b.packed);
    }

    Inputs inputs(int num) const { return {rows.data(), packed, int_rows, num}; }

    // Calls put(row, count, token, values) for rows [begin, end) of the weight that starts at w or at row `before` of `integers`, see
    // `product`.
    template <class Put>
    void multiply(const W* w, const StrettoIntegers& integers, size_t before, int begin, int end, const Inputs& x, int width, Put put) {
        if (integers.bits) int_product(integers, before, begin, end, x.integers, x.num, width, put);
        else multiply(w, width, begin, end, x, width, put);
    }

    // The same for rows of values at distance `stride`.
    template <class Put>
    void multiply(const W* w, size_t stride, int begin, int end, const Inputs& x, int width, Put put) {
#if defined(STRETTO_TILES)
        if constexpr (std::is_same_v<W, bfloat16>)
            if (x.packed) return tile_product(tiles, w, stride, begin, end, x.packed, x.num, width, put);
#endif
        product(w, stride, begin, end, x.rows, x.num, width, put);
    }

    // Normalises `num` rows of the residual stream, and points `rows` to the results.
    void normalise(const void* weight, const int32_t* token, int num) {
        const bool is_own = long(num) * s.hidden <= OWN;
        std::vector<float>& to = is_own ? normed : b.h;
        if (is_own) grow(to, size_t(num) * s.hidden);
        auto one = [&](int a) {
            rms_norm(&b.x[size_t(token[a]) * s.hidden], static_cast<const W*>(weight), s.hidden, s.eps, &to[size_t(a) * s.hidden]);
        };
        if (is_own)
            for (int a = 0; a < num; a++) one(a);
        else each(num, one);
        point(to, s.hidden, num);
        pack_rows(num, s.hidden);
    }

    // Function for `multiply` that writes to `to` [tokens, width], adding the rows' bias unless it is null.
    static auto into(float* to, int width, const void* bias) {
        return [=, by = static_cast<const W*>(bias)](int row, int count, int t, const float* values) {
            float* at = to + size_t(t) * width + row;
            for (int i = 0; i < count; i++) at[i] = values[i] + (by ? widen(by[row + i]) : 0.0f);
        };
    }

    // x += w · rows + bias, for the active tokens.
    void add_product(const void* w, const StrettoIntegers& integers, int width, const void* bias) {
        pack_rows(num_active, width);
        blocks(s.hidden, [&](int begin, int end) { add_rows(w, integers, width, bias, begin, end); });
    }

    void add_rows(const void* w, const StrettoIntegers& integers, int width, const void* bias, int begin, int end) {
        const W* by = static_cast<const W*>(bias);
        multiply(static_cast<const W*>(w), integers, 0, begin, end, inputs(num_active), width,
                 [&](int row, int count, int a, const float* values) {
                     float* x = x_of(a) + row;
                     for (int i = 0; i < count; i++) x[i] += values[i] + (by ? widen(by[row + i]) : 0.0f);
                 });
    }

    // Rows [begin, end) of gate, up and their activation, which is written to `gate`; both are [tokens, inner].
    // `before`: the row of `integers` where the weight starts.
    void swiglu(const W* w, const StrettoIntegers& integers, size_t before, const W* bias, int inner, int begin, int end, const Inputs& x,
                float* gate, float* up) {
        multiply(w, integers, before, begin, end, x, s.hidden, into(gate, inner, bias));
        multiply(w + size_t(inner) * s.hidden, integers, before + inner, begin, end, x, s.hidden, into(up, inner, bias ? bias + inner : nullptr));
        for (int t = 0; t < x.num; t++) {
            const float* factor = up + size_t(t) * inner + begin;
            map(gate + size_t(t) * inner + begin, end - begin, [&](Vec g, int i) {
                Vec u = i + LANES <= end - begin ? load(factor + i) : load_part(factor + i, end - begin - i);
                return s.limit ? clamped(g, u) : g * sigmoid(g) * u;
            });
        }
    }

    // gpt-oss: gate · sigmoid(alpha · gate) · (up + 1), with the gate clamped from above and up from both sides.
    Vec clamped(Vec g, Vec u) const {
        const Vec high = splat(s.limit), low = splat(-s.limit);
        g = g > high ? high : g;
        u = u > high ? high : u < low ? low : u;
        return g * sigmoid(g * splat(s.alpha)) * (u + 1.0f);
    }

#include "attention.inc"
#include "experts.inc"

    void logits() {
        const int hidden = s.hidden, vocab = s.vocab, num = step.num_logits;
        if (num == 0) return;
        normalise(s.norm, step.logit_tokens, num);
        blocks(vocab, [&](int begin, int end) {
            multiply(static_cast<const W*>(s.head), s.int_head, 0, begin, end, inputs(num), hidden,
                     [&](int row, int count, int m, const float* values) {
                         std::memcpy(step.logits + size_t(m) * vocab + row, values, count * sizeof(float));
                     });
        });
    }
};

struct AnyDecoder {
    Decoder<float>* wide;
    Decoder<bfloat16>* half;
};

}  // namespace stretto

extern "C" {

void stretto_sizes(int32_t* sizes) {
    sizes[0] = sizeof(StrettoShape);
    sizes[1] = sizeof(StrettoLayer);
    sizes[2] = sizeof(StrettoChoice);
    sizes[3] = sizeof(StrettoStep);
    sizes[4] = sizeof(StrettoChoose);
}

// Whether products with bf16 weights use tiles, for which tokens are rounded to bf16.
int32_t stretto_has_tiles() { return stretto::has_tiles(); }

// Whether the processor has instructions for products of integers.
int32_t stretto_has_int_dot() { return stretto::HAS_INT_DOT; }

void* stretto_create(const StrettoShape* shape, const StrettoLayer* layers) {
    auto* decoder = new stretto::AnyDecoder{};
    if (shape->is_bfloat16) decoder->half = new stretto::Decoder<stretto::bfloat16>(*shape, layers);
    else decoder->wide = new stretto::Decoder<float>(*shape, layers);
    return decoder;
}

void stretto_step(void* handle, const StrettoStep* step) {
    auto* decoder = static_cast<stretto::AnyDecoder*>(handle);
    if (decoder->half) decoder->half->step(*step);
    else decoder->wide->step(*step);
}

// y [num, num_rows] = x [num, width] · w, for tests of the kernels of integer weights.
void stretto_int_product(const StrettoIntegers* w, const float* x, int32_t num, int32_t width, int32_t num_rows, float* y) {
    std::vector<const float*> rows;
    for (int t = 0; t < num; t++) rows.push_back(x + size_t(t) * width);
    stretto::IntRows quantised;
    quantised.reserve(num, width);
    for (int t = 0; t < num; t++) quantised.fill(t, rows[t], width);
    stretto::int_product(*w, 0, 0, num_rows, quantised.rows.data(), num, width, [&](int row, int count, int t, const float* values) {
        std::memcpy(y + size_t(t) * num_rows + row, values, count * sizeof(float));
    });
}

void stretto_choose(const StrettoChoose* choose) { stretto::choose(*choose); }

void stretto_destroy(void* handle) {
    auto* decoder = static_cast<stretto::AnyDecoder*>(handle);
    delete decoder->half;
    delete decoder->wide;
    delete decoder;
}
}
