// The buckets of a hash index.
//
// [Note: the hash index]
//
// IDs are mixed to keys. A bucket is a cache line, and buckets hold the keys in ascending order: in a shard
// with B buckets, a key with the fraction f has bucket floor(f * B / 2^64) as its home. A full bucket passes
// the largest key on to the next bucket. So every key is at its home or shortly after, a search ends at the
// first larger key, and a removal moves keys back instead of leaving a tombstone.
//
// A shard grows from B to B2 buckets in place, starting at the end: keys whose home among B buckets is p or
// later already have their home among B2. p moves down with every insertion, by as many buckets as the load
// requires. No call waits for the whole table.
//
// An entry has 72 bits: a word, which a vector instruction compares with the words of the other entries, and
// a byte after all words. Slots in a bucket have S bits (8 to 33, as many as the largest needs): the upper 8
// bits are the byte, and the lower S - 8 bits are the first bits of the word. The remaining bits hold the low
// 72 - S bits of the key. The bucket implies the upper key bits, because all keys in a bucket have their
// homes within kReach buckets, which span less than 2^(72 - S) keys: a table has about as many buckets as
// slots.
//
// In addition, each slot has the highest 24 bits of the key (`tags`), from which the bucket is found, and a
// bit that says whether the slot is free. Together that is at most 16 bytes per ID.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "index/find.h"
#include "index/scan.h"

namespace meshrec::index {

constexpr int kEntries = 7, kBucketBytes = 64, kMinSlotBits = 8;
// A new key may be in one of this many buckets, from its home on. Growth may round it further away, up to
// kReach.
constexpr int64_t kFarthest = 12;
constexpr int64_t kMinBuckets = 8;  // buckets in a new shard
constexpr int64_t kStretch = 16;    // minimum number of buckets that a growing shard moves

inline uint64_t load64(const uint8_t* p) {
  uint64_t word;
  std::memcpy(&word, p, sizeof(word));
  return word;
}

struct Entry {
  uint64_t key, slot;
};

// Position of an entry.
struct Place {
  int64_t bucket;
  int entry;
};

enum class Inserted { kDone, kCrowded, kPresent };

struct Bucket {
  uint8_t bytes[kBucketBytes];

  int count() const { return bytes[63] & 7; }
  int extra() const { return bytes[63] >> 3; }  // slot bits above the minimum
  bool full() const { return count() == kEntries; }
  uint64_t low(int entry) const { return load64(bytes + 8 * entry); }
  uint64_t slot(int entry) const {
    return uint64_t(bytes[8 * kEntries + entry]) << extra() | low(entry) >> 1 >> (63 - extra());
  }

  // Returns an entry from a bucket whose smallest possible key is `least`.
  Entry get(int entry, uint64_t least) const {
    return {least + ((low(entry) - least) << extra() >> extra()), slot(entry)};
  }

  // Returns the entry whose low bits equal those of the key, or -1.
  int find(uint64_t key) const {
    const uint64_t mask = ~uint64_t(0) >> extra();
    return first_of([&](int entry) { return ((low(entry) ^ key) & mask) == 0; });
  }
  // Returns the entry for a slot, or -1.
  int find_slot(uint64_t slot) const {
    const int shift = extra();
    const uint64_t mask = ~(~uint64_t(0) >> shift), low_bits = slot << 1 << (63 - shift),
                   high = slot >> shift;
    return first_of([&](int entry) {
      return (((low(entry) ^ low_bits) & mask) | (bytes[8 * kEntries + entry] ^ high)) == 0;
    });
  }
  // Returns how many entries have a key that is not larger than this one.
  int place_of(uint64_t key, uint64_t least) const {
    const int shift = extra();
    const uint64_t own = (key - least) << shift;
    const int found = first_of([&](int entry) { return (low(entry) - least) << shift > own; });
    return found < 0 ? count() : found;
  }

  void set_header(int count, int extra) { bytes[63] = uint8_t(extra << 3 | count); }
  void set(int entry, Entry value) {
    const int shift = extra();
    const uint64_t low = value.key << shift >> shift | value.slot << 1 << (63 - shift);
    std::memcpy(bytes + 8 * entry, &low, sizeof(low));
    bytes[8 * kEntries + entry] = uint8_t(value.slot >> shift);
  }
  // Moves the entries from `entry` on, and sets this one. A full bucket loses the last entry.
  void insert(int entry, Entry value) {
    const uint64_t* const moves = kBehind + kEntries - 1 - entry;
#pragma GCC unroll 6
    for (int to = kEntries - 1; to > 0; --to) blend(to, to - 1, moves[to]);
    const uint64_t ends = load64(bytes + 8 * kEntries), stays = ~(~uint64_t(0) << (8 * entry));
    put_ends((ends & stays) | (ends & ~stays) << 8, std::min(count() + 1, kEntries));
    set(entry, value);
  }
  void remove(int entry) {
    const uint64_t* const moves = kBehind + kEntries - entry;
#pragma GCC unroll 6
    for (int to = 0; to < kEntries - 1; ++to) blend(to, to + 1, moves[to]);
    const uint64_t ends = load64(bytes + 8 * kEntries), stays = ~(~uint64_t(0) << (8 * entry));
    put_ends((ends & stays) | (ends >> 8 & ~stays), count() - 1);
  }

 private:
  static constexpr uint64_t kAll = ~uint64_t(0);
  static constexpr uint64_t kBehind[2 * kEntries] = {0,    0,    0,    0,    0,    0,    0,
                                                     kAll, kAll, kAll, kAll, kAll, kAll, kAll};

  // Returns the first entry for which a condition holds, or -1. Without branches, because these would be
  // unpredictable.
  template <typename Condition>
  int first_of(const Condition& condition) const {
    unsigned found = 0;
#pragma GCC unroll 7
    for (int entry = kEntries - 1; entry >= 0; --entry) found = 2 * found + unsigned(condition(entry));
    found &= (1u << count()) - 1;
    return found == 0 ? -1 : __builtin_ctz(found);
  }
  void blend(int to, int from, uint64_t mask) {
    const uint64_t low_bits = low(to) ^ ((low(to) ^ low(from)) & mask);
    std::memcpy(bytes + 8 * to, &low_bits, sizeof(low_bits));
  }
  // Writes the bytes after the words, with another count.
  void put_ends(uint64_t ends, int count) {
    const uint64_t header = uint64_t(extra() << 3 | count);
    ends = (ends & kAll >> 8) | header << 56;
    std::memcpy(bytes + 8 * kEntries, &ends, sizeof(ends));
  }
};
static_assert(sizeof(Bucket) == kBucketBytes);

// The state of a shard, in the index header.
struct ShardState {
  int64_t num_keys, before, after, moved;  // before, after: B and B2 in the note; moved: p
};

inline uint64_t scaled(uint64_t fraction, int64_t size) {
  return uint64_t((static_cast<unsigned __int128>(fraction) * uint64_t(size)) >> 64);
}
inline uint64_t step_of(int64_t num_buckets) {
  return uint64_t((static_cast<unsigned __int128>(1) << 64) / uint64_t(num_buckets));
}

class Shard {
 public:
  Shard(ShardState* state, Bucket* buckets, int64_t room, int64_t number, int shard_bits)
      : state_(state), buckets_(buckets), room_(room), shard_bits_(shard_bits) {
    first_key_ = shard_bits == 0 ? 0 : uint64_t(number) << (64 - shard_bits);
    remember();
  }

  int64_t home(uint64_t key) const {
    const uint64_t fraction = key << shard_bits_;
    // Not a branch, which would be unpredictable while the shard grows.
    const int64_t is_behind = -int64_t(fraction >= boundary_);
    return int64_t(scaled(fraction, before_ + ((behind_ - before_) & is_behind)));
  }
  const Bucket& bucket(int64_t b) const { return buckets_[b]; }
  // Returns the first bucket that may be the home of a key with this 24-bit tag.
  int64_t tag_home(uint64_t tag) const { return home(std::max(tag << 40, first_key_)); }

  // The values for IndexView.
  uint64_t boundary() const { return boundary_; }
  uint64_t before() const { return uint64_t(before_); }
  uint64_t behind() const { return uint64_t(behind_); }

  // Returns the size of all buckets that have been in use, in bytes.
  int64_t num_bytes() const { return num_buckets() * kBucketBytes; }

  // Makes room for `more` keys, whose slots have `slot_extra` bits above kMinSlotBits. Returns false,
  // without a change, if there is not enough memory for the buckets.
  bool prepare(int64_t more, int slot_extra);
  // Inserts a key with home b, after prepare() has made room. Nothing changes if it is already present, or if
  // too many keys have homes nearby.
  Inserted insert(int64_t b, Entry entry, int slot_extra);
  // Removes a key that is present and has home b.
  void remove(int64_t b, uint64_t key);
  void remove_at(Place place);
  int64_t num_keys() const { return state_->num_keys; }

  // Finds the entry for a slot, from bucket b on.
  Place place_of(int64_t b, uint64_t slot) const;
  uint64_t key_at(Place place) const { return get(place.bucket, place.entry).key; }

  // Returns the arguments for a scan over buckets [begin, end).
  ScanArgs scan_args(int64_t begin, int64_t end) const {
    return {.buckets = buckets_->bytes,
            .begin = begin,
            .end = end,
            .moved = moved_,
            .before_step = before_step_,
            .after_step = after_step_,
            .first_key = first_key_,
            .shard_bits = shard_bits_};
  }

  // No key is in this bucket or later.
  int64_t end() const { return after_ + kReach; }

  template <typename Visit>
  void for_all(const Visit& visit) const {
    for (int64_t b = 0; b < end(); ++b) {
      const uint64_t least = base(b);
      for (int entry = 0, count = buckets_[b].count(); entry < count; ++entry)
        visit(buckets_[b].get(entry, least));
    }
  }

 private:
  void remember() {
    before_ = state_->before, after_ = state_->after, moved_ = state_->moved;
    before_step_ = step_of(before_), after_step_ = step_of(after_);
    // The smallest fraction whose home among B buckets is p or later. If p is B, no fraction is.
    const unsigned __int128 whole = static_cast<unsigned __int128>(moved_) << 64;
    boundary_ = uint64_t((whole + uint64_t(before_) - 1) / uint64_t(before_));
    behind_ = moved_ == before_ ? before_ : after_;
  }
  // Returns the number of buckets that may be homes: p, and those after p that result from the others.
  int64_t num_buckets() const {
    return moved_ + after_ - int64_t((static_cast<unsigned __int128>(moved_) * after_) / before_);
  }
  // Returns the smallest key that bucket b may hold.
  uint64_t base(int64_t b) const {
    const int64_t first = std::max<int64_t>(0, b - kReach + 1);
    const uint64_t fraction = uint64_t(first) * (first < moved_ ? before_step_ : after_step_);
    return first_key_ | fraction >> shard_bits_;
  }
  Entry get(int64_t b, int entry) const { return buckets_[b].get(entry, base(b)); }
  void grow(int64_t wanted, int slot_extra);
  void move_down(int64_t target, int slot_extra);
  void take_all(int64_t b, std::vector<Entry>& entries);
  void lay(std::vector<Entry>& entries, int64_t first, int slot_extra);
  void widen(int64_t b, int slot_extra);

  ShardState* state_;
  Bucket* buckets_;
  int64_t room_, before_, after_, moved_, behind_;
  uint64_t boundary_, first_key_, before_step_, after_step_;
  int shard_bits_;
};

// Returns the number of buckets for `num_keys` keys at a load of 0.72.
inline int64_t buckets_for(int64_t num_keys) { return std::max(kMinBuckets, (num_keys * 25 + 125) / 126); }

}  // namespace meshrec::index
