// The arguments of the dot interaction (interaction.inl).
#pragma once

#include <cstdint>

namespace meshrec {

// Samples [first, last) of dense vectors [B, dim] and sparse ones [B, num_sparse, dim].
struct InteractionArgs {
  const float* dense;
  const float* sparse;
  int64_t num_sparse, dim, first, last;
  float* out;         // [B, dim + pairs]
  const float* grad;  // like out
  float* grad_dense;
  float* grad_sparse;
  float* scratch;
};

inline int64_t interaction_stride(int64_t num_vectors) { return (num_vectors + 4 + 31) / 32 * 32; }

}  // namespace meshrec
