#include "tbe/runs.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "host/memory.h"
#include "tbe/row_sort.h"

namespace meshrec {

namespace {

constexpr size_t kAlignment = size_t(2) << 20;  // a huge page
// A thread keeps at most this much memory between calls.
constexpr size_t kSpareBytes = size_t(64) << 20;
constexpr int64_t kMinChunk = 1 << 12, kMaxChunk = 1 << 14;  // ids
// Measured on 327k IDs of a Zipf 1.2 batch: 0.53 ms, and 1.03 ms with one stream.
constexpr int64_t kStreams = 4;
constexpr int64_t kRowsAhead = 8;          // gradient rows to prefetch while packing
constexpr int64_t kMaxParts = 256;         // a part is a position to which pairs are written
constexpr size_t kRangeBytes = 128 << 10;  // gradient rows in a range: the pairs then sort in the L1 cache
constexpr size_t kWaveBytes = 1 << 20;     // pairs and packed gradients for a thread: about an L2 cache
// Sort memory for at most this many pairs is kept per thread.
constexpr size_t kKeptPairs = size_t(1) << 20;
constexpr int64_t kSavedNumbers = 2;  // number of ranges, number of runs

// Per-thread memory, used if a step's buffers are not retained.
thread_local Memory spare_memory;
thread_local size_t spare_capacity = 0;

// Calls use(position, stream) for positions [0, count), in order within each of the kStreams. Incrementing a
// counter waits for the previous store to it. IDs of hot rows all fall in the same part; with separate
// counters per stream, they wait less.
template <typename Use>
void in_streams(int64_t count, const Use& use) {
  const int64_t length = count / kStreams;
  for (int64_t i = 0; i < length; ++i)
    for (int64_t stream = 0; stream < kStreams; ++stream) use(stream * length + i, stream);
  for (int64_t i = kStreams * length; i < count; ++i) use(i, kStreams - 1);
}

// Counts the IDs in each part, per stream. Returns false if an ID is outside the table.
template <typename Id>
bool count_parts(const void* values, int64_t count, const TableRuns& table, uint32_t* counts) {
  const Id* ids = static_cast<const Id*>(values);
  const int64_t shift = table.shift, num_parts = table.num_parts;
  const uint64_t num_rows = table.num_rows;
  bool fit = true;
  in_streams(count, [&](int64_t i, int64_t stream) {
    const uint64_t id = int64_t(ids[i]);
    fit &= id < num_rows;
    if (id < num_rows) ++counts[stream * num_parts + (id >> shift)];
  });
  return fit;
}

// Writes the pair for each ID to the next free position in its part.
template <typename Id, typename Slot>
void deal(const void* values, int64_t count, const TableRuns& table, const Slot& slot, uint32_t* positions) {
  const Id* ids = static_cast<const Id*>(values);
  const int64_t shift = table.shift, num_parts = table.num_parts;
  Pair* const pairs = table.pairs;
  in_streams(count, [&](int64_t i, int64_t stream) {
    const uint32_t row = uint32_t(ids[i]);
    Pair* pair = pairs + positions[stream * num_parts + (row >> shift)]++;
    *pair = std::bit_cast<Pair>(uint64_t(row) | uint64_t(slot(i)) << 32);  // a single store
    __builtin_prefetch(pair + 8, 1);                                       // next cache line in the part
  });
}

// Bytes that must outlive this call, because a later call continues the update.
size_t lasting_bytes_of(const TableRuns& table) {
  return Arena::bytes<Pair>(table.num_pairs) +
         (table.pack ? Arena::bytes<float>(table.num_grads * table.dim) : 0);
}

}  // namespace

Arena::Arena(size_t bytes) {
  memory_ = kept_memory(bytes);
  if (memory_ == nullptr && spare_capacity >= bytes && spare_memory != nullptr) {
    memory_ = std::move(spare_memory);
    capacity_ = std::exchange(spare_capacity, 0);
  } else if (memory_ == nullptr) {
    capacity_ = (bytes / kAlignment + 1) * kAlignment;
    memory_.reset(std::aligned_alloc(kAlignment, capacity_));
    if (memory_ == nullptr) fail_for_memory(capacity_);
    advise_huge_pages(memory_.get(), capacity_);
  }
  next_ = static_cast<char*>(memory_.get());
}

Arena::~Arena() {
  // Keeps the larger memory for this thread's next step.
  if (capacity_ <= kSpareBytes && capacity_ > spare_capacity) {
    spare_memory = std::move(memory_);
    spare_capacity = capacity_;
  }
}

Runs::Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows,
           const float* row_stats, Use use) {
  if (batch.num_ids > int64_t(UINT32_MAX))
    fail("a batch has ", batch.num_ids, " ids; at most 4294967295 fit.");
  make_tables(batch, num_rows);
  if (use == kInWaves) make_waves();
  make_chunks(batch);
  std::atomic<int64_t> bad{int64_t(chunks_.size())};
  parallel_tasks(chunks_.size(), [&](int64_t task) {
    if (!count(batch, chunks_[task])) atomic_min(bad, task);
  });
  if (bad < int64_t(chunks_.size())) {
    const Chunk& chunk = chunks_[bad];
    fail_for_id(batch, chunk.lookup, tables[chunk.table].num_rows, nullptr);
  }
  make_ranges();
  if (use == kSaved) saved_ = empty_buffer({saved_words(ranges.size())}, ScalarType::Long);
  allocate(row_stats != nullptr, use == kSaved);
  // Waves in a lane share memory, so they are filled one after another (for_ranges_in_waves).
  if (use != kInWaves)
    parallel_tasks(chunks_.size(), [&](int64_t task) { fill(batch, chunks_[task], grad, row_stats); });
}

Runs::Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows, const Tensor& saved) {
  make_tables(batch, num_rows);
  make_chunks(batch);
  load(saved);
  allocate(false, false);
  parallel_tasks(chunks_.size(), [&](int64_t task) { pack_slots(batch, chunks_[task], grad, nullptr); });
}

std::vector<int64_t> Runs::number_runs(const std::vector<int64_t>& counts, size_t num_tables) {
  // `first_run` holds the count first, and the start below.
  for (size_t k = 0; k < ranges.size(); ++k) ranges[k].first_run = counts[k];
  std::vector<Range*> order;
  for (Range& range : ranges) order.push_back(&range);
  std::sort(order.begin(), order.end(), [&](const Range* a, const Range* b) {
    const int64_t first = tables[a->table].table, second = tables[b->table].table;
    return first < second || (first == second && a->begin < b->begin);
  });
  std::vector<int64_t> starts(num_tables + 1, 0);
  for (Range* range : order) {
    num_runs += std::exchange(range->first_run, num_runs);
    starts[tables[range->table].table + 1] = num_runs;
  }
  // Tables without ranges start where the previous table ends.
  for (size_t t = 0; t < num_tables; ++t) starts[t + 1] = std::max(starts[t], starts[t + 1]);
  return starts;
}

int64_t Runs::saved_words(int64_t num_ranges) const {
  static_assert(sizeof(Range) % sizeof(int64_t) == 0);
  return (lasting_bytes() + num_ranges * sizeof(Range)) / sizeof(int64_t) + kSavedNumbers;
}

Tensor Runs::save() {
  auto* word = static_cast<int64_t*>(saved_->mutable_data_ptr()) + lasting_bytes() / sizeof(int64_t);
  *word++ = ranges.size();
  *word++ = num_runs;
  std::copy(ranges.begin(), ranges.end(), reinterpret_cast<Range*>(word));
  return *saved_;
}

void Runs::load(const Tensor& saved) {
  saved_ = as_contiguous(saved);
  is_loaded_ = true;
  const auto* word =
      static_cast<const int64_t*>(saved_->const_data_ptr()) + lasting_bytes() / sizeof(int64_t);
  // The least size is checked before the number of ranges is read.
  if (saved_->scalar_type() != ScalarType::Long || saved_->numel() < saved_words(0) ||
      saved_->numel() != saved_words(word[0]))
    fail("runs are not those of this batch. Pass what tbe_row_squares gave for it.");
  ranges.resize(word[0]);
  waves = {{.end_table = int64_t(tables.size()),
            .end_chunk = int64_t(chunks_.size()),
            .end_range = int64_t(ranges.size())}};
  num_runs = word[1];
  std::copy_n(reinterpret_cast<const Range*>(word + kSavedNumbers), ranges.size(), ranges.begin());
}

void Runs::make_tables(const Batch& batch, const std::vector<int64_t>& num_rows) {
  std::vector<int64_t> index(num_rows.size(), -1);
  for (size_t l = 0; l < batch.lookups.size(); ++l) {
    const Lookup& lookup = batch.lookups[l];
    if (lookup.table < 0) continue;
    if (lookup.table >= int64_t(num_rows.size()))
      fail("feature ", lookup.feature, " reads table ", lookup.table, " of ", num_rows.size(), ".");
    // Tables in the order of their first lookup: features that share a table share its runs, so a row is
    // updated once.
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
    // A gradient row shared by many IDs is read many times, and rows with a wide stride compete for a few
    // cache sets.
    table.pack = strided && table.num_pairs > 2 * table.num_grads;
    table.first_pair = std::exchange(num_pairs, num_pairs + table.num_pairs);
  }
}

// Assigns adjacent tables to each thread, roughly those that it looked up: their rows are in its caches, and
// may be far from other threads.
// Measured with 26 tables on two cores with separate caches: 15 % less time per step.
void Runs::make_waves() {
  const int64_t num_lanes = std::min<int64_t>(torch::stable::get_num_threads(), tables.size());
  size_t bytes = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    TableRuns& table = tables[t];
    table.lane = std::min(num_lanes - 1, (table.first_pair + table.num_pairs / 2) * num_lanes /
                                             std::max<int64_t>(1, num_pairs));
    const size_t own_bytes = lasting_bytes_of(table);
    // With 8 tables of 100k rows, a step takes 5 to 7 % less time than with all tables in a single wave.
    const bool fits = t > 0 && table.lane == tables[t - 1].lane && bytes + own_bytes <= kWaveBytes;
    table.wave = t == 0 ? 0 : tables[t - 1].wave + !fits;
    bytes = fits ? bytes + own_bytes : own_bytes;
  }
}

void Runs::make_chunks(const Batch& batch) {
  int64_t num_counts = 0;
  const int64_t chunk_ids =
      std::clamp(batch.num_ids / (4 * torch::stable::get_num_threads()), kMinChunk, kMaxChunk);
  for (size_t t = 0; t < tables.size(); ++t) {
    TableRuns& table = tables[t];
    const size_t first_chunk = chunks_.size();
    int64_t slot = 0, grad = 0;
    for (int64_t l : table.lookups) {
      const Lookup& lookup = batch.lookups[l];
      const int64_t parts =
          std::clamp<int64_t>(lookup.num_ids / chunk_ids, 1, std::max<int64_t>(1, lookup.num_bags));
      for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = lookup.first_bag + lookup.num_bags * part / parts;
        const int64_t last = lookup.first_bag + lookup.num_bags * (part + 1) / parts;
        chunks_.push_back({int64_t(t), l, first, last, slot, grad, 0});
        grad += last - first;
        slot += table.slot_per_id ? batch.bags[last] - batch.bags[first] : last - first;
      }
    }
    // At most as many counters as pairs.
    const int64_t num_streams = (chunks_.size() - first_chunk) * kStreams;
    const int64_t most = std::min(kMaxParts, table.num_pairs / std::max<int64_t>(num_streams, 32));
    const uint64_t last_row = std::max<int64_t>(table.num_rows - 1, 0);
    const auto bits = [](uint64_t number) { return int64_t(std::bit_width(number)); };
    table.shift = std::max<int64_t>(0, bits(last_row) - bits(std::max<int64_t>(most, 1)) + 1);
    table.num_parts = int64_t(last_row >> table.shift) + 1;
    for (size_t c = first_chunk; c < chunks_.size(); ++c, num_counts += table.num_parts * kStreams)
      chunks_[c].first_count = num_counts;
  }
  positions_.resize(num_counts);
}

bool Runs::count(const Batch& batch, const Chunk& chunk) {
  const TableRuns& table = tables[chunk.table];
  const int64_t first = batch.bags[chunk.first_bag], count = batch.bags[chunk.last_bag] - first;
  const auto count_ids = batch.wide_ids ? count_parts<int64_t> : count_parts<int32_t>;
  return count_ids(batch.ids(first), count, table, positions_.data() + chunk.first_count);
}

// Turns pair counts (for the chunks of a table) into the start position of each part; returns the end
// positions.
std::vector<uint32_t> Runs::place_parts(size_t first_chunk, size_t last_chunk) {
  const int64_t num_parts = tables[chunks_[first_chunk].table].num_parts;
  const int64_t num_streams = (last_chunk - first_chunk) * kStreams;
  uint32_t* const counts = positions_.data() + chunks_[first_chunk].first_count;
  std::vector<uint32_t> next(num_parts, 0);
  for (int64_t stream = 0; stream < num_streams; ++stream)
    for (int64_t part = 0; part < num_parts; ++part) next[part] += counts[stream * num_parts + part];
  std::exclusive_scan(next.begin(), next.end(), next.begin(), 0u);
  for (int64_t stream = 0; stream < num_streams; ++stream)
    for (int64_t part = 0; part < num_parts; ++part)
      // Within a part: by chunk, then by stream, which is the order in the batch. So the partition is stable.
      next[part] += std::exchange(counts[stream * num_parts + part], next[part]);
  return next;
}

namespace {

// Minimum number of pairs in a range. A range with more than four times as many counts as large.
int64_t least_pairs(const TableRuns& table) {
  return std::clamp<int64_t>(kRangeBytes / (table.dim * sizeof(float)), 256, 2048);
}

bool is_large(const Range& range, const TableRuns& table) {
  return range.end - range.begin > 4 * least_pairs(table);
}

}  // namespace

// Divides the chunks of a table into ranges. Parts are in order, and within a part the streams of the chunks
// are in order. A range is one or more adjacent parts. A part with many pairs (hot rows) is a separate range.
void Runs::cut(size_t first_chunk, size_t last_chunk) {
  const int64_t t = chunks_[first_chunk].table;
  const TableRuns& table = tables[t];
  const std::vector<uint32_t> ends = place_parts(first_chunk, last_chunk);
  int64_t begin = 0, first_part = 0;
  for (int64_t part = 0; part < table.num_parts; ++part) {
    const int64_t position = ends[part];
    // Parts with few pairs join the next part. The last part ends a range, unless it is empty.
    if (position - begin < least_pairs(table) && (part + 1 < table.num_parts || position == begin)) continue;
    const int64_t end_row = std::min(table.num_rows, (part + 1) << table.shift);
    ranges.push_back({t, begin, position, first_part << table.shift, end_row, 0});
    begin = position;
    first_part = part + 1;
  }
}

void Runs::make_ranges() {
  Wave wave;
  const auto end_wave = [&] {
    wave.end_range = ranges.size();
    wave.lane = tables.empty() ? 0 : tables[wave.first_table].lane;
    const std::vector<int64_t> starts = sections(wave.first_range, wave.end_range);
    for (size_t s = 0; s + 1 < starts.size(); ++s) {
      // Small ranges keep their order, so that each can prefetch rows of the next (`arguments`).
      const auto small =
          std::stable_partition(ranges.begin() + starts[s], ranges.begin() + starts[s + 1],
                                [&](const Range& range) { return is_large(range, tables[range.table]); });
      std::stable_sort(ranges.begin() + starts[s], small,
                       [](const Range& a, const Range& b) { return a.end - a.begin > b.end - b.begin; });
    }
    waves.push_back(wave);
    wave.first_table = wave.end_table, wave.first_chunk = wave.end_chunk, wave.first_range = wave.end_range;
  };
  for (size_t first = 0, last; first < chunks_.size(); first = last) {
    const int64_t t = chunks_[first].table;
    for (last = first; last < chunks_.size() && chunks_[last].table == t; ++last) {
    }
    if (t > wave.first_table && tables[t].wave != tables[t - 1].wave) end_wave();
    wave.end_table = t + 1;
    wave.end_chunk = last;
    cut(first, last);
  }
  end_wave();
}

// Divides the ranges among threads by pair count: the start of each share, then the end of the last.
// So a range seldom leaves the caches of the thread that wrote it: on Zipf 1.2 IDs, two cores take 15 to 18 %
// less time per step than if threads took ranges in turn.
std::vector<int64_t> Runs::sections(int64_t first_range, int64_t end_range) const {
  const auto pairs_of = [](const Range& range) { return range.end - range.begin; };
  int64_t num_left = 0;
  for (int64_t k = first_range; k < end_range; ++k) num_left += pairs_of(ranges[k]);
  std::vector<int64_t> starts{first_range};
  int64_t range = first_range;
  const int64_t num_threads = std::min<int64_t>(torch::stable::get_num_threads(), end_range - first_range);
  for (int64_t thread = std::max<int64_t>(1, num_threads); thread > 0; --thread) {
    const int64_t rest = num_left - num_left / thread;
    for (; range < end_range && num_left > rest; ++range) num_left -= pairs_of(ranges[range]);
    starts.push_back(range);
  }
  return starts;
}

size_t Runs::lasting_bytes() const {
  size_t bytes = 0;
  for (const TableRuns& table : tables) bytes += lasting_bytes_of(table);
  return bytes;
}

void Runs::allocate(bool with_row_stats, bool with_squares) {
  int64_t row_bytes = 0;  // upper bound; hot rows have many pairs in few rows
  for (const Range& range : ranges)
    row_bytes += std::min(range.end - range.begin, range.end_row - range.first_row) *
                 tables[range.table].dim * int64_t(sizeof(float));
  rows_from_memory_ = !prefetch_to_l1() || outgrows_caches(row_bytes / 2);
  // If slots are per ID, or have scales, a slot has no square to share.
  const auto squares_of = [&](const TableRuns& table) {
    return with_squares && table.pack && !table.slot_per_id && !table.scaled;
  };
  std::vector<size_t> lane_starts(waves.back().lane + 2, 0);  // in the arena
  for (const Wave& wave : waves) {
    size_t bytes = 0;
    for (int64_t t = wave.first_table; t < wave.end_table; ++t) {
      const TableRuns& table = tables[t];
      bytes += (saved_.has_value() ? 0 : lasting_bytes_of(table)) +
               Arena::bytes<float*>(table.num_slots) * (with_row_stats ? 2 : 1) +
               Arena::bytes<float>(table.num_slots) * (table.scaled || squares_of(table));
    }
    // Waves in a lane use the same memory, so a lane needs that of its largest wave.
    lane_starts[wave.lane + 1] = std::max(lane_starts[wave.lane + 1], bytes);
  }
  std::partial_sum(lane_starts.begin(), lane_starts.end(), lane_starts.begin());
  arena_ = std::make_unique<Arena>(lane_starts.back());
  std::optional<Arena> kept;
  if (saved_.has_value()) kept.emplace(*saved_);
  Arena& lasting = kept.has_value() ? *kept : *arena_;
  for (const Wave& wave : waves) {
    arena_->rewind(lane_starts[wave.lane]);
    for (int64_t t = wave.first_table; t < wave.end_table; ++t) {
      TableRuns& table = tables[t];
      // Only pairs and packed gradients can be saved. The rest is computed again.
      table.pairs = lasting.take<Pair>(table.num_pairs);
      if (table.pack) table.packed = lasting.take<float>(table.num_grads * table.dim);
      table.grads = arena_->take<const float*>(table.num_slots);
      if (table.scaled) table.scales = arena_->take<float>(table.num_slots);
      if (squares_of(table)) table.squares = arena_->take<float>(table.num_slots);
      if (with_row_stats) table.row_stats = arena_->take<const float*>(table.num_slots);
    }
  }
}

void Runs::fill(const Batch& batch, const Chunk& chunk, const float* grad, const float* row_stats) {
  const TableRuns& table = tables[chunk.table];
  const int64_t first = batch.bags[chunk.first_bag], count = batch.bags[chunk.last_bag] - first;
  const auto deal_to = [&](const auto& slot) {
    const auto deal_ids = batch.wide_ids ? deal<int64_t, decltype(slot)> : deal<int32_t, decltype(slot)>;
    deal_ids(batch.ids(first), count, table, slot, positions_.data() + chunk.first_count);
  };
  if (table.slot_per_id) {
    deal_to([&](int64_t i) { return uint32_t(chunk.first_slot + i); });
  } else {
    thread_local std::vector<uint32_t> slots;
    if (int64_t(slots.size()) < count) slots.resize(count);
    uint32_t slot = chunk.first_slot;
    for (int64_t bag = chunk.first_bag, i = 0; bag < chunk.last_bag; ++bag, ++slot)
      for (; i < batch.bags[bag + 1] - first; ++i) slots[i] = slot;
    deal_to([data = slots.data()](int64_t i) { return data[i]; });
  }
  pack_slots(batch, chunk, grad, row_stats);
}

void Runs::pack_slots(const Batch& batch, const Chunk& chunk, const float* grad,
                      const float* row_stats) const {
  const TableRuns& table = tables[chunk.table];
  const Lookup& lookup = batch.lookups[chunk.lookup];
  int64_t slot = chunk.first_slot;
  for (int64_t bag = chunk.first_bag; bag < chunk.last_bag; ++bag) {
    const int64_t first = batch.bags[bag], last = batch.bags[bag + 1];
    const float scale = lookup.pooling == kMean && last > first ? 1.0f / float(last - first) : 1.0f;
    const float* row = grad + lookup.out_offset + (bag - lookup.first_bag) * lookup.out_stride;
    if (table.packed != nullptr) {
      const char* ahead = reinterpret_cast<const char*>(row + kRowsAhead * lookup.out_stride);
      for (size_t byte = 0; byte < table.dim * sizeof(float); byte += 64) __builtin_prefetch(ahead + byte);
      float* copy = table.packed + (chunk.first_grad + bag - chunk.first_bag) * table.dim;
      // Saved runs include the packed rows.
      if (!is_loaded_) std::memcpy(copy, row, table.dim * sizeof(float));
      row = copy;
    }
    if (!table.slot_per_id) {
      table.grads[slot] = row;
      if (table.squares != nullptr) table.squares[slot] = kernels().square_row(row, table.dim);
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
}

const Pair* Runs::sorted(const Range& range) const {
  thread_local std::vector<Pair> kept;
  std::vector<Pair> fresh;
  const size_t count = range.end - range.begin;
  std::vector<Pair>& spare = count <= kKeptPairs ? kept : fresh;
  if (spare.size() < count) spare.resize(count);
  Pair* pairs = tables[range.table].pairs + range.begin;
  const Pair* found = sort_by_row(pairs, spare.data(), count, uint32_t(range.first_row),
                                  uint32_t(range.end_row - range.first_row));
  // Kept memory stays valid until this thread sorts the next range. Fresh memory ends here.
  if (&spare == &kept || found == pairs) return found;
  std::copy_n(found, count, pairs);
  return pairs;
}

void Runs::sort(const Range& range) const {
  Pair* pairs = tables[range.table].pairs + range.begin;
  if (const Pair* found = sorted(range); found != pairs) std::copy_n(found, range.end - range.begin, pairs);
}

RunArgs Runs::arguments(int64_t index, float* scratch, bool sort_now) const {
  const Range& range = ranges[index];
  const TableRuns& table = tables[range.table];
  int64_t next_end = range.end;
  if (!is_large(range, table) && index + 1 < int64_t(ranges.size())) {
    const Range& next = ranges[index + 1];
    if (next.table == range.table && next.begin == range.end) next_end = next.end;
  }
  return {sort_now ? sorted(range) : table.pairs + range.begin,
          range.end - range.begin,
          table.pairs + range.end,
          next_end - range.end,
          table.grads,
          table.scales,
          table.dim,
          rows_from_memory_,
          prefetch_to_l1(),
          scratch};
}

float* task_scratch(int64_t dim) {
  thread_local std::vector<float> scratch;
  const size_t size = kScratchRows * padded(dim);
  if (scratch.size() < size) scratch.resize(size);
  return scratch.data();
}

}  // namespace meshrec
