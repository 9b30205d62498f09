// Per-slot values in hashed tables, read and written for all tables in a single call.
// src/meshrec/ops/index/slots.py is the reference.
#include "index/ids.h"

namespace meshrec {

namespace {

constexpr int64_t kGrainSlots = 1 << 13, kAhead = 24;

void check_slot(int64_t slot, int64_t bound) {
  if (uint64_t(slot) >= uint64_t(bound)) fail("slot ", slot, " is outside [0, ", bound, ")");
}

// Runs work(k, slots, begin, end) for pieces of all slot lists, after checking that the slots in a piece are
// in [0, num_rows(k)).
template <typename NumRows, typename Work>
void for_slots(const std::vector<Tensor>& slots, const NumRows& num_rows, const Work& work) {
  std::vector<Tensor> lists;
  std::vector<IdPiece> pieces;
  for (size_t k = 0; k < slots.size(); ++k) {
    check_ids(slots[k]);
    lists.push_back(as_contiguous(slots[k]));
    const int64_t count = slots[k].numel();
    for (int64_t begin = 0; begin < count; begin += kGrainSlots)
      pieces.push_back({begin, std::min(count, begin + kGrainSlots), int64_t(k)});
  }
  const auto each = [&](int64_t p) {
    const auto [begin, end, k] = pieces[size_t(p)];
    const auto* slot = static_cast<const int64_t*>(lists[size_t(k)].const_data_ptr());
    const int64_t bound = num_rows(size_t(k));
    // Without a branch per slot. The slow loop below only finds the slot to name.
    bool all_inside = true;
    for (int64_t i = begin; i < end; ++i) all_inside &= uint64_t(slot[i]) < uint64_t(bound);
    // Ends by an exception at the first slot that is outside.
    for (int64_t i = begin; !all_inside; ++i) check_slot(slot[i], bound);
    work(size_t(k), slot, begin, end);
  };
  if (pieces.size() > 1) return parallel_tasks(int64_t(pieces.size()), each);
  for (size_t p = 0; p < pieces.size(); ++p) each(int64_t(p));
}

template <typename Word>
void fill(void* memory, int64_t width, const int64_t* slot, int64_t begin, int64_t end, Word value) {
  auto* const rows = static_cast<Word*>(memory);
  // Atomic, because slots may repeat: then two threads write the same value.
  const auto store = [&](Word* to)
                         __attribute__((always_inline)) { __atomic_store_n(to, value, __ATOMIC_RELAXED); };
  if (width == 1) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end) __builtin_prefetch(rows + slot[i + kAhead], 1, 3);
      store(rows + slot[i]);
    }
    return;
  }
  for (int64_t i = begin; i < end; ++i)
    for (Word *at = rows + width * slot[i], *stop = at + width; at < stop; ++at) store(at);
}

void fill_slots(std::vector<Tensor> parts, std::vector<Tensor> slots, std::vector<int64_t> values) {
  if (parts.size() != slots.size() || parts.size() != values.size())
    fail(parts.size(), " parts, ", slots.size(), " lists of slots and ", values.size(), " values");
  for (const Tensor& part : parts)
    if (part.dim() < 1 || !part.is_contiguous()) fail("parts must be contiguous, with a row for each slot");
  for_slots(
      slots, [&](size_t k) { return parts[k].size(0); },
      [&](size_t k, const int64_t* slot, int64_t begin, int64_t end) {
        void* const memory = parts[k].mutable_data_ptr();
        const int64_t width = parts[k].numel() / parts[k].size(0), value = values[k];
        switch (parts[k].element_size()) {
          case 1:
            return fill(memory, width, slot, begin, end, uint8_t(value));
          case 2:
            return fill(memory, width, slot, begin, end, uint16_t(value));
          case 4:
            return fill(memory, width, slot, begin, end, uint32_t(value));
          case 8:
            return fill(memory, width, slot, begin, end, uint64_t(value));
          default:
            fail("parts must have values of 1, 2, 4 or 8 bytes");
        }
      });
}

// Returns the memory of a tensor with a value per slot.
template <typename T>
T* by_slot(const Tensor& tensor, ScalarType type, const char* what) {
  if (tensor.dim() != 1 || tensor.scalar_type() != type || !tensor.is_contiguous())
    fail(what, " must be contiguous, ", torch::headeronly::toString(type), " with 1 dimension");
  return static_cast<T*>(const_cast<void*>(tensor.const_data_ptr()));
}

Tensor copied(const std::vector<int64_t>& values) {
  Tensor result = new_int64(int64_t(values.size()));
  std::copy(values.begin(), values.end(), static_cast<int64_t*>(result.mutable_data_ptr()));
  return result;
}

std::tuple<Tensor, Tensor> release_slots(std::vector<Tensor> pins, std::vector<Tensor> alive,
                                         std::vector<Tensor> slots) {
  if (pins.size() != slots.size() || alive.size() != slots.size())
    fail("pins, marks and slots must be as many lists");
  std::vector<std::vector<int64_t>> found(slots.size());
  // A task per table, because slots repeat within a table and the decrements must not race.
  parallel_tasks(int64_t(slots.size()), [&](int64_t k) {
    auto* const pin = by_slot<int32_t>(pins[k], ScalarType::Int, "pins");
    const auto* const is_alive = by_slot<const bool>(alive[k], ScalarType::Bool, "marks");
    const int64_t bound = std::min(pins[k].numel(), alive[k].numel());
    check_ids(slots[k]);
    const Tensor list = as_contiguous(slots[k]);
    const auto* const slot = static_cast<const int64_t*>(list.const_data_ptr());
    for (int64_t i = 0, count = list.numel(); i < count; ++i) {
      check_slot(slot[i], bound);
      // A row that was evicted while batches in flight read it keeps its slot until the last of them releases
      // it.
      if (--pin[slot[i]] == 0 && !is_alive[slot[i]]) found[k].push_back(slot[i]);
    }
  });
  std::vector<int64_t> free, counts;
  for (const auto& each : found) {
    free.insert(free.end(), each.begin(), each.end());
    counts.push_back(int64_t(each.size()));
  }
  return {copied(free), copied(counts)};
}

// Eviction candidates in order, and the current state of their slots.
struct Kept {
  const Tensor &scores, &slots, &scores_now, &alive, &used, &gone;
  int64_t wanted;
};

template <typename Score>
int64_t first_left_of(const Kept& kept, ScalarType type, std::vector<int64_t>& positions) {
  positions.reserve(size_t(std::min(kept.wanted, kept.slots.numel())));
  const int64_t bound = kept.scores_now.numel();
  if (kept.scores.numel() != kept.slots.numel() || kept.alive.numel() < bound)
    fail("a row has a score and a slot, and a slot has a score and a mark");
  // A bitmap over slots, because the slots that stay repeat and are not sorted.
  std::vector<uint64_t> stays(size_t(bound + 63) / 64, 0);
  for (const Tensor* staying : {&kept.used, &kept.gone}) {
    const auto* slot = by_slot<const int64_t>(*staying, ScalarType::Long, "slots");
    for (int64_t i = 0; i < staying->numel(); ++i) {
      check_slot(slot[i], bound);
      stays[size_t(slot[i]) / 64] |= uint64_t(1) << (slot[i] % 64);
    }
  }
  const auto* const now = by_slot<const Score>(kept.scores_now, type, "scores");
  const auto* const score = by_slot<const Score>(kept.scores, type, "scores");
  const auto* const slot = by_slot<const int64_t>(kept.slots, ScalarType::Long, "slots");
  const auto* const alive = by_slot<const bool>(kept.alive, ScalarType::Bool, "marks");
  int64_t over = 0;
  const int64_t count = kept.slots.numel();
  for (int64_t i = 0; i < count && int64_t(positions.size()) < kept.wanted; ++i) {
    check_slot(slot[i], bound);
    if (i + kAhead < count) {
      __builtin_prefetch(now + slot[i + kAhead], 0, 3);
      __builtin_prefetch(alive + slot[i + kAhead], 0, 3);
    }
    if (now[slot[i]] != score[i] || !alive[slot[i]]) {
      // `over` counts outdated candidates at the front, which callers can drop for good.
      over += over == i;
    } else if ((stays[size_t(slot[i]) / 64] >> (slot[i] % 64) & 1) == 0) {
      positions.push_back(i);
    }
  }
  return over;
}

std::vector<Tensor> first_left(std::vector<Tensor> scores, std::vector<Tensor> slots,
                               std::vector<Tensor> scores_now, std::vector<Tensor> alive,
                               std::vector<Tensor> used, std::vector<Tensor> gone,
                               std::vector<int64_t> wanted) {
  const size_t count = scores.size();
  for (const auto* each : {&slots, &scores_now, &alive, &used, &gone})
    if (each->size() != count) fail("all lists must be of ", count, " tables");
  if (wanted.size() != count) fail("all lists must be of ", count, " tables");
  std::vector<std::vector<int64_t>> found(count);
  std::vector<int64_t> over(count, 0);
  parallel_tasks(int64_t(count), [&](int64_t k) {
    const Kept kept{scores[k], slots[k], scores_now[k], alive[k], used[k], gone[k], wanted[k]};
    if (kept.scores.scalar_type() == ScalarType::Int)
      over[k] = first_left_of<int32_t>(kept, ScalarType::Int, found[k]);
    else
      over[k] = first_left_of<int64_t>(kept, ScalarType::Long, found[k]);
  });
  std::vector<Tensor> result;
  for (const auto& each : found) result.push_back(copied(each));
  result.push_back(copied(over));
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("fill_slots", TORCH_BOX(&fill_slots));
  m.impl("release_slots", TORCH_BOX(&release_slots));
  m.impl("first_left", TORCH_BOX(&first_left));
}

}  // namespace
}  // namespace meshrec
