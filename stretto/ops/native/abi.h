// Records that Python passes. __init__.py declares them again, field by field, and checks their sizes with `stretto_sizes`.
#pragma once

#include <cstdint>

extern "C" {

// An integer weight [rows, inputs] in panels (integers.h); bits 0: the weight is not of integers.
struct StrettoIntegers {
    const uint8_t* codes;
    const uint16_t* scales;  // fp16
    const int8_t* zeros;     // null: none
    int64_t bits;
};

// Sizes, options and tensors of the network.
struct StrettoShape {
    int32_t num_layers, hidden, num_heads, num_kv_heads, head_dim, rotary_half, vocab, page_size;
    int32_t num_moe_layers, route_slots, route_bytes, softmax, normalize, is_bfloat16;
    int32_t wide_norm;                  // 1: q_norm and k_norm normalise all heads of a token as one vector
    int32_t expert_groups, top_groups;  // number of groups of experts, and of groups in which a token chooses
    float eps, scaling, attention_scale;
    float qkv_clip;      // largest magnitude of queries, keys and values; 0: no limit
    float alpha, limit;  // parameters of a clamped SwiGLU; limit 0: silu(gate) · up
    int64_t num_pages;
    const float *cosine, *sine;  // [positions, rotary_half]
    const void *embedding, *norm, *head;
    void *keys, *values;  // [layers, pages, page_size, kv_heads, head_dim]
    void* routes;         // [pages, page_size, moe_layers, route_slots] or null
    StrettoIntegers int_head;
};

// Weights of one layer, in the network's data type unless stated; null if the layer has none.
struct StrettoLayer {
    const void *attention_norm, *qkv, *qkv_bias, *out, *out_bias, *q_norm, *k_norm, *sinks, *mlp_norm;
    const void *gate_up, *gate_up_bias, *down, *down_bias;  // experts [E, 2I, D] and [E, D, I], or the dense block
    const void *router, *router_bias, *shared_gate_up, *shared_gate_up_bias, *shared_down, *shared_down_bias;
    const float* bias;    // fp32 [branches, experts]
    const int32_t* rank;  // [experts], index in the nested order
    int32_t num_experts, inner, shared_inner, moe_row;  // num_experts 0: a dense block, moe_row is not used
    int32_t window;                                     // number of positions that a query sees; 0: all
    int32_t unused;
    StrettoIntegers int_qkv, int_out, int_gate_up, int_down, int_shared_gate_up, int_shared_down;  // in place of the weights
};

// Choices of one Subnet in one layer.
struct StrettoChoice {
    int32_t active, num_experts, top_k, branch;
};

// One step over num_tokens tokens.
struct StrettoStep {
    int32_t num_tokens, num_logits, num_threads, write_routes;
    const int32_t *token, *position, *table, *subnet;  // by token; table: start of its sequence's page table in `pages`
    const int32_t* pages;
    const StrettoChoice* choices;  // [subnets, layers]
    const int32_t* logit_tokens;   // tokens whose logits are returned
    float* logits;                 // [num_logits, vocab]
};

// Choice of the next token of each sequence from its row of logits.
struct StrettoChoose {
    int32_t num_sequences, vocab, num_threads;
    const float* logits;         // [num_sequences, vocab]
    const int32_t* position;     // by sequence: index of the chosen token in the sequence
    const float* temperature;    // by sequence; 0: the most probable token
    const uint64_t* seed;        // by sequence
    int32_t* chosen;             // by sequence
    float* logprob;              // by sequence
};
}
