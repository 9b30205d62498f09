// Initial rows; see first_rows.cpp.
#pragma once

#include "index/draw.h"
#include "stable_abi.h"

namespace meshrec {

// Returns columns [c0, c1) of the initial row for each ID, fp32 [ids, c1 - c0].
Tensor first_rows(Tensor ids, int64_t seed, double low, double step, int64_t c0, int64_t c1);

// Writes the initial rows for IDs to their slots, with several threads if there are many.
void draw_rows(const DrawArgs& args, int64_t num_rows);

}  // namespace meshrec
