// The first values of rows: a function of (seed, ID, column). ops/first_rows.py is the reference.
#include "index/first_rows.h"

#include "host/memory.h"

namespace meshrec {
namespace {

constexpr int64_t kRowsPerThread = 1 << 8;

// The finalizer of splitmix64, as in ops/index.
uint64_t mixed(uint64_t id, uint64_t seed) {
  uint64_t x = id + 0x9E3779B97F4A7C15u * (seed + 1);
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

}  // namespace

Tensor first_rows(Tensor ids_tensor, int64_t seed, double low, double step, int64_t c0, int64_t c1) {
  if (ids_tensor.scalar_type() != ScalarType::Long) fail("IDs must be int64.");
  const Tensor ids = as_contiguous(ids_tensor);
  const int64_t num_rows = ids.numel(), width = c1 - c0;
  Tensor result = empty_buffer({num_rows, width}, ScalarType::Float);
  const int64_t* id = ids.const_data_ptr<int64_t>();
  float* out = result.mutable_data_ptr<float>();
  parallel_for(num_rows, kRowsPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const uint64_t bits = mixed(static_cast<uint64_t>(id[row]), static_cast<uint64_t>(seed));
      const uint32_t lower = static_cast<uint32_t>(bits), upper = static_cast<uint32_t>(bits >> 32);
      float* target = out + row * width;
      for (int64_t d = 0; d < width; ++d) {
        uint32_t x = (lower + static_cast<uint32_t>(c0 + d) * 0x9E3779B9u) ^ upper;
        x = (x ^ (x >> 16)) * 0x7FEB352Du;  // the finalizer "lowbias32" of C. Wellons
        x = (x ^ (x >> 15)) * 0x846CA68Bu;
        x ^= x >> 16;
        // The product is exact in double: 24 bits times 24 bits. So there is one rounding, fused or not.
        target[d] = static_cast<float>(low + static_cast<double>(static_cast<int32_t>(x >> 8)) * step);
      }
    }
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("first_rows", TORCH_BOX(&first_rows)); }

}  // namespace meshrec
