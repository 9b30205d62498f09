// The ID hash as operators; see src/meshrec/ops/index/.
#include "index/mix.h"

#include "index/ids.h"

namespace meshrec {

namespace {

Tensor index_mix(Tensor ids, int64_t seed, bool inverse) {
  check_ids(ids);
  const Tensor given = as_contiguous(ids);
  Tensor mixed = new_int64(given.numel());
  const auto* from = static_cast<const uint64_t*>(given.const_data_ptr());
  auto* to = static_cast<uint64_t*>(mixed.mutable_data_ptr());
  parallel_for(given.numel(), 1 << 15, [&](int64_t begin, int64_t end) {
    if (inverse)
      for (int64_t i = begin; i < end; ++i) to[i] = unmix(from[i], uint64_t(seed));
    else
      for (int64_t i = begin; i < end; ++i) to[i] = mix(from[i], uint64_t(seed));
  });
  return mixed;
}

Tensor index_mix_parts(Tensor ids, std::vector<int64_t> starts, std::vector<int64_t> ends,
                       std::vector<int64_t> seeds) {
  check_ids(ids);
  if (seeds.size() != starts.size()) fail(starts.size(), " parts have ", seeds.size(), " seeds");
  const Tensor given = as_contiguous(ids);
  Tensor mixed = new_int64(given.numel());
  const auto* from = static_cast<const int64_t*>(given.const_data_ptr());
  auto* to = static_cast<int64_t*>(mixed.mutable_data_ptr());
  for_pieces(pieces_of(given.numel(), starts, ends), from, to, [&](const IdPiece& piece) {
    const uint64_t seed = uint64_t(seeds[size_t(piece.part)]);
    for (int64_t i = piece.begin; i < piece.end; ++i) to[i] = int64_t(mix(uint64_t(from[i]), seed));
  });
  return mixed;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("index_mix", TORCH_BOX(&index_mix));
  m.impl("index_mix_parts", TORCH_BOX(&index_mix_parts));
}

}  // namespace
}  // namespace meshrec
