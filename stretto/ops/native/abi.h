// The records that Python passes (decode.py mirrors them field by field; `stretto_sizes` lets it check).
#pragma once

#include <cstdint>

extern "C" {

// What holds for the whole network.
struct StrettoShape {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_half, vocab, page_size;
    int32_t num_moe_layers, route_slots, route_bytes, softmax, normalize, is_bfloat16;
    float eps, scaling;
    int64_t num_pages;
    const float *cosine, *sine;  // [positions, rotary_half]
    const void *embedding, *norm, *head;
    void *keys, *values;  // [layers, pages, page_size, kv_heads, head_dim]
    void* routes;         // [pages, page_size, moe_layers, route_slots] or null
};

// One layer's weights, in the network's dtype unless said otherwise; null where there is none.
struct StrettoLayer {
    const void *attention_norm, *qkv, *qkv_bias, *out, *q_norm, *k_norm, *mlp_norm;
    const void *gate_up, *down;  // of the experts [E, 2I, D] and [E, D, I], or of the dense block
    const void *router, *shared_gate_up, *shared_down;
    const float* bias;    // fp32 [branches, experts]
    const int32_t* rank;  // [experts], place in the nested order
    int32_t num_experts, inner, shared_inner, moe_row;  // num_experts 0: a dense block, without moe_row
};

// What one Subnet does in one layer.
struct StrettoChoice {
    int32_t active, num_experts, top_k, branch;
};

// One step over num_tokens tokens.
struct StrettoStep {
    int32_t num_tokens, num_logits, num_threads, write_routes;
    const int32_t *token, *position, *table, *subnet;  // by token; table: where its sequence's pages start in `pages`
    const int32_t* pages;
    const StrettoChoice* choices;  // [subnets, layers]
    const int32_t* logit_tokens;   // tokens whose logits are wanted
    float* logits;                 // [num_logits, vocab]
};
}
