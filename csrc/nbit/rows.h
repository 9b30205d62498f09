// The arguments of quantising (rows.inl).
#pragma once

#include <cstdint>

namespace meshrec {

// Quantises numbers; nbit/rows.inl describes the layout of a row.
constexpr int64_t kQuantizeRows = 16;
struct QuantizeArgs {
  const float* rows;  // [num_rows, dim]
  int64_t num_rows;   // at most kQuantizeRows
  int64_t dim;
  const uint16_t* params;  // [num_rows, 2] fp16 scale and bias to take, or null
  uint8_t* out;            // [num_rows, row_bytes]
  int64_t row_bytes;
};

}  // namespace meshrec
