// The first values of rows; see first_rows.cpp.
#pragma once

#include "stable_abi.h"

namespace meshrec {

// The columns [c0, c1) of the first row of each ID, fp32 [ids, c1 - c0].
Tensor first_rows(Tensor ids, int64_t seed, double low, double step, int64_t c0, int64_t c1);

}  // namespace meshrec
