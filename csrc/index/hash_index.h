// Slots for 64-bit IDs; see [Note: the hash index] in shard.h. A call that cannot do its work changes
// nothing, and returns a status code.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <memory>
#include <numeric>

#include "index/free_slots.h"
#include "index/ids.h"
#include "index/mix.h"
#include "index/shard.h"
#include "index/unique.h"
#include "isa/kernels.h"

namespace meshrec::index {

// kAhead: keys between a prefetch and the use. kScanBuckets: buckets in a task of a scan.
constexpr int64_t kAhead = 32, kScanBuckets = 1 << 13;
// A tag is read as four bytes, so the last one needs a byte of padding.
constexpr int64_t kTagBytes = 3, kTagPadding = 1;

// As in ops/index/naive.py.
enum Status : int64_t {
  kNoMemory = -1,
  kDone,
  kNotAscending,
  kPresent,
  kFull,
  kNoBuckets,
  kCrowded,
  kAbsent,
  kRepeats,
  kFree
};

// The IDs of a batch in an index, some of which have no slot, inserted as `id + first` or `mix(id, mix_seed)
// + first`. As in compiled.py.
struct AssignArgs {
  void* memory[4];
  uint64_t seed;
  const int64_t* ids;
  int64_t count, mixes;
  uint64_t mix_seed, first;
  int64_t* slots;
  int64_t num_absent;
  int64_t* assigned;  // output: distinct IDs, slots, occurrences
  int64_t num_assigned;
};

// The slots to free in an index, and room for their IDs. As in compiled.py.
struct FreeArgs {
  void* memory[4];
  uint64_t seed;
  const int64_t* slots;
  int64_t count;
  int64_t* ids;
  int64_t status;  // the caller sets kNoMemory
};

class Index {
 public:
  // IDs or slots grouped by shard, in order: keys (for slots, the highest key bits), and the original
  // positions.
  struct Partition {
    std::vector<int64_t> starts;
    std::unique_ptr<uint64_t[]> keys;
    std::unique_ptr<int64_t[]> places;
  };

  Index(int64_t* header, void* buckets, uint8_t* tags, uint64_t* free, uint64_t seed)
      : header_(*reinterpret_cast<Header*>(header)), tags_(tags), free_(header_, free), seed_(seed) {
    for (int64_t s = 0; s < int64_t(1) << header_.shard_bits; ++s)
      shards_.emplace_back(&header_.shards[s], static_cast<Bucket*>(buckets) + s * header_.bucket_capacity,
                           header_.bucket_capacity, s, int(header_.shard_bits));
    if (shards_.size() > kMaxShards) fail("an index has at most ", kMaxShards, " shards");
    view_.buckets = static_cast<const uint8_t*>(buckets), view_.bucket_capacity = header_.bucket_capacity;
    view_.shard_bits = int(header_.shard_bits), view_.seed = seed;
    for (size_t s = 0; s < shards_.size(); ++s)
      view_.boundary[s] = shards_[s].boundary(), view_.before[s] = shards_[s].before(),
      view_.behind[s] = shards_[s].behind();
  }

  void find(const int64_t* ids, int64_t count, int64_t* slots) const {
    parallel_for(count, kGrainIds, [&](int64_t begin, int64_t end) {
      find_some({.ids = ids + begin, .count = end - begin, .slots = slots + begin});
    });
  }

  // Finds the slots for IDs, -1 for an ID without one. Returns how many IDs have none.
  int64_t find_some(FindArgs args) const {
    int64_t absent = 0;
    args.index = &view_;
    for (int64_t left = args.count; left > 0;
         left -= args.count, args.ids += args.count, args.slots += args.count) {
      args.count = std::min(kMaxFound, left);
      absent += kernels().find(args);
      // Only the first search prefetches rows, because the lookup prefetches the others as it reads.
      args.rows = {};
    }
    return absent;
  }

  // given: slots to assign to the IDs; null: the lowest free slots.
  Status insert(const int64_t* ids, int64_t count, const int64_t* given, int64_t* slots) {
    for (int64_t i = 1; i < count; ++i)
      if (ids[i] <= ids[i - 1]) return kNotAscending;
    // Free slots are used up before the number of slots grows.
    const int64_t num_free = header_.num_slots - header_.num_live;
    const int64_t num_slots = given != nullptr && count > 0
                                  ? *std::max_element(given, given + count) + 1
                                  : std::max(header_.num_slots, header_.num_slots + count - num_free);
    if (num_slots > header_.max_slots) return has_any(ids, count, slots) ? kPresent : kFull;
    const int extra =
        std::max<int>(0, std::bit_width(uint64_t(std::max<int64_t>(num_slots, 1) - 1)) - kMinSlotBits);
    // All shards make room before anything is written, so a failure here needs no undo.
    const Partition parts = partition_ids(ids, count);
    if (!for_shards(count, [&](size_t s) {
          return shards_[s].prepare(parts.starts[s + 1] - parts.starts[s], extra);
        }))
      return kNoBuckets;
    assign(count, given, num_slots, slots);
    write_tags(ids, count, slots);
    std::vector<int64_t> done(shards_.size(), 0);
    std::vector<Inserted> ends(shards_.size(), Inserted::kDone);
    const bool fits = for_shards(count, [&](size_t s) {
      ends[s] = insert_into(s, parts, slots, extra, done[s]);
      return ends[s] == Inserted::kDone;
    });
    // Tags of free slots are never read, and a shard that grew holds the same keys. So an undo only removes
    // the new keys and frees the slots.
    header_.num_live += count;
    if (fits) return kDone;
    for (size_t s = 0; s < shards_.size(); ++s)
      for (int64_t i = 0; i < done[s]; ++i) {
        const uint64_t key = parts.keys[parts.starts[s] + i];
        shards_[s].remove(shards_[s].home(key), key);
      }
    for (int64_t i = 0; i < count; ++i) free_.put(slots[i]);
    header_.num_live -= count;
    return std::count(ends.begin(), ends.end(), Inserted::kPresent) > 0 ? kPresent : kCrowded;
  }

  // Inserts the IDs whose slot is negative, and writes their slots. Returns false, without a change, if the
  // index needs larger memory first.
  bool assign_slots(AssignArgs& args) {
    Tensor absent = new_int64(args.num_absent);
    auto* const ids = absent.mutable_data_ptr<int64_t>();
    std::unique_ptr<int64_t[]> places(new int64_t[args.num_absent]);
    int64_t next = 0;
    for (int64_t i = 0; i < args.count && next < args.num_absent; ++i) {
      if (args.slots[i] >= 0) continue;
      const uint64_t id = uint64_t(args.ids[i]);
      ids[next] = int64_t((args.mixes ? mix(id, args.mix_seed) : id) + args.first);
      places[next++] = i;
    }
    if (next < args.num_absent) return false;
    // Distinct IDs are in ascending order, so the slots do not depend on the order of IDs in the batch.
    const auto [distinct, positions] = index_unique(absent);
    const int64_t count = args.num_assigned = distinct.numel();
    int64_t *const slots = args.assigned + args.num_absent, *const counts = slots + args.num_absent;
    std::copy_n(distinct.const_data_ptr<int64_t>(), count, args.assigned);
    // Only Python can allocate more slots, so the kernel gives up before it changes the index.
    if (header_.num_live + count > header_.slot_capacity ||
        insert(args.assigned, count, nullptr, slots) != kDone)
      return false;
    std::fill_n(counts, count, 0);
    const auto* const position = positions.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < args.num_absent; ++i) {
      args.slots[places[i]] = slots[position[i]];
      ++counts[position[i]];
    }
    return true;
  }

  Status remove(const int64_t* ids, int64_t count, int64_t* slots) {
    find(ids, count, slots);
    if (std::any_of(slots, slots + count, [](int64_t slot) { return slot < 0; })) return kAbsent;
    // Marking comes first: it finds repeated slots while nothing has changed.
    if (!mark_free(slots, count)) return kRepeats;
    const Partition parts = partition_ids(ids, count);
    for_parts(parts, [&](Shard& shard, int64_t i, int64_t home) { shard.remove(home, parts.keys[i]); });
    header_.num_live -= count;
    return kDone;
  }

  // Marks slots as free, and finds their keys. Must be followed by `end_free` or `take_back`.
  Status begin_free(const FreeArgs& args, Partition& parts) {
    if (!all_live(args.slots, args.count)) return kFree;
    parts = partition(args.count, [&](int64_t i) { return tag_of(args.slots[i]) << 40; });
    return mark_free(args.slots, args.count) ? kDone : kRepeats;
  }

  // Removes the IDs in these slots, and writes them.
  void end_free(const FreeArgs& args, const Partition& parts) {
    for_parts(parts, [&](Shard& shard, int64_t i, int64_t home) {
      const int64_t at = parts.places[i];
      const Place place = shard.place_of(home, uint64_t(args.slots[at]));
      args.ids[at] = int64_t(unmix(shard.key_at(place), seed_));
      shard.remove_at(place);
    });
    header_.num_live -= args.count;
  }

  void take_back(const int64_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) free_.take(slots[i]);
  }

  Status ids_of(const int64_t* slots, int64_t count, int64_t* ids) const {
    if (!all_live(slots, count)) return kFree;
    parallel_for(count, kGrainIds, [&](int64_t begin, int64_t end) {
      // Two prefetch distances: a tag is read to know which bucket to prefetch.
      std::pair<const Shard*, int64_t> homes[kAhead];
      const auto begin_one = [&](int64_t i) __attribute__((always_inline)) {
        const uint64_t tag = tag_of(slots[i]);
        const Shard& shard = shard_of(tag << 40);
        homes[i & (kAhead - 1)] = {&shard, shard.tag_home(tag)};
        __builtin_prefetch(&shard.bucket(shard.tag_home(tag)), 0, 3);
      };
      for (int64_t i = begin; i < std::min(end, begin + kAhead); ++i) begin_one(i);
      for (int64_t i = begin; i < end; ++i) {
        const auto [shard, home] = homes[i & (kAhead - 1)];
        ids[i] = int64_t(unmix(shard->key_at(shard->place_of(home, uint64_t(slots[i]))), seed_));
        if (i + 2 * kAhead < end) __builtin_prefetch(tags_ + kTagBytes * slots[i + 2 * kAhead], 0, 3);
        if (i + kAhead < end) begin_one(i + kAhead);
      }
    });
    return kDone;
  }

  // In key order.
  void items(int64_t* ids, int64_t* slots) const {
    std::vector<int64_t> starts(1, 0);
    for (const Shard& shard : shards_) starts.push_back(starts.back() + shard.num_keys());
    parallel_tasks(int64_t(shards_.size()), [&](int64_t s) {
      int64_t i = starts[s];
      shards_[s].for_all([&](Entry entry) {
        ids[i] = int64_t(unmix(entry.key, seed_));
        slots[i++] = int64_t(entry.slot);
      });
    });
  }

  // Writes the IDs up to `most` whose slots are marked, and these slots, in key order; both outputs have room
  // for all IDs. Returns the count.
  int64_t marked(const bool* marks, int64_t most, int64_t* ids, int64_t* slots) const {
    std::vector<ScanArgs> scans;
    for (const Shard& shard : shards_)
      for (int64_t b = 0; b < shard.end(); b += kScanBuckets)
        scans.push_back(shard.scan_args(b, std::min(b + kScanBuckets, shard.end())));
    // The number of keys before a bucket is unknown, so each scan writes to separate memory.
    std::vector<std::vector<int64_t>> found(scans.size());
    parallel_tasks(int64_t(scans.size()), [&](int64_t k) {
      constexpr int64_t kRoom = kScanBuckets * kEntries;
      const std::unique_ptr<int64_t[]> own(new int64_t[2 * kRoom]);
      ScanArgs& args = scans[size_t(k)];
      args.seed = seed_, args.marks = marks, args.most = most, args.ids = own.get(),
      args.slots = own.get() + kRoom;
      const int64_t count = kernels().scan(args);
      auto& to = found[size_t(k)];
      to.assign(args.ids, args.ids + count);
      to.insert(to.end(), args.slots, args.slots + count);
    });
    int64_t total = 0;
    for (const auto& each : found) {
      const auto count = int64_t(each.size() / 2);
      std::copy_n(each.begin(), count, ids + total);
      std::copy_n(each.begin() + count, count, slots + total);
      total += count;
    }
    return total;
  }

  int64_t num_bytes() const {
    int64_t total = (header_.num_slots * kTagBytes) + header_.num_slots / 8 + header_.num_slots / 512;
    for (const Shard& shard : shards_) total += shard.num_bytes() + int64_t(sizeof(ShardState));
    return total;
  }

 private:
  bool all_live(const int64_t* slots, int64_t count) const {
    return std::all_of(slots, slots + count, [&](int64_t slot) {
      return slot >= 0 && slot < header_.num_slots && !free_.has(slot);
    });
  }

  // Marks slots in use as free. Returns false, without a change, if a slot repeats.
  bool mark_free(const int64_t* slots, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
      if (free_.has(slots[i])) return take_back(slots, i), false;
      free_.put(slots[i]);
    }
    return true;
  }

  // Returns whether any of the IDs is present; writes their slots.
  bool has_any(const int64_t* ids, int64_t count, int64_t* slots) const {
    find(ids, count, slots);
    return std::any_of(slots, slots + count, [](int64_t slot) { return slot >= 0; });
  }

  const Shard& shard_of(uint64_t key) const {
    return shards_[header_.shard_bits == 0 ? 0 : key >> (64 - header_.shard_bits)];
  }

  Partition partition_ids(const int64_t* ids, int64_t count) const {
    return partition(count, [&](int64_t i) { return mix(uint64_t(ids[i]), seed_); });
  }

  template <typename KeyOf>
  Partition partition(int64_t count, const KeyOf& key_of) const {
    Partition parts{std::vector<int64_t>(shards_.size() + 1, 0),
                    std::unique_ptr<uint64_t[]>(new uint64_t[count]),
                    std::unique_ptr<int64_t[]>(new int64_t[count])};
    const std::unique_ptr<uint64_t[]> keys(new uint64_t[count]);
    parallel_for(count, kGrainIds, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) keys[i] = key_of(i);
    });
    const int shift = 64 - int(header_.shard_bits);
    // A shift by 64 would be undefined.
    const auto shard_number = [&](uint64_t key) { return shift == 64 ? 0 : key >> shift; };
    std::vector<int64_t> next(shards_.size() + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++next[shard_number(keys[i]) + 1];
    for (size_t s = 0; s < shards_.size(); ++s) next[s + 1] += next[s];
    parts.starts = next;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t place = next[shard_number(keys[i])]++;
      parts.keys[place] = keys[i], parts.places[place] = i;
    }
    return parts;
  }

  // Runs work for every shard, with several threads if there are many IDs. Returns whether all calls returned
  // true.
  template <typename Work>
  bool for_shards(int64_t num_ids, const Work& work) {
    std::atomic<bool> all{true};
    const auto each = [&](int64_t s) {
      if (!work(size_t(s))) all = false;
    };
    if (num_ids >= kGrainIds) {
      parallel_tasks(int64_t(shards_.size()), each);
    } else {
      for (size_t s = 0; s < shards_.size(); ++s) each(int64_t(s));
    }
    return all;
  }

  // Runs work(i, home) for the keys [begin, end) in a shard, until it returns false. Before this, prefetches
  // the buckets from the home to the first one that is not full.
  template <typename Work>
  bool for_keys(const Shard& shard, const uint64_t* keys, int64_t begin, int64_t end,
                const Work& work) const {
    constexpr int64_t kBlock = 16, kRing = 4 * kBlock;
    int64_t homes[kRing], lasts[kRing];
    const auto for_block = [&](int64_t first, const auto& each) __attribute__((always_inline)) {
      for (int64_t i = std::max(first, begin), last = std::min(first + kBlock, end); i < last; ++i)
        if (!each(i, uint64_t(i) % kRing)) return false;
      return true;
    };
    // In a full table, the home of a new key is full one time in four.
    const auto request_next = [&](int64_t, uint64_t k) __attribute__((always_inline)) {
      const int64_t b = lasts[k] += shard.bucket(lasts[k]).full();
      return __builtin_prefetch(&shard.bucket(b), 1, 3), true;
    };
    for (int64_t i = begin; i < end + 3 * kBlock; i += kBlock) {
      for_block(i, [&](int64_t j, uint64_t k) __attribute__((always_inline)) {
        homes[k] = lasts[k] = shard.home(keys[j]);
        return __builtin_prefetch(&shard.bucket(homes[k]), 1, 3), true;
      });
      for_block(i - kBlock, request_next);
      for_block(i - 2 * kBlock, request_next);
      if (!for_block(i - 3 * kBlock, [&](int64_t j, uint64_t k) { return work(j, homes[k]); })) return false;
    }
    return true;
  }

  // Runs work(shard, i, home) for a whole partition.
  template <typename Work>
  void for_parts(const Partition& parts, const Work& work) {
    for_shards(parts.starts.back(), [&](size_t s) {
      return for_keys(shards_[s], parts.keys.get(), parts.starts[s], parts.starts[s + 1],
                      [&](int64_t i, int64_t home) { return work(shards_[s], i, home), true; });
    });
  }

  void assign(int64_t count, const int64_t* given, int64_t num_slots, int64_t* slots) {
    if (given != nullptr) {
      for (int64_t slot = header_.num_slots; slot < num_slots; ++slot) free_.put(slot);
      for (int64_t i = 0; i < count; ++i) free_.take(slots[i] = given[i]);
    } else {
      const int64_t reused = std::min(count, header_.num_slots - header_.num_live);
      free_.take_lowest(reused, slots);
      std::iota(slots + reused, slots + count, header_.num_slots);
    }
    header_.num_slots = std::max(header_.num_slots, num_slots);
  }

  Inserted insert_into(size_t s, const Partition& parts, const int64_t* slots, int extra, int64_t& done) {
    Shard& shard = shards_[s];
    const int64_t begin = parts.starts[s];
    Inserted last = Inserted::kDone;
    const auto insert_one = [&](int64_t i, int64_t home) {
      last = shard.insert(home, {parts.keys[i], uint64_t(slots[parts.places[i]])}, extra);
      return last == Inserted::kDone && ++done > 0;
    };
    int64_t more = std::max<int64_t>(shard.num_keys(), 64);
    for (int turn = 0; !for_keys(shard, parts.keys.get(), begin + done, parts.starts[s + 1], insert_one);
         ++turn) {
      // prepare() may change homes.
      // Too many keys have homes nearby, so a larger shard spreads them. After four turns, the caller reports
      // kCrowded.
      if (last == Inserted::kPresent || turn == 4 || !shard.prepare(more, extra)) break;
      more *= 2;
    }
    return last;
  }

  // In ID order, in which slots are nearly always ascending.
  void write_tags(const int64_t* ids, int64_t count, const int64_t* slots) {
    parallel_for(count, kGrainIds, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kAhead < end) __builtin_prefetch(tags_ + kTagBytes * slots[i + kAhead], 1, 3);
        const uint64_t tag = mix(uint64_t(ids[i]), seed_) >> 40;
        for (int64_t byte = 0; byte < kTagBytes; ++byte)
          tags_[kTagBytes * slots[i] + byte] = uint8_t(tag >> (8 * byte));
      }
    });
  }

  uint64_t tag_of(int64_t slot) const {
    uint32_t tag;
    std::memcpy(&tag, tags_ + kTagBytes * slot, sizeof(tag));
    static_assert(kTagPadding == sizeof(tag) - kTagBytes);
    return tag & 0xffffff;
  }

  Header& header_;
  uint8_t* tags_;
  FreeSlots free_;
  uint64_t seed_;
  std::vector<Shard> shards_;
  IndexView view_;
};

// Wraps four tensors as an index: header int64, buckets uint8, tags uint8, free int64.
inline Index index_in(const Tensor* memory, int64_t seed) {
  // Only searches wrap tensors, and these do not write.
  const auto data = [&](size_t k) { return const_cast<void*>(memory[k].const_data_ptr()); };
  return Index(static_cast<int64_t*>(data(0)), data(1), static_cast<uint8_t*>(data(2)),
               static_cast<uint64_t*>(data(3)), uint64_t(seed));
}

}  // namespace meshrec::index
