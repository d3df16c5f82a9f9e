// The records that Python passes (__init__.py mirrors them field by field; `stretto_sizes` lets it check).
#pragma once

#include <cstdint>

extern "C" {

// What holds for the whole network.
struct StrettoShape {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_half, vocab, page_size;
    int32_t num_moe_layers, route_slots, route_bytes, softmax, normalize, is_bfloat16;
    int32_t wide_norm;                  // q_norm and k_norm are of all heads of a token as one vector
    int32_t expert_groups, top_groups;  // 1 and 1: a token chooses among all experts
    float eps, scaling, attention_scale;
    float qkv_clip;      // 0: none
    float alpha, limit;  // of a clamped SwiGLU; limit 0: silu(gate) · up
    int64_t num_pages;
    const float *cosine, *sine;  // [positions, rotary_half]
    const void *embedding, *norm, *head;
    void *keys, *values;  // [layers, pages, page_size, kv_heads, head_dim]
    void* routes;         // [pages, page_size, moe_layers, route_slots] or null
};

// One layer's weights, in the network's dtype unless said otherwise; null where there is none.
struct StrettoLayer {
    const void *attention_norm, *qkv, *qkv_bias, *out, *out_bias, *q_norm, *k_norm, *sinks, *mlp_norm;
    const void *gate_up, *gate_up_bias, *down, *down_bias;  // of the experts [E, 2I, D] and [E, D, I], or of the dense block
    const void *router, *router_bias, *shared_gate_up, *shared_gate_up_bias, *shared_down, *shared_down_bias;
    const float* bias;    // fp32 [branches, experts]
    const int32_t* rank;  // [experts], place in the nested order
    int32_t num_experts, inner, shared_inner, moe_row;  // num_experts 0: a dense block, without moe_row
    int32_t window;                                     // positions that a query sees; 0: all
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

// Choosing: the next token of each sequence, from its row of logits.
struct StrettoChoose {
    int32_t num_sequences, vocab, num_threads;
    const float* logits;         // [num_sequences, vocab]
    const int32_t* position;     // by sequence: index in it of the token that is chosen
    const float* temperature;    // by sequence; 0: the most probable token
    const uint64_t* seed;        // by sequence
    int32_t* chosen;             // by sequence
    float* logprob;              // by sequence
};
}
