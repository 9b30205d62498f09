// Arguments for quantization (rows.inl).
#pragma once

#include <cstdint>

namespace meshrec {

// Quantizes rows; nbit/rows.inl describes the row format.
constexpr int64_t kQuantizeRows = 16;
struct QuantizeArgs {
  const float* rows;  // [num_rows, dim]
  int64_t num_rows;   // at most kQuantizeRows
  int64_t dim;
  const uint16_t* params;  // [num_rows, 2] given fp16 scale and bias, or null
  uint8_t* out;            // [num_rows, row_bytes]
  int64_t row_bytes;
};

}  // namespace meshrec
