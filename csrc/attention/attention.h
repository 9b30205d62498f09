// Arguments for attention over jagged sequences (attention.inl).
#pragma once

#include <cstdint>

namespace meshrec {

constexpr int64_t kAttentionRows = 32;     // queries in a tile
constexpr int64_t kAttentionColumns = 64;  // keys in a tile
constexpr int64_t kFewQueries = 8;         // samples with fewer queries do not pack keys and values
constexpr int kBucketSlots = 64 * 8;       // octaves of a 64-bit time difference, 8 slots in each

// Finds the bucket for a time difference from the exponent and the upper three mantissa bits of its fp32
// value (a slot). A slot spans a factor of at most 1.125 and a bucket 1.35, so a slot contains at most one
// bucket border.
struct TimeBuckets {
  int32_t first[kBucketSlots];  // bucket in which a slot starts
  float border[kBucketSlots];   // where the next bucket starts, possibly beyond the slot
};

// Tokens from all samples: [N, heads, width], with a stride between tokens.
struct AttentionTokens {
  const float* data;
  int64_t stride, width;

  const float* at(int64_t token, int64_t head) const { return data + token * stride + head * width; }
};

// A sample, or some heads of it. The queries belong to the last tokens.
struct AttentionUnit {
  int64_t first_token, length, first_query, num_queries, num_targets;
  int64_t first_head, last_head;
};

struct AttentionArgs {
  AttentionTokens query, key, value;
  int64_t num_heads, max_length;
  float scale;
  bool softmax, causal;
  int64_t window, num_contextual;
  const float* position;  // [2 max_length - 1] or null
  const float* time;      // by bucket, or null; with timestamps and buckets
  const int64_t* timestamps;
  const TimeBuckets* buckets;
  float* out;       // [queries, heads, value width]
  float* log_sums;  // [queries, heads] where softmax
  float* scratch;   // attention_scratch floats
  // For the gradient only. Token gradients have the shape of the tokens, without gaps.
  const float* grad;
  float* grad_query;
  float* grad_key;
  float* grad_value;
  float* grad_position;  // for this task, or null
  float* grad_time;      // kHistogramLanes values per bucket for this task, or null
};

// neighboring keys, often in the same bucket, add to different values
constexpr int64_t kHistogramLanes = 16;

inline int64_t attention_padded(int64_t size) { return (size + 15) / 16 * 16; }

// An upper bound for what AttentionWork takes; keep the two in step.
// Returns how many scratch floats a unit needs, forward and backward.
inline int64_t attention_scratch(int64_t length, int64_t heads, int64_t query_width, int64_t value_width) {
  const int64_t keys = (length + kAttentionColumns - 1) / kAttentionColumns * kAttentionColumns;
  const int64_t query = attention_padded(query_width), value = attention_padded(value_width);
  const int64_t tile = kAttentionRows * kAttentionColumns;
  const int64_t of_rows = kAttentionRows * (2 * query + 2 * value + 4);
  return 8 * tile + heads * (of_rows + 3 * keys * (query + value));
}

}  // namespace meshrec
