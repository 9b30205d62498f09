// How the buckets in a hash index change; see [Note: the hash index] in shard.h.
#include "index/shard.h"

#include <bit>
#include <cassert>

namespace meshrec::index {

bool Shard::prepare(int64_t more, int slot_extra) {
  // Enough buckets for the low key bits to distinguish the keys in kReach buckets, and a quarter more.
  const int64_t told_apart =
      slot_extra == 0 ? 0 : (kReach + kReach / 4) << std::max(0, slot_extra - shard_bits_);
  const int64_t wanted = std::max(buckets_for(state_->num_keys + more), told_apart);
  if (num_buckets() >= wanted) return true;
  // The growth in progress ends at `after_` buckets, and another may start then.
  const int64_t most = after_ >= wanted ? after_ : std::max(after_ + after_ / 8, wanted);
  if (most + kReach > room_) return false;
  grow(wanted, slot_extra);
  return true;
}

void Shard::grow(int64_t wanted, int slot_extra) {
  // Invariant: homes of fractions from `boundary_` on are among `after_` buckets, all others among `before_`
  // buckets. move_down() lowers p, and with it the boundary.
  while (num_buckets() < wanted) {
    if (moved_ == 0 || before_ == after_) {
      // At p = 0, every home is among the new buckets: this growth is complete, and the next may start.
      if (moved_ == 0) state_->before = after_;
      state_->after = std::max(after_ + after_ / 8, wanted);
      state_->moved = state_->before;
      remember();
    }
    // During growth, there may be too few buckets for the wider slots, which no key here has yet.
    const uint64_t apart = (uint64_t(before_) << shard_bits_) / uint64_t(kReach + 1);
    const int extra = std::min(slot_extra, std::max<int>(0, std::bit_width(apart) - 1));
    const int64_t missing = wanted - num_buckets(), gained = after_ - before_;
    const int64_t stretch =
        std::max(kStretch, int64_t(double(missing) * double(before_) / double(gained)) + 1);
    move_down(std::max<int64_t>(0, moved_ - stretch), extra);
  }
}

// Moves the keys in old buckets [target, p) to their homes among the new buckets.
void Shard::move_down(int64_t target, int slot_extra) {
  std::vector<Entry> entries;
  for (int64_t b = target; b < after_ + kReach; ++b) {
    const bool passes_on = buckets_[b].full();
    take_all(b, entries);
    // Keys with old homes below p reach beyond bucket p - 1 only through full buckets.
    if (b + 1 >= moved_ && !passes_on) break;
  }
  state_->moved = target;
  remember();
  lay(entries, target, slot_extra);
}

void Shard::take_all(int64_t b, std::vector<Entry>& entries) {
  for (int entry = 0, count = buckets_[b].count(); entry < count; ++entry) entries.push_back(get(b, entry));
  buckets_[b].set_header(0, 0);
}

// Stores ascending keys from bucket `first` on, each at the home or later. Keys already there are larger, and
// are stored after them.
void Shard::lay(std::vector<Entry>& entries, int64_t first, int slot_extra) {
  int64_t b = first - 1;
  int count = kEntries;
  for (size_t next = 0; next < entries.size(); ++next) {
    const int64_t at = std::max(home(entries[next].key), count == kEntries ? b + 1 : b);
    if (at > b) {
      b = at, count = 0;
      take_all(b, entries);
      buckets_[b].set_header(0, slot_extra);
    }
    buckets_[b].set(count++, entries[next]);
    buckets_[b].set_header(count, slot_extra);
  }
}

void Shard::widen(int64_t b, int slot_extra) {
  Bucket& bucket = buckets_[b];
  if (bucket.extra() >= slot_extra) return;
  Entry entries[kEntries];
  const int count = bucket.count();
  for (int entry = 0; entry < count; ++entry) entries[entry] = get(b, entry);
  bucket.set_header(count, slot_extra);
  for (int entry = 0; entry < count; ++entry) bucket.set(entry, entries[entry]);
}

Inserted Shard::insert(int64_t b, Entry carried, int slot_extra) {
  int64_t last = b;
  // Every full bucket from the key's home on will pass a key on.
  // A first pass without changes: it finds where the chain of full buckets ends, and that no key would move
  // too far.
  for (; buckets_[last].full(); ++last)
    if (last + 1 - home(std::max(carried.key, get(last, kEntries - 1).key)) >= kFarthest)
      return Inserted::kCrowded;
  for (;; ++b) {
    Bucket& bucket = buckets_[b];
    if (bucket.extra() < slot_extra) widen(b, slot_extra);
    const uint64_t least = base(b);
    const int place = bucket.place_of(carried.key, least);
    // Only the new key can be here, so nothing has moved yet.
    if (place > 0 && bucket.get(place - 1, least).key == carried.key) return Inserted::kPresent;
    if (place == kEntries) continue;
    const Entry largest = bucket.get(kEntries - 1, least);
    bucket.insert(place, carried);
    if (b == last) break;
    carried = largest;
  }
  ++state_->num_keys;
  return Inserted::kDone;
}

void Shard::remove(int64_t b, uint64_t key) {
  int entry = buckets_[b].find(key);
  while (entry < 0) entry = buckets_[++b].find(key);
  remove_at({b, entry});
}

void Shard::remove_at(Place place) {
  auto [b, entry] = place;
  --state_->num_keys;
  while (true) {
    Bucket& bucket = buckets_[b];
    const bool was_full = bucket.full();
    bucket.remove(entry);
    // The key that this bucket had passed on comes back.
    if (!was_full || buckets_[b + 1].count() == 0) return;
    const Entry back = get(b + 1, 0);
    // The first key of the next bucket is at home there, so it was not passed on.
    if (home(back.key) > b) return;
    widen(b, buckets_[b + 1].extra());
    bucket.insert(kEntries - 1, back);
    ++b, entry = 0;
  }
}

Place Shard::place_of(int64_t b, uint64_t slot) const {
  int entry = buckets_[b].find_slot(slot);
  while (entry < 0) assert(b < after_ + kReach), entry = buckets_[++b].find_slot(slot);
  return {b, entry};
}

}  // namespace meshrec::index
