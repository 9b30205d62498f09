// Initial rows: a function of (seed, ID, column). ops/initial_rows.py is the reference.
#include "index/first_rows.h"

#include "host/memory.h"
#include "isa/kernels.h"

namespace meshrec {
namespace {

constexpr int64_t kRowsPerThread = 1 << 8;

// Writes initial rows to their slots.
void begin_rows(Tensor rows, Tensor slots_tensor, Tensor ids_tensor, int64_t seed, double low, double step,
                int64_t c0) {
  if (rows.scalar_type() != ScalarType::Float || rows.dim() != 2 || !rows.is_contiguous())
    fail("rows must be contiguous, fp32 with 2 dimensions.");
  if (ids_tensor.scalar_type() != ScalarType::Long || slots_tensor.scalar_type() != ScalarType::Long ||
      ids_tensor.numel() != slots_tensor.numel())
    fail("IDs and slots must be int64, and as many of them.");
  const Tensor ids = as_contiguous(ids_tensor), slots = as_contiguous(slots_tensor);
  const int64_t num_rows = ids.numel();
  const auto* slot = static_cast<const int64_t*>(slots.const_data_ptr());
  for (int64_t i = 0; i < num_rows; ++i)
    if (slot[i] < 0 || slot[i] >= rows.size(0)) fail("slot ", slot[i], " is outside [0, ", rows.size(0), ")");
  draw_rows({.ids = static_cast<const int64_t*>(ids.const_data_ptr()),
             .slots = slot,
             .seed = uint64_t(seed),
             .low = low,
             .step = step,
             .first_column = c0,
             .width = rows.size(1),
             .rows = static_cast<float*>(rows.mutable_data_ptr())},
            num_rows);
}

}  // namespace

void draw_rows(const DrawArgs& args, int64_t num_rows) {
  parallel_for(num_rows, kRowsPerThread,
               [&](int64_t begin, int64_t end) { kernels().draw(args, begin, end); });
}

Tensor first_rows(Tensor ids_tensor, int64_t seed, double low, double step, int64_t c0, int64_t c1) {
  if (ids_tensor.scalar_type() != ScalarType::Long) fail("IDs must be int64.");
  const Tensor ids = as_contiguous(ids_tensor);
  Tensor result = empty_buffer({ids.numel(), c1 - c0}, ScalarType::Float);
  draw_rows({.ids = ids.const_data_ptr<int64_t>(),
             .seed = uint64_t(seed),
             .low = low,
             .step = step,
             .first_column = c0,
             .width = c1 - c0,
             .rows = result.mutable_data_ptr<float>()},
            ids.numel());
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("first_rows", TORCH_BOX(&first_rows));
  m.impl("begin_rows", TORCH_BOX(&begin_rows));
}

}  // namespace meshrec
