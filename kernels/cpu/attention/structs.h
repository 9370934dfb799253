// Arguments from Python: worker_proc/attention/cpu_native.py has the same fields in the same order.
#pragma once

#include <cstdint>

extern "C" {

// One step of one KV group: StepBatch.
struct QuireStep {
    const int32_t* block_table;      // [num_rows, table_width], rows table_stride apart
    const int32_t* query_start_loc;  // [num_rows + 1]
    const int32_t* seq_lens;         // [num_rows]
    const int64_t* slot_mapping;     // [num_tokens]; tokens with negative slots are not written
    const int32_t* prefix_of_row;    // [num_rows]: index of the prefix that the row shares; negative: none
    const int32_t* prefix_lens;      // [num_prefixes]: keys; no row's first token is before its prefix's end
    const int32_t* last_keys;        // [num_tokens]: last position that each token sees; null: its own
    int64_t num_rows, num_tokens, table_width, table_stride, block_size, window, chunk, num_prefixes;
};

// One layer: AttentionSpec and its KV cache.
struct QuireLayer {
    const float* sinks;    // [num_heads] or null
    const float* k_scale;  // [num_kv_heads], or null for 1, as v_scale
    const float* v_scale;
    int64_t num_heads, num_kv_heads, head_dim, num_blocks, cache_format, query_format;
    int64_t values_from, block_stride;  // of the cache, in its elements: distances from keys to values, and of blocks
    double scale, soft_cap;
    int64_t value_dim;  // values are the last value_dim numbers of the keys' head_dim, and the cache has no others; 0: not
    int64_t key_dim;    // numbers of a query and of a key, which are the first of its head_dim; head_dim but for expanded latents
};

// The tokens to prepare: all in query_format, strides in elements, the last dimension contiguous.
struct QuireTokens {
    void* query;       // [num_tokens, num_heads, head_dim], changed in place; null to leave queries unchanged
    const void* key;   // [num_tokens, num_kv_heads, head_dim], as value; null to write nothing
    const void* value;  // null with latents
    const void* q_norm;  // [head_dim] in query_format, or null, as k_norm
    const void* k_norm;
    const void* table;         // [2, max_position, rotary_dim]: cosines, signed sines; null for no rotation
    const int64_t* positions;  // [num_tokens]
    int64_t token_stride, head_stride, value_token_stride, value_head_stride;
    int64_t table_format, max_position, rotary_dim;
    double norm_eps;
};

}

// Scale of a KV head.
inline float head_scale(const float* scales, int64_t head) { return scales ? scales[head] : 1.0f; }

// Error codes.
constexpr int64_t BAD_BLOCK = 1;     // a block id outside the cache
constexpr int64_t BAD_LENGTH = 2;    // a row longer than its block table, or than the step
constexpr int64_t BAD_SLOT = 3;      // a slot outside the cache
constexpr int64_t BAD_POSITION = 4;  // a position outside the rotary table
