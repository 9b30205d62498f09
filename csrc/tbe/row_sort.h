// Sorting of (row, gradient) pairs, a range of rows at a time.
#pragma once

#include "isa/kernels.h"

namespace meshrec {

// Sorts pairs by row, stably. The rows are in [first_row, first_row + num_rows). Returns where the sorted
// pairs are: `pairs` or `spare`.
const Pair* sort_by_row(Pair* pairs, Pair* spare, int64_t count, uint32_t first_row, uint32_t num_rows);

}  // namespace meshrec
