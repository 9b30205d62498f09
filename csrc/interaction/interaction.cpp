// Dot products between a sample's vectors, in a single pass over them, forward and backward.
// ops/interaction/naive.py documents arguments and results.
#include "host/memory.h"
#include "isa/kernels.h"
#include "stable_abi.h"

namespace meshrec {
namespace {

constexpr int64_t kChunk = 64;  // samples per task

struct Vectors {
  Tensor dense, sparse;
  int64_t batch, num_sparse, dim;
  InteractionType type;

  Vectors(const Tensor& dense_rows, const Tensor& sparse_rows)
      : dense(as_contiguous(dense_rows)), sparse(as_contiguous(sparse_rows)) {
    type = type_of(dense.scalar_type(), sparse.scalar_type());
    if (dense.dim() != 2 || sparse.dim() != 3 || sparse.size(0) != dense.size(0) ||
        sparse.size(2) != dense.size(1)) {
      fail("dot_interaction: dense must be [B, D] and sparse [B, F, D]");
    }
    batch = sparse.size(0), num_sparse = sparse.size(1), dim = sparse.size(2);
  }

  static InteractionType type_of(ScalarType dense, ScalarType sparse) {
    if (dense == ScalarType::Float && sparse == ScalarType::Float) return kFloats;
    if (dense == ScalarType::BFloat16 && sparse == ScalarType::Float) return kBFloat16AndFloats;
    if (dense == ScalarType::BFloat16 && sparse == ScalarType::BFloat16) return kBFloat16s;
    fail("dot_interaction: dense must be float32 or bfloat16, and sparse float32 or the type of dense");
  }

  int64_t out_dim() const { return dim + num_sparse * (num_sparse + 1) / 2; }

  InteractionArgs arguments() const {
    InteractionArgs args{};
    args.dense = dense.const_data_ptr();
    args.sparse = sparse.const_data_ptr();
    args.num_sparse = num_sparse;
    args.dim = dim;
    return args;
  }

  void for_chunks(const InteractionArgs& args, void (*work)(const InteractionArgs&, InteractionType)) const {
    parallel_tasks((batch + kChunk - 1) / kChunk, [&](int64_t chunk) {
      std::vector<float> scratch(interaction_scratch(num_sparse + 1, dim));
      InteractionArgs own = args;
      own.first = chunk * kChunk;
      own.last = std::min(batch, own.first + kChunk);
      own.scratch = scratch.data();
      work(own, type);
    });
  }
};

Tensor dot_interaction(Tensor dense, Tensor sparse) {
  const Vectors vectors(dense, sparse);
  Tensor out = empty_buffer({vectors.batch, vectors.out_dim()}, vectors.dense.scalar_type());
  InteractionArgs args = vectors.arguments();
  args.out = out.mutable_data_ptr();
  vectors.for_chunks(args, kernels().interact);
  return out;
}

std::tuple<Tensor, Tensor> dot_interaction_grad(Tensor grad, Tensor dense, Tensor sparse) {
  const Vectors vectors(dense, sparse);
  const Tensor of_out = as_contiguous(grad);
  const ScalarType type = vectors.dense.scalar_type();
  if (of_out.scalar_type() != type || of_out.numel() != vectors.batch * vectors.out_dim()) {
    fail("dot_interaction_grad: the gradient must be [B, D + F (F + 1) / 2], with the type of dense, ",
         type == ScalarType::Float ? "float32" : "bfloat16");
  }
  Tensor of_dense = empty_buffer({vectors.batch, vectors.dim}, type);
  Tensor of_sparse =
      empty_buffer({vectors.batch, vectors.num_sparse, vectors.dim}, vectors.sparse.scalar_type());
  InteractionArgs args = vectors.arguments();
  args.grad = of_out.const_data_ptr();
  args.grad_dense = of_dense.mutable_data_ptr();
  args.grad_sparse = of_sparse.mutable_data_ptr();
  vectors.for_chunks(args, kernels().interact_grad);
  return {of_dense, of_sparse};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("dot_interaction", TORCH_BOX(&dot_interaction));
  m.impl("dot_interaction_grad", TORCH_BOX(&dot_interaction_grad));
}

}  // namespace meshrec
