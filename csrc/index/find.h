// The arguments of the searches of a hash index (find.inl). See isa/kernels.h for the rules, and [Note: the
// hash index] in shard.h for the buckets.
#pragma once

#include <cstdint>

namespace meshrec {

constexpr int kMostShards = 16;

// What a search reads of an index.
struct IndexView {
  const uint8_t* buckets;
  int64_t room;  // the buckets of a shard
  int shard_bits;
  uint64_t seed;
  // By shard: the smallest fraction that has its home among `behind` buckets and not among `before`.
  alignas(64) uint64_t boundary[kMostShards], before[kMostShards], behind[kMostShards];
};

// Finds the slots of IDs: of `id + first`, or of `mix(id, mix_seed) + first`.
struct FindArgs {
  const IndexView* index = nullptr;
  const int64_t* ids = nullptr;
  int64_t count = 0;
  bool mixes = false;
  uint64_t mix_seed = 0, first = 0;
  int64_t* slots = nullptr;      // -1 where an ID has none, or is displaced
  int64_t* displaced = nullptr;  // which IDs are not in their home, which is full; room for `count` + 1
};

}  // namespace meshrec
