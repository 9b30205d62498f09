// Arguments for the kernel that reads all entries in a hash index (scan.inl). See isa/kernels.h for the
// rules, and [Note: the hash index] in shard.h for the buckets.
#pragma once

#include <cstdint>

namespace meshrec {

// Lists the IDs up to `most` in buckets [begin, end) of a shard whose slots are marked, and these slots; both
// outputs have room for all entries.
struct ScanArgs {
  const uint8_t* buckets = nullptr;
  int64_t begin = 0, end = 0;
  // Gives the smallest key for a bucket, see Shard::base.
  int64_t moved = 0;
  uint64_t before_step = 0, after_step = 0, first_key = 0;
  int shard_bits = 0;
  uint64_t seed = 0;
  const bool* marks = nullptr;
  int64_t most = 0;
  int64_t* ids = nullptr;
  int64_t* slots = nullptr;
};

}  // namespace meshrec
