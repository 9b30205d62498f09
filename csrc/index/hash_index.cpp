// The hash index: operators that read it, and plain C functions that modify it. src/meshrec/ops/index/
// documents arguments and results; naive.py there is the reference.
#include "index/hash_index.h"

#include <utility>

namespace meshrec {

namespace {

constexpr int64_t kFewIds = 1 << 9;  // with fewer changes, more threads cost more than they save

using index::AssignArgs;
using index::FreeArgs;
using index::Index;
using index::index_in;
using index::kDone;
using index::kNoMemory;
using index::Status;

Tensor index_find(std::vector<Tensor> memory, Tensor ids, int64_t seed) {
  check_ids(ids);
  if (memory.size() != 4) fail("an index has 4 tensors, got ", memory.size());
  const Tensor given = as_contiguous(ids);
  Tensor slots = new_int64(given.numel());
  index_in(memory.data(), seed)
      .find(static_cast<const int64_t*>(given.const_data_ptr()), given.numel(),
            static_cast<int64_t*>(slots.mutable_data_ptr()));
  return slots;
}

std::tuple<Tensor, Tensor> index_find_parts(std::vector<Tensor> memory, std::vector<int64_t> seeds,
                                            Tensor ids, std::vector<int64_t> starts,
                                            std::vector<int64_t> ends, std::vector<int64_t> indexes,
                                            std::vector<int64_t> firsts, std::vector<int64_t> mixes) {
  check_ids(ids);
  const size_t parts = starts.size();
  if (memory.size() != 4 * seeds.size() || indexes.size() != parts || firsts.size() != parts ||
      (!mixes.empty() && mixes.size() != parts))
    fail("an index has 4 tensors and a seed, and a part an index, a first ID and a seed of its mix");
  std::vector<Index> found;
  for (size_t k = 0; k < seeds.size(); ++k) found.push_back(index_in(&memory[4 * k], seeds[k]));
  for (const int64_t index : indexes)
    if (index < 0 || index >= int64_t(found.size())) fail("there is no index ", index);
  const Tensor given = as_contiguous(ids);
  Tensor slots = new_int64(given.numel()), absent = new_int64(int64_t(parts));
  const auto* from = static_cast<const int64_t*>(given.const_data_ptr());
  auto* to = static_cast<int64_t*>(slots.mutable_data_ptr());
  // Atomic, because pieces of the same part may run on several threads.
  std::vector<std::atomic<int64_t>> missing(parts);
  for_pieces(pieces_of(given.numel(), starts, ends), from, to, [&](const IdPiece& piece) {
    const size_t p = size_t(piece.part);
    missing[p] += found[size_t(indexes[p])].find_some({.ids = from + piece.begin,
                                                       .count = piece.end - piece.begin,
                                                       .mixes = !mixes.empty(),
                                                       .mix_seed = mixes.empty() ? 0 : uint64_t(mixes[p]),
                                                       .first = uint64_t(firsts[p]),
                                                       .slots = to + piece.begin});
  });
  std::copy(missing.begin(), missing.end(), static_cast<int64_t*>(absent.mutable_data_ptr()));
  return {slots, absent};
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("index_find", TORCH_BOX(&index_find));
  m.impl("index_find_parts", TORCH_BOX(&index_find_parts));
}

Index index_at(void* const* memory, uint64_t seed) {
  return Index(static_cast<int64_t*>(memory[0]), memory[1], static_cast<uint8_t*>(memory[2]),
               static_cast<uint64_t*>(memory[3]), seed);
}

// Runs work on the index whose memory addresses C code passed.
// No exception may leave a C function, which Python calls through ctypes.
template <typename Work>
int64_t with_index(void* const* memory, uint64_t seed, const Work& work) try {
  Index index = index_at(memory, seed);
  return work(index);
} catch (...) {
  return kNoMemory;
}

// Runs work(k) for several indexes, with a thread for each if there are many IDs. Otherwise, an index may use
// all threads.
template <typename Work>
void for_indexes(int64_t count, int64_t num_ids, const Work& work) {
  if (count >= torch::stable::get_num_threads() && num_ids >= kFewIds) return parallel_tasks(count, work);
  for (int64_t k = 0; k < count; ++k) work(k);
}

}  // namespace

#define MESHREC_C extern "C" __attribute__((visibility("default"))) int64_t

MESHREC_C meshrec_index_insert(void* const* memory, uint64_t seed, const int64_t* ids, int64_t count,
                               const int64_t* given, int64_t* slots) {
  return with_index(memory, seed,
                    [&](Index& index) -> int64_t { return index.insert(ids, count, given, slots); });
}

MESHREC_C meshrec_index_give(AssignArgs* all, int64_t count) {
  int64_t num_absent = 0;
  for (int64_t k = 0; k < count; ++k) num_absent += all[k].num_absent;
  for_indexes(count, num_absent, [&](int64_t k) {
    const auto own = [&](Index& index) -> int64_t { return index.assign_slots(all[k]); };
    // Reported per index, because the calls for other indexes may have succeeded.
    if (with_index(all[k].memory, all[k].seed, own) != 1) all[k].num_assigned = -1;
  });
  return 0;
}

MESHREC_C meshrec_index_remove(void* const* memory, uint64_t seed, const int64_t* ids, int64_t count,
                               int64_t* slots) {
  return with_index(memory, seed, [&](Index& index) { return index.remove(ids, count, slots); });
}

MESHREC_C meshrec_index_free(FreeArgs* all, int64_t count) try {
  std::vector<Index> indexes;
  std::vector<Index::Partition> parts(static_cast<size_t>(count));
  int64_t num_slots = 0;
  for (int64_t k = 0; k < count; num_slots += all[k++].count)
    indexes.push_back(index_at(all[k].memory, all[k].seed));
  const auto for_all = [&](const auto& work) {
    for_indexes(count, num_slots, [&](int64_t k) { work(indexes[size_t(k)], all[k], parts[size_t(k)]); });
  };
  // Two phases: no index frees a slot unless all of them can.
  for_all([](Index& index, FreeArgs& own, Index::Partition& keys) {
    try {
      own.status = index.begin_free(own, keys);
    } catch (...) {
      own.status = kNoMemory;
    }
  });
  const bool done = std::all_of(all, all + count, [](const FreeArgs& own) { return own.status == kDone; });
  for_all([&](Index& index, const FreeArgs& own, const Index::Partition& keys) {
    if (done)
      index.end_free(own, keys);
    else if (own.status == kDone)
      index.take_back(own.slots, own.count);
  });
  return kDone;
} catch (...) {
  return kNoMemory;
}

MESHREC_C meshrec_index_ids_of(void* const* memory, uint64_t seed, const int64_t* slots, int64_t count,
                               int64_t* ids) {
  return with_index(memory, seed, [&](Index& index) { return index.ids_of(slots, count, ids); });
}

MESHREC_C meshrec_index_items(void* const* memory, uint64_t seed, int64_t* ids, int64_t* slots) {
  return with_index(memory, seed, [&](Index& index) { return index.items(ids, slots), int64_t(kDone); });
}

MESHREC_C meshrec_index_marked(void* const* memory, uint64_t seed, const bool* marks, int64_t most,
                               int64_t* ids, int64_t* slots) {
  return with_index(memory, seed, [&](Index& index) { return index.marked(marks, most, ids, slots); });
}

MESHREC_C meshrec_index_num_bytes(void* const* memory) {
  return with_index(memory, 0, [&](Index& index) { return index.num_bytes(); });
}

}  // namespace meshrec
