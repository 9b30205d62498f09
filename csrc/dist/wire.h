// Arguments for encoding and decoding rows (wire.inl describes the row format).
#pragma once

#include <cstdint>

namespace meshrec {

enum WireCode : int { kWireFloat, kWireHalf, kWireBFloat16, kWireInt8, kWireInt4, kNumWireCodes };
// An fp32 scale and an fp32 midpoint.
constexpr int64_t kWireParamBytes = 8;
// Rows with a smaller range get this scale. The inverse, times 2^16 for stochastic rounding, is then at most
// 2^126, which is finite.
constexpr float kWireLeastScale = 0x1p-110f;

struct WireRowsArgs {
  const float* rows;  // to encode: row i starts at i * row_stride
  float* decoded;     // to decode, instead of rows
  int64_t row_stride, num_rows, dim;
  uint8_t* message;  // row i starts at i * message_stride
  int64_t message_stride;
  int format;
  bool stochastic;
  bool to_l1;  // when encoding, prefetch rows to L1 (see prefetch_to_l1)
  uint64_t seed, step;
  int64_t first_column;  // whole-table column where the rows start
  const int64_t* keys;   // by row; null: first_key + row
  uint64_t first_key;
  uint8_t* scratch;    // dim + 1 bytes
  int64_t* first_bad;  // first row with a non-finite value, if any
};

}  // namespace meshrec
