// The arguments of the codes of rows between ranks (wire.inl describes the layout of a row).
#pragma once

#include <cstdint>

namespace meshrec {

enum WireCode : int { kWireFloat, kWireHalf, kWireBFloat16, kWireInt8, kWireInt4, kNumWireCodes };
constexpr int64_t kWireParamBytes = 8;
constexpr float kWireLeastScale = 0x1p-110f;

struct WireRowsArgs {
  const float* rows;  // to encode: row i begins at i * row_stride
  float* decoded;     // to decode, instead of rows
  int64_t row_stride, num_rows, dim;
  uint8_t* message;  // row i begins at i * message_stride
  int64_t message_stride;
  int format;
  bool stochastic;
  bool to_l1;  // whether rows are prefetched to L1 (see prefetch_to_l1), only to encode
  uint64_t seed, step;
  int64_t first_column;  // of the rows in their whole table
  const int64_t* keys;   // by row, or null: first_key + row
  uint64_t first_key;
  uint8_t* scratch;    // dim + 1 bytes
  int64_t* first_bad;  // the first row with a number that is not finite, if there is one
};

}  // namespace meshrec
