#include "runs.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "memory.h"

namespace meshrec {

namespace {

constexpr size_t kAlignment = size_t(2) << 20;  // a huge page
constexpr size_t kKeptBytes = size_t(64) << 20;
constexpr int64_t kChunkIds = 1 << 14;
constexpr int kMaxDigitBits = 11;
constexpr int64_t kPartitions = 256;

thread_local Arena::Memory kept_memory;
thread_local size_t kept_capacity = 0;

template <typename Id>
void fill_pairs(const Batch& batch, int64_t first_bag, int64_t last_bag, bool slot_per_id, int64_t slot,
                Pair* pairs) {
  const Id* ids = static_cast<const Id*>(batch.ids(0));
  const int64_t step = slot_per_id ? 1 : 0;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    for (int64_t i = batch.bags[bag]; i < batch.bags[bag + 1]; ++i, slot += step)
      *pairs++ = {uint32_t(ids[i]), uint32_t(slot)};
    slot += 1 - step;
  }
}

void insertion_sort(Pair* pairs, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Pair pair = pairs[i];
    int64_t j = i;
    for (; j > 0 && pairs[j - 1].row > pair.row; --j) pairs[j] = pairs[j - 1];
    pairs[j] = pair;
  }
}

// Least significant digit first; the digits' histograms are taken in one pass over the pairs.
template <int kPasses>
void radix_sort_in(Pair* pairs, Pair* spare, int64_t count, uint32_t first_row, int digit_bits) {
  const uint32_t mask = (1u << digit_bits) - 1;
  uint32_t counts[kPasses][1 << kMaxDigitBits];
  for (int pass = 0; pass < kPasses; ++pass) std::memset(counts[pass], 0, sizeof(uint32_t) << digit_bits);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = pairs[i].row - first_row;
    for (int pass = 0; pass < kPasses; ++pass) ++counts[pass][key >> (pass * digit_bits) & mask];
  }
  Pair* from = pairs;
  Pair* to = spare;
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t position = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) position += std::exchange(counts[pass][digit], position);
    const int shift = pass * digit_bits;
    for (int64_t i = 0; i < count; ++i) {
      const Pair pair = from[i];
      to[counts[pass][(pair.row - first_row) >> shift & mask]++] = pair;
    }
    std::swap(from, to);
  }
  if (from != pairs) std::memcpy(pairs, from, count * sizeof(Pair));
}

void radix_sort(Pair* pairs, Pair* spare, int64_t count, uint32_t first_row, uint32_t num_rows) {
  if (count < 48) return insertion_sort(pairs, count);
  const int bits = std::bit_width(num_rows > 0 ? num_rows - 1 : 0);
  const int passes = (bits + kMaxDigitBits - 1) / kMaxDigitBits;
  if (passes == 0) return;
  const int digit_bits = (bits + passes - 1) / passes;
  switch (passes) {
    case 1:
      return radix_sort_in<1>(pairs, spare, count, first_row, digit_bits);
    case 2:
      return radix_sort_in<2>(pairs, spare, count, first_row, digit_bits);
    default:
      return radix_sort_in<3>(pairs, spare, count, first_row, digit_bits);
  }
}

}  // namespace

Arena::Arena(size_t bytes) {
  if (kept_capacity >= bytes && kept_memory != nullptr) {
    memory_ = std::move(kept_memory);
    capacity_ = std::exchange(kept_capacity, 0);
  } else {
    capacity_ = (bytes / kAlignment + 1) * kAlignment;
    memory_.reset(std::aligned_alloc(kAlignment, capacity_));
    if (memory_ == nullptr) throw std::bad_alloc();
    advise_huge_pages(memory_.get(), capacity_);
  }
  next_ = static_cast<char*>(memory_.get());
}

Arena::~Arena() {
  if (capacity_ <= kKeptBytes && capacity_ > kept_capacity) {
    kept_memory = std::move(memory_);
    kept_capacity = capacity_;
  }
}

Runs::Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows,
           const float* row_stats) {
  if (batch.num_ids > int64_t(UINT32_MAX))
    fail("a batch has ", batch.num_ids, " ids; at most 4294967295 fit.");
  std::vector<int64_t> index(num_rows.size(), -1);
  for (size_t l = 0; l < batch.lookups.size(); ++l) {
    const Lookup& lookup = batch.lookups[l];
    if (lookup.table < 0) continue;
    if (lookup.table >= int64_t(num_rows.size()))
      fail("feature ", lookup.feature, " reads table ", lookup.table, " of ", num_rows.size(), ".");
    if (index[lookup.table] < 0) {
      index[lookup.table] = tables.size();
      tables.push_back({.table = lookup.table, .num_rows = num_rows[lookup.table], .dim = lookup.dim});
    }
    TableRuns& table = tables[index[lookup.table]];
    if (table.dim != lookup.dim) fail("two features read table ", lookup.table, " with different widths.");
    table.lookups.push_back(l);
    table.num_pairs += lookup.num_ids;
    table.slot_per_id |= lookup.pooling == kNone || batch.sample_weights != nullptr;
  }
  size_t bytes = 0;
  for (TableRuns& table : tables) {
    table.scaled = batch.sample_weights != nullptr;
    bool strided = false;
    for (int64_t l : table.lookups) {
      const Lookup& lookup = batch.lookups[l];
      table.scaled |= lookup.pooling == kMean;
      table.num_slots += table.slot_per_id ? lookup.num_ids : lookup.num_bags;
      table.num_grads += lookup.num_bags;
      strided |= lookup.pooling != kNone && lookup.out_stride > lookup.dim;
    }
    // A gradient row that many ids share is read many times; at a wide stride such rows fight for a few cache
    // sets.
    table.pack = strided && table.num_pairs > 2 * table.num_grads;
    if (table.pack) bytes += Arena::bytes<float>(table.num_grads * table.dim);
    bytes += 2 * Arena::bytes<Pair>(table.num_pairs) + Arena::bytes<float*>(table.num_slots) +
             (table.scaled ? Arena::bytes<float>(table.num_slots) : 0) +
             (row_stats != nullptr ? Arena::bytes<float*>(table.num_slots) : 0);
  }
  arena_ = std::make_unique<Arena>(bytes);
  for (TableRuns& table : tables) {
    table.pairs = arena_->take<Pair>(table.num_pairs);
    table.spare = arena_->take<Pair>(table.num_pairs);
    table.grads = arena_->take<const float*>(table.num_slots);
    if (table.pack) table.packed = arena_->take<float>(table.num_grads * table.dim);
    if (table.scaled) table.scales = arena_->take<float>(table.num_slots);
    if (row_stats != nullptr) table.row_stats = arena_->take<const float*>(table.num_slots);
  }

  const std::vector<Chunk> all = chunks(batch);
  std::atomic<bool> bad{false};
  parallel_tasks(all.size(), [&](int64_t task) {
    if (!fill(batch, all[task], grad, row_stats)) bad = true;
  });
  if (bad) {
    for (const TableRuns& table : tables)
      for (int64_t l : table.lookups)
        for (int64_t i = 0; i < batch.lookups[l].num_ids; ++i) {
          const int64_t id = batch.id(batch.lookups[l].first_id + i);
          if (id < 0 || id >= table.num_rows) fail_for_id(batch, l, table.num_rows, nullptr);
        }
  }
  const int64_t threads = torch::stable::get_num_threads();
  partition(all, std::clamp<int64_t>(batch.num_ids / (4 * threads), 4096, 65536));
}

std::vector<Runs::Chunk> Runs::chunks(const Batch& batch) const {
  std::vector<Chunk> result;
  for (size_t t = 0; t < tables.size(); ++t) {
    const TableRuns& table = tables[t];
    int64_t pair = 0, slot = 0, grad = 0;
    for (int64_t l : table.lookups) {
      const Lookup& lookup = batch.lookups[l];
      const int64_t end_bag = lookup.first_bag + lookup.num_bags;
      const int64_t parts =
          std::clamp<int64_t>(lookup.num_ids / kChunkIds, 1, std::max<int64_t>(1, lookup.num_bags));
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = lookup.first_bag + lookup.num_bags * part / parts;
        const int64_t last =
            part + 1 == parts ? end_bag : lookup.first_bag + lookup.num_bags * (part + 1) / parts;
        result.push_back({int64_t(t), l, first, last, pair, slot, grad});
        grad += last - first;
        pair += batch.bags[last] - batch.bags[first];
        slot += table.slot_per_id ? batch.bags[last] - batch.bags[first] : last - first;
      }
    }
  }
  return result;
}

bool Runs::fill(const Batch& batch, const Chunk& chunk, const float* grad, const float* row_stats) const {
  const TableRuns& table = tables[chunk.table];
  const Lookup& lookup = batch.lookups[chunk.lookup];
  const int64_t first_id = batch.bags[chunk.first_bag], count = batch.bags[chunk.last_bag] - first_id;
  const bool fit =
      batch.wide_ids
          ? kernels().all_below64(static_cast<const int64_t*>(batch.ids(first_id)), count, table.num_rows)
          : kernels().all_below32(static_cast<const int32_t*>(batch.ids(first_id)), count, table.num_rows);
  if (!fit) return false;
  Pair* pairs = table.pairs + chunk.first_pair;
  if (batch.wide_ids) {
    fill_pairs<int64_t>(batch, chunk.first_bag, chunk.last_bag, table.slot_per_id, chunk.first_slot, pairs);
  } else {
    fill_pairs<int32_t>(batch, chunk.first_bag, chunk.last_bag, table.slot_per_id, chunk.first_slot, pairs);
  }
  int64_t slot = chunk.first_slot;
  for (int64_t bag = chunk.first_bag; bag < chunk.last_bag; ++bag) {
    const int64_t first = batch.bags[bag], last = batch.bags[bag + 1];
    const float scale = lookup.pooling == kMean && last > first ? 1.0f / float(last - first) : 1.0f;
    const float* row = grad + lookup.out_offset + (bag - lookup.first_bag) * lookup.out_stride;
    if (table.packed != nullptr) {
      float* copy = table.packed + (chunk.first_grad + bag - chunk.first_bag) * table.dim;
      row = static_cast<const float*>(std::memcpy(copy, row, table.dim * sizeof(float)));
    }
    if (!table.slot_per_id) {
      table.grads[slot] = row;
      if (table.scales != nullptr) table.scales[slot] = scale;
      ++slot;
      continue;
    }
    for (int64_t i = first; i < last; ++i, ++slot) {
      table.grads[slot] = lookup.pooling == kNone
                              ? grad + lookup.out_offset + (i - lookup.first_id) * lookup.out_stride
                              : row;
      if (table.scales != nullptr)
        table.scales[slot] = batch.sample_weights != nullptr ? scale * batch.sample_weights[i] : scale;
      if (table.row_stats != nullptr) table.row_stats[slot] = row_stats + 3 * i;
    }
  }
  return true;
}

// Tables with more pairs than the target are dealt out by the top bits of the row into ranges of neighbouring
// rows, so that one large or hot table keeps every thread busy.
void Runs::partition(const std::vector<Chunk>& all, int64_t target) {
  std::vector<bool> large(tables.size());
  std::vector<int64_t> shift(tables.size());
  for (size_t t = 0; t < tables.size(); ++t) {
    TableRuns& table = tables[t];
    large[t] = table.num_pairs > target;
    shift[t] = std::max<int64_t>(
        0, std::bit_width(uint64_t(table.num_rows)) - std::bit_width(uint64_t(kPartitions - 1)));
    if (!large[t] && table.num_pairs > 0)
      ranges.push_back({int64_t(t), 0, table.num_pairs, 0, table.num_rows});
  }
  std::vector<Chunk> dealt;
  for (const Chunk& chunk : all)
    if (large[chunk.table]) dealt.push_back(chunk);
  if (!dealt.empty()) {
    const auto size_of = [&](size_t c) {
      const bool last = c + 1 == dealt.size() || dealt[c + 1].table != dealt[c].table;
      return (last ? tables[dealt[c].table].num_pairs : dealt[c + 1].first_pair) - dealt[c].first_pair;
    };
    std::vector<uint32_t> counts(dealt.size() * kPartitions, 0);
    parallel_tasks(dealt.size(), [&](int64_t c) {
      const Pair* pairs = tables[dealt[c].table].pairs + dealt[c].first_pair;
      uint32_t* count = &counts[c * kPartitions];
      for (int64_t i = 0, n = size_of(c); i < n; ++i) ++count[pairs[i].row >> shift[dealt[c].table]];
    });
    // Where each chunk writes each part: parts in order, and in a part the chunks in order.
    for (size_t first = 0, last; first < dealt.size(); first = last) {
      const int64_t t = dealt[first].table;
      for (last = first; last < dealt.size() && dealt[last].table == t; ++last) {
      }
      int64_t position = 0, begin = 0, first_part = 0;
      for (int64_t part = 0; part < kPartitions; ++part) {
        for (size_t c = first; c < last; ++c) {
          const uint32_t size = counts[c * kPartitions + part];
          counts[c * kPartitions + part] = position;
          position += size;
        }
        if (position - begin >= target || (part + 1 == kPartitions && position > begin)) {
          const int64_t end_row = std::min(tables[t].num_rows, (part + 1) << shift[t]);
          ranges.push_back({t, begin, position, first_part << shift[t], end_row});
          begin = position;
          first_part = part + 1;
        }
      }
    }
    parallel_tasks(dealt.size(), [&](int64_t c) {
      const TableRuns& table = tables[dealt[c].table];
      const Pair* pairs = table.pairs + dealt[c].first_pair;
      uint32_t* position = &counts[c * kPartitions];
      for (int64_t i = 0, n = size_of(c); i < n; ++i)
        table.spare[position[pairs[i].row >> shift[dealt[c].table]]++] = pairs[i];
    });
    for (size_t t = 0; t < tables.size(); ++t)
      if (large[t]) std::swap(tables[t].pairs, tables[t].spare);
  }
  std::stable_sort(ranges.begin(), ranges.end(),
                   [](const Range& a, const Range& b) { return a.end - a.begin > b.end - b.begin; });
}

void Runs::sort(const Range& range) const {
  const TableRuns& table = tables[range.table];
  radix_sort(table.pairs + range.begin, table.spare + range.begin, range.end - range.begin,
             uint32_t(range.first_row), uint32_t(range.end_row - range.first_row));
}

RunArgs Runs::arguments(const Range& range, float* scratch) const {
  const TableRuns& table = tables[range.table];
  return {table.pairs, range.begin, range.end, range.end, table.grads, table.scales, table.dim, scratch};
}

float* task_scratch(int64_t dim) {
  thread_local std::vector<float> scratch;
  const size_t size = kScratchRows * padded(dim);
  if (scratch.size() < size) scratch.resize(size);
  return scratch.data();
}

}  // namespace meshrec
