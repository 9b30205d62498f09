// Arguments for the dot interaction (interaction.inl).
#pragma once

#include <cstdint>

namespace meshrec {

// Element types of dense and sparse vectors. Products are added in fp32. Results have the type of the dense
// vectors, and gradients the type of the vectors.
enum InteractionType : int { kFloats, kBFloat16AndFloats, kBFloat16s, kNumInteractionTypes };

// Samples [first, last) with dense vectors [B, dim] and sparse vectors [B, num_sparse, dim].
struct InteractionArgs {
  const void* dense;
  const void* sparse;
  int64_t num_sparse, dim, first, last;
  void* out;         // [B, dim + pairs]
  const void* grad;  // like out
  void* grad_dense;
  void* grad_sparse;
  float* scratch;  // interaction_scratch floats
};

inline int64_t interaction_stride(int64_t num_vectors) { return (num_vectors + 4 + 31) / 32 * 32; }

// Returns how many floats the larger of the two passes needs, for any types.
inline int64_t interaction_scratch(int64_t num_vectors, int64_t dim) {
  const int64_t pairs = interaction_stride(num_vectors), width = (dim + 63) / 64 * 64;
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  const int64_t forward = (width + 4) * pairs + pairs * width / 2 + (dim + num_pairs) / 2 + 16;
  const int64_t backward = (num_vectors + 4) * (width + pairs);
  return forward > backward ? forward : backward;
}

}  // namespace meshrec
