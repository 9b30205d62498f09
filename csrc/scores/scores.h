// Arguments for the kernels that rank scores (scores.inl). See isa/kernels.h for the rules.
#pragma once

#include <cstdint>

namespace meshrec {

// Rows [first, last) of scores [B, columns], and a target score per row. Outputs have a value per row.
struct RankArgs {
  const float* scores;
  const float* targets;
  int64_t columns, first, last;
  float* above;  // scores that are not at most the target's; NaN is above all
  float* equal;
  float* log_sums;  // log-sum-exp over the row
};

// The columns [begin, end) of a row.
struct LargerArgs {
  const float* row;
  int64_t begin, end;
  float threshold;    // not NaN
  int32_t* columns;   // with room for `room` entries
  int64_t room;       // at least 16
  int64_t count = 0;  // out: entries written
};

}  // namespace meshrec
