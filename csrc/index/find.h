// The arguments of the searches of a hash index (find.inl). See isa/kernels.h for the rules, and [Note: the
// hash index] in shard.h for the buckets.
#pragma once

#include <cstdint>

namespace meshrec {

constexpr int kMostShards = 16;
constexpr int64_t kReach = 16;           // buckets, from its home on, in which a key may lie
constexpr int64_t kMostFound = 1 << 11;  // IDs of a search

// The parts of an index that a search reads.
struct IndexView {
  const uint8_t* buckets;
  int64_t room;  // the buckets of a shard
  int shard_bits;
  uint64_t seed;
  // By shard: the smallest fraction that has its home among `behind` buckets and not among `before`.
  alignas(64) uint64_t boundary[kMostShards], before[kMostShards], behind[kMostShards];
};

// The rows of a table that are read after a search, which requests those of the first IDs; null: it does not.
struct RowsAhead {
  const char* data = nullptr;
  int64_t row_bytes = 0;
};

// Finds the slots of IDs: of `id + first`, or of `mix(id, mix_seed) + first`.
struct FindArgs {
  const IndexView* index = nullptr;
  const int64_t* ids = nullptr;
  int64_t count = 0;  // at most kMostFound
  bool mixes = false;
  uint64_t mix_seed = 0, first = 0;
  int64_t* slots = nullptr;  // -1 where an ID has none
  RowsAhead rows = {};
};

// Finds the rows of IDs among the keys of a table: of `mix(id, seed)`. See [Note: keys in buckets] in
// index/keyed.cpp.
struct FindRowsArgs {
  const int64_t* buckets = nullptr;
  int64_t num_buckets = 0, num_homes = 0;  // num_homes: below 2^32
  int64_t num_rows = 0;
  uint64_t seed = 0;
  const void* ids = nullptr;
  bool wide_ids = false;     // int64; otherwise int32
  int64_t count = 0;         // at most kMostFound
  int64_t* slots = nullptr;  // -1 where an ID has no row
  RowsAhead rows = {};
};

}  // namespace meshrec
