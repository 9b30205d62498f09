// Helpers shared by the operators on IDs: tensors, and pieces of a batch for parallel work.
#pragma once

#include "host/memory.h"

namespace meshrec {

constexpr int64_t kGrainIds = 1 << 12;

inline Tensor new_int64(int64_t size) { return empty_buffer({size}, ScalarType::Long); }

inline void check_ids(const Tensor& ids) {
  if (ids.dim() != 1 || ids.scalar_type() != ScalarType::Long) fail("ids must be int64 with 1 dimension");
}

// A position range within [0, count), at most kGrainIds long. part -1: positions outside all parts.
struct IdPiece {
  int64_t begin, end, part;
};

inline std::vector<IdPiece> pieces_of(int64_t count, const std::vector<int64_t>& starts,
                                      const std::vector<int64_t>& ends) {
  if (starts.size() != ends.size()) fail(starts.size(), " parts begin and ", ends.size(), " end");
  std::vector<IdPiece> pieces;
  const auto add = [&](int64_t begin, int64_t end, int64_t part) {
    if (end < begin) fail("parts must be ascending and lie in [0, ", count, ")");
    for (; begin < end; begin += kGrainIds) pieces.push_back({begin, std::min(end, begin + kGrainIds), part});
  };
  int64_t last = 0;
  for (size_t p = 0; p < starts.size(); ++p) {
    add(last, starts[p], -1);
    add(starts[p], ends[p], int64_t(p));
    last = ends[p];
  }
  add(last, count, -1);
  return pieces;
}

// Runs work on all pieces, with several threads if there are many values; copies values outside all parts.
template <typename Work>
void for_pieces(const std::vector<IdPiece>& pieces, const int64_t* from, int64_t* to, const Work& work) {
  const auto each = [&](int64_t k) {
    const IdPiece& piece = pieces[size_t(k)];
    if (piece.part < 0)
      std::copy(from + piece.begin, from + piece.end, to + piece.begin);
    else
      work(piece);
  };
  if (pieces.size() > 1) return parallel_tasks(int64_t(pieces.size()), each);
  for (size_t k = 0; k < pieces.size(); ++k) each(int64_t(k));
}

}  // namespace meshrec
