// The header of a hash index, and the free slots; see [Note: the hash index] in shard.h.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>

#include "index/shard.h"

namespace meshrec::index {

struct Header {
  // num_slots: slots [0, num_slots) are in use or free. slot_capacity: slots that the memory holds.
  // max_slots: limit on growth. lowest_free: summary words before this one are 0.
  int64_t num_live, num_slots, max_slots, shard_bits, bucket_capacity, slot_capacity, lowest_free, unused;
  ShardState shards[];
};

// The free slots below `num_slots`: a bitmap, with a summary bit for every non-zero word.
class FreeSlots {
 public:
  FreeSlots(Header& header, uint64_t* words) : header_(header), words_(words) {
    summary_ = words + (header.slot_capacity + 63) / 64;
  }

  bool has(int64_t slot) const { return words_[slot / 64] >> (slot % 64) & 1; }
  void put(int64_t slot) {
    const int64_t word = slot / 64;
    words_[word] |= uint64_t(1) << (slot % 64);
    summary_[word / 64] |= uint64_t(1) << (word % 64);
    header_.lowest_free = std::min(header_.lowest_free, word / 64);
  }
  // Leaves lowest_free, which is only a lower bound.
  void take(int64_t slot) {
    const int64_t word = slot / 64;
    if ((words_[word] &= ~(uint64_t(1) << (slot % 64))) == 0)
      summary_[word / 64] &= ~(uint64_t(1) << (word % 64));
  }
  // Takes the `count` lowest free slots. At least `count` slots must be free.
  void take_lowest(int64_t count, int64_t* slots) {
    int64_t& at = header_.lowest_free;
    for (int64_t i = 0; i < count;) {
      while (summary_[at] == 0) ++at;
      const int64_t word = at * 64 + std::countr_zero(summary_[at]);
      uint64_t free = words_[word];
      for (; free != 0 && i < count; free &= free - 1) slots[i++] = word * 64 + std::countr_zero(free);
      words_[word] = free;
      if (free == 0) summary_[at] &= summary_[at] - 1;
    }
  }

 private:
  Header& header_;
  uint64_t* words_;
  uint64_t* summary_;
};

}  // namespace meshrec::index
