// Arguments for searches in a hash index (find.inl). See isa/kernels.h for the rules, and [Note: the hash
// index] in shard.h for the buckets.
#pragma once

#include <cstdint>

namespace meshrec {

// 2^_MAX_SHARD_BITS in ops/index/compiled.py.
constexpr int kMaxShards = 16;
constexpr int64_t kReach = 16;          // a key is in one of this many buckets, from its home on
constexpr int64_t kMaxFound = 1 << 11;  // maximum IDs per search

// The parts of an index that a search reads.
struct IndexView {
  const uint8_t* buckets;
  int64_t bucket_capacity;  // buckets per shard
  int shard_bits;
  uint64_t seed;
  // Per shard: the smallest fraction whose home is computed with `behind` buckets instead of `before`.
  alignas(64) uint64_t boundary[kMaxShards], before[kMaxShards], behind[kMaxShards];
};

// Rows to read after a search, which prefetches those for the first IDs; null: no prefetch.
struct RowsAhead {
  const char* data = nullptr;
  int64_t row_bytes = 0;
};

// Finds the slots for IDs, searched as `id + first`, or as `mix(id, mix_seed) + first`.
struct FindArgs {
  const IndexView* index = nullptr;
  const int64_t* ids = nullptr;
  int64_t count = 0;  // at most kMaxFound
  bool mixes = false;
  uint64_t mix_seed = 0, first = 0;
  int64_t* slots = nullptr;  // -1 for an ID without a slot
  RowsAhead rows = {};
};

// Finds the rows for IDs, searched as `mix(id, seed)` among the keys of a table. See [Note: keys in buckets]
// in index/keyed.cpp.
struct FindRowsArgs {
  const int64_t* buckets = nullptr;
  int64_t num_buckets = 0, num_home_buckets = 0;  // num_home_buckets: below 2^32
  int64_t num_rows = 0;
  uint64_t seed = 0;
  const void* ids = nullptr;
  bool wide_ids = false;     // int64; otherwise int32
  int64_t count = 0;         // at most kMaxFound
  int64_t* slots = nullptr;  // -1 for an ID without a row
  RowsAhead rows = {};
};

}  // namespace meshrec
