// Arguments for the kernel that computes initial rows (draw.inl). See isa/kernels.h for the rules.
#pragma once

#include <cstdint>

namespace meshrec {

struct DrawArgs {
  const int64_t* ids = nullptr;
  const int64_t* slots = nullptr;  // row index for each ID; null: consecutive
  uint64_t seed = 0;
  double low = 0, step = 0;
  int64_t first_column = 0, width = 0;
  float* rows = nullptr;
};

}  // namespace meshrec
