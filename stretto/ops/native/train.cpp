// Forward and backward passes for training: an expert layer here, attention in train_attention.h, single products in train_product.h, norms, rotations
// and softmax in train_rows.h.
//
// A task of an expert layer is a run of up to ROWS slots of one expert: rows of tokens are gathered, multiplied, activated and multiplied again while
// they lie in the cache of one thread. Threads take tasks in a fixed order. A weight's gradient is the sum over its expert's tasks
// in that order, so no result depends on the number of threads.

#include <omp.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "blocks.h"
#include "train_attention.h"
#include "train_product.h"
#include "train_rows.h"

extern "C" {

// Routed experts of a layer. Tensors are contiguous and fp32 unless stated; a place is a row of the slots sorted by expert.
struct StrettoExperts {
    int32_t num_tokens, top_k, num_experts, hidden, inner, num_threads;
    const int64_t *token, *place;  // place -> token, slot -> place
    const int32_t* end;            // end of each expert's places
    const float *x, *gates, *gate_up, *down;  // gates by place
    float* middle;                            // outputs of the gate-up product [places, 2 · inner]: written by the forward pass
    float* out;                               // [tokens, hidden]
    const float* grad_out;
    float *grad_x, *grad_gates, *grad_gate_up, *grad_down;  // null: not wanted
    int32_t in_bf16;                                        // whether products are made in bf16
};
}

namespace stretto {
namespace {

constexpr int ROWS = 252;  // a multiple of MR; ROWS slots of a small network's buffers fit into the second-level cache

struct Task {
    int expert, begin, end, index;  // places; index: of the task among its expert's
};

template <class Products>
struct Layer {
    using Number = typename Products::Number;
    using Packing = typename Products::Packing;
    const StrettoExperts& s;
    const size_t hidden, inner;
    std::vector<Task> tasks;

    explicit Layer(const StrettoExperts& shape) : s(shape), hidden(shape.hidden), inner(shape.inner) {}

    size_t widest() const { return std::max(hidden, 2 * inner); }
    int first(int expert) const { return expert ? s.end[expert - 1] : 0; }

    // The first tasks of all experts come first: a thread seldom waits for another that computes the task before in the same expert.
    void list_tasks() {
        for (int index = 0, num = -1; num != int(tasks.size()); index++) {
            num = int(tasks.size());
            for (int e = 0; e < s.num_experts; e++)
                if (const int begin = first(e) + index * ROWS; begin < s.end[e]) tasks.push_back({e, begin, std::min(begin + ROWS, s.end[e]), index});
        }
    }

    // Rows of the places' tokens.
    void gather(const float* from, const Task& task, View to) const {
        for (int at = task.begin; at < task.end; at++) {
            const float* row = from + s.token[at] * hidden;
            for (size_t k = 0; k < hidden; k += DEPTH)
                std::memcpy(to.place(at - task.begin, k), row + k, std::min<size_t>(DEPTH, hidden - k) * sizeof(float));
        }
    }

    // Row `token` of `to` = Σ over its slots, in their order, of the rows of `from`.
    void combine(const float* from, float* to, int begin, int end) const {
        for (int token = begin; token < end; token++) {
            const int64_t* places = s.place + size_t(token) * s.top_k;
            float* sum = to + token * hidden;
            std::memcpy(sum, from + places[0] * hidden, hidden * sizeof(float));
            for (int k = 1; k < s.top_k; k++) {
                const float* row = from + places[k] * hidden;
                map(sum, int(hidden), [&](Vec v, int i) { return v + load_up_to(row + i, int(hidden) - i); });
            }
        }
    }

    template <class F>
    void over_columns(F f) const {
        for (int i = 0; i < int(inner); i += LANES) f(i, std::min(LANES, int(inner) - i));
    }

    void forward() {
        list_tasks();
        const size_t up_size = Products::weight_size(2 * inner, hidden), down_size = Products::weight_size(hidden, inner);
        const Packing packed(s.num_experts * (up_size + down_size));
        const Buffer y(size_t(s.num_tokens) * s.top_k * hidden);
        std::atomic<int> next{0};
#pragma omp parallel num_threads(s.num_threads)
        {
#pragma omp for schedule(dynamic, 1)
            for (int e = 0; e < s.num_experts; e++) {
                if (first(e) == s.end[e]) continue;
                Number* to = packed.at + e * (up_size + down_size);
                Products::pack_rows(s.gate_up + 2 * e * inner * hidden, hidden, int(2 * inner), int(hidden), to);
                Products::pack_rows(s.down + e * hidden * inner, inner, int(hidden), int(inner), to + up_size);
            }
            Products products(ROWS, widest());
            const Buffer rows(Products::size(ROWS, hidden)), active(Products::size(ROWS, inner));
            const View x = Products::view(rows.at, ROWS, hidden), a = Products::view(active.at, ROWS, inner);
            for (int at; (at = next.fetch_add(1)) < int(tasks.size());) {
                const Task& task = tasks[at];
                const int num = task.end - task.begin;
                const Number* weights = packed.at + task.expert * (up_size + down_size);
                float* h = s.middle + task.begin * 2 * inner;
                gather(s.x, task, x);
                products.multiply(x, num, int(hidden), Products::weight(weights, hidden), int(2 * inner), matrix(h, 2 * inner));
                for (int row = 0; row < num; row++) {
                    const float* both = h + row * 2 * inner;
                    const Vec gate = splat(s.gates[task.begin + row]);
                    over_columns([&](int i, int part) {
                        const Vec g = load_up_to(both + i, part), u = load_up_to(both + inner + i, part);
                        store_part(a.place(row, i), g * sigmoid(g) * u * gate, part);
                    });
                }
                products.multiply(a, num, int(inner), Products::weight(weights + up_size, inner), int(hidden), matrix(y.at + task.begin * hidden, hidden));
            }
#pragma omp barrier
#pragma omp for schedule(static)
            for (int token = 0; token < s.num_tokens; token++) combine(y.at, s.out, token, token + 1);
        }
    }

    void backward() {
        list_tasks();
        const size_t up_size = Products::weight_size(hidden, 2 * inner), down_size = Products::weight_size(inner, hidden);
        const size_t up_num = 2 * inner * hidden, down_num = hidden * inner;
        const Packing packed(s.num_experts * (up_size + down_size));
        const Buffer dx(s.grad_x ? size_t(s.num_tokens) * s.top_k * hidden : 0);
        std::atomic<int> next{0};
        const std::unique_ptr<std::atomic<int>[]> done(new std::atomic<int>[s.num_experts]());  // tasks added to the expert's gradients
#pragma omp parallel num_threads(s.num_threads)
        {
#pragma omp for schedule(dynamic, 1)
            for (int e = 0; e < s.num_experts; e++) {
                if (first(e) == s.end[e]) {
                    if (s.grad_gate_up) std::memset(s.grad_gate_up + e * up_num, 0, up_num * sizeof(float));
                    if (s.grad_down) std::memset(s.grad_down + e * down_num, 0, down_num * sizeof(float));
                    continue;
                }
                Number* to = packed.at + e * (up_size + down_size);
                Products::pack_columns(s.gate_up + e * up_num, hidden, int(hidden), int(2 * inner), to);
                Products::pack_columns(s.down + e * down_num, inner, int(inner), int(hidden), to + up_size);
            }
            Products products(ROWS, widest());
            const Buffer rows(Products::size(ROWS, hidden)), grads(Products::size(ROWS, hidden)), middle(Products::size(ROWS, 2 * inner));
            const Buffer active(Products::size(ROWS, inner)), up_sum(up_num), down_sum(down_num);
            const View x = Products::view(rows.at, ROWS, hidden), dy = Products::view(grads.at, ROWS, hidden);
            const View dh = Products::view(middle.at, ROWS, 2 * inner), a = Products::view(active.at, ROWS, inner);
            for (int at; (at = next.fetch_add(1)) < int(tasks.size());) {
                const Task& task = tasks[at];
                const int num = task.end - task.begin;
                const Number* weights = packed.at + task.expert * (up_size + down_size);
                gather(s.grad_out, task, dy);
                products.multiply(dy, num, int(hidden), Products::weight(weights + up_size, hidden), int(inner), a);
                for (int row = 0; row < num; row++) activation_gradient(task.begin + row, row, a, dh);
                if (s.grad_x) products.multiply(dh, num, int(2 * inner), Products::weight(weights, 2 * inner), int(hidden), matrix(dx.at + task.begin * hidden, hidden));
                const bool is_first = task.index == 0;
                float* up_to = is_first ? s.grad_gate_up + task.expert * up_num : up_sum.at;
                float* down_to = is_first ? s.grad_down + task.expert * down_num : down_sum.at;
                if (s.grad_gate_up) {
                    gather(s.x, task, x);
                    products.template multiply_transposed<false>(dh, int(2 * inner), num, x, int(hidden), up_to);
                }
                if (s.grad_down) products.template multiply_transposed<false>(dy, int(hidden), num, a, int(inner), down_to);
                // earlier tasks of the expert were taken by other threads before this one, so they end
                while (done[task.expert].load(std::memory_order_acquire) != task.index) std::this_thread::yield();
                if (!is_first && s.grad_gate_up) add(s.grad_gate_up + task.expert * up_num, up_sum.at, up_num);
                if (!is_first && s.grad_down) add(s.grad_down + task.expert * down_num, down_sum.at, down_num);
                done[task.expert].store(task.index + 1, std::memory_order_release);
            }
#pragma omp barrier
            if (s.grad_x) {
#pragma omp for schedule(static)
                for (int token = 0; token < s.num_tokens; token++) combine(dx.at, s.grad_x, token, token + 1);
            }
        }
    }

    // From the gradient of the gated activation in `a`: that of gate and up in `dh`, that of the place's gate, and in `a` the gated activation.
    void activation_gradient(int at, int row, View a, View dh) const {
        const float* both = s.middle + at * 2 * inner;
        const Vec gate = splat(s.gates[at]);
        Vec total = {};
        over_columns([&](int i, int part) {
            float* grad = a.place(row, i);
            const Vec g = load_up_to(both + i, part), u = load_up_to(both + inner + i, part), d = load_up_to(grad, part);
            const Vec half = sigmoid(g), silu = g * half, full = silu * u, inside = d * gate;
            total += d * full;
            store_part(grad, full * gate, part);
            store_part(dh.place(row, i), inside * u * (half + silu * (1.0f - half)), part);
            put(dh, row, int(inner) + i, inside * silu, part);
        });
        if (s.grad_gates) s.grad_gates[at] = sum(total);
    }

    // Columns [column, column + num) of a row, which may lie in two blocks.
    static void put(View to, int row, int column, Vec v, int num) {
        const int left = std::min(num, DEPTH - column % DEPTH);
        if (left == LANES) {
            store(to.place(row, column), v);
            return;
        }
        for (int i = 0; i < num; i++) *to.place(row, column + i) = v[i];
    }

    static void add(float* to, const float* from, size_t num) {
        size_t i = 0;
        for (; i + LANES <= num; i += LANES) store(to + i, load(to + i) + load(from + i));
        for (; i < num; i++) to[i] += from[i];
    }
};

// Calls `run` with an expert layer or attention in the arithmetic that its shape asks for.
template <template <class> class Pass, class Shape, class Run>
void with_products(const Shape& shape, Run run) {
#if defined(STRETTO_BF16)
    if (shape.in_bf16) return run(Pass<HalfProducts>(shape));
#endif
    run(Pass<WideProducts>(shape));
}

}  // namespace
}  // namespace stretto

extern "C" {
void stretto_training_sizes(int32_t* sizes) {
    sizes[0] = sizeof(StrettoExperts);
    sizes[1] = sizeof(StrettoAttention);
    sizes[2] = sizeof(StrettoProduct);
    sizes[3] = sizeof(StrettoNorm);
    sizes[4] = sizeof(StrettoRotation);
    sizes[5] = sizeof(StrettoSoftmax);
}
// Whether anything may ask for products in bf16.
int32_t stretto_training_in_bf16() { return stretto::has_bf16(); }
void stretto_product(const StrettoProduct* shape) { stretto::matrix_product(*shape); }
void stretto_norm_forward(const StrettoNorm* shape) { stretto::norm_forward(*shape); }
void stretto_norm_backward(const StrettoNorm* shape) { stretto::norm_backward(*shape); }
void stretto_rotate(const StrettoRotation* shape) { stretto::rotate_heads(*shape); }
void stretto_softmax(const StrettoSoftmax* shape) { stretto::softmax_rows(*shape); }
void stretto_experts_forward(const StrettoExperts* shape) {
    stretto::with_products<stretto::Layer>(*shape, [](auto layer) { layer.forward(); });
}
void stretto_experts_backward(const StrettoExperts* shape) {
    stretto::with_products<stretto::Layer>(*shape, [](auto layer) { layer.backward(); });
}
void stretto_attention_forward(const StrettoAttention* shape) {
    stretto::with_products<stretto::AttentionPass>(*shape, [](auto pass) { pass.forward(); });
}
void stretto_attention_backward(const StrettoAttention* shape) {
    stretto::with_products<stretto::AttentionPass>(*shape, [](auto pass) { pass.backward(); });
}
}
