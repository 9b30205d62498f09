// Distinct IDs in a batch; see unique.cpp.
#pragma once

#include <tuple>

#include "stable_abi.h"

namespace meshrec {

// Returns the distinct IDs in ascending order, and the index of every ID among them.
std::tuple<Tensor, Tensor> index_unique(Tensor ids);

}  // namespace meshrec
