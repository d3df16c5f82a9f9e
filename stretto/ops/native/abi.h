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

// Drafting: every row decodes with its Subnet, up to num_steps tokens, each chosen from the logits before it.
struct StrettoDraft {
    int32_t num_rows, num_steps, num_threads, num_ends;
    const int32_t *token, *position, *table, *subnet;  // by row, of the token that is computed first; as in StrettoStep
    const int32_t *most, *end;                         // by row: tokens to draft at most; a token after which it stops, or −1
    const int32_t *ends, *pages;                       // ends: [num_ends], tokens after which any row stops
    const StrettoChoice* choices;
    const float* temperature;    // by row; 0: the most probable token
    const uint64_t* seed;        // by row
    int32_t* drafted;            // [num_rows, num_steps], −1 where a row drafted nothing
    float* probabilities;        // [num_steps, num_rows, vocab], set for rows with a temperature; null where there are none
};

// Choosing: for each sequence the drafts that stand, and the token of its own that follows them.
struct StrettoChoose {
    int32_t num_sequences, vocab, num_threads, num_drafts;
    const float* logits;         // rows of all sequences one after the other, each num_drafted + 1
    const int32_t *num_drafted;  // by sequence
    const int32_t *position;     // by sequence: index in it of the token that its first row chooses
    const int32_t *drafted;      // drafts of all sequences one after the other
    const float* const* draft;   // [num_drafts]: probabilities that each draft was drawn by; null: it was certain, or its row is greedy
    const float* temperature;    // by sequence; 0: the most probable token
    const uint64_t* seed;        // by sequence
    int32_t* num_kept;           // by sequence
    int32_t* chosen;             // by row; a sequence's first num_kept + 1 are set
    float* logprob;              // of those
};
}
