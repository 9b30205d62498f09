// The distinct IDs of a batch; see unique.cpp.
#pragma once

#include <tuple>

#include "stable_abi.h"

namespace meshrec {

// The distinct IDs in ascending order, and the position of each ID among them.
std::tuple<Tensor, Tensor> index_unique(Tensor ids);

}  // namespace meshrec
