// Lookups by raw 64-bit ID in read-only tables; ops/keyed/naive.py is the reference.
//
// [Note: keys in buckets]
//
// The keys (mixed IDs) of a table are in ascending order, and the row for each key is at the same position.
// Keys are stored in buckets that fill a cache line: a row number, then the keys of this row and the next six
// rows. Keys are spread evenly. The key range is divided into `num_home_buckets` equal intervals, and each
// has a bucket, which starts at or before the first key in the interval, and no later than where the previous
// bucket ends. So a search reads a single line for most keys, and further lines while the last key in a line
// is below the key (keyed.inl). All of this is in a mapped file, and is used as it is. Rows added later are
// in a second, small table.
//
// [Note: rows outside the table]
//
// An ID without a row reads an initial row, which is computed here, in separate memory. The kernels read row
// i in a table at base + i * row_bytes. So the separate memory starts a whole number of rows away from the
// table, and the slot for such an ID is counted from the table. The kernels need no second case, and no
// stored row is copied.
//
// [Note: found and read]
//
// The rows for some bags are found just before they are read, by the same thread, so the slots stay in this
// thread's caches. The kernels prefetch rows some IDs ahead, so the search prefetches the first rows.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>

#include "host/memory.h"
#include "index/first_rows.h"
#include "index/hash_index.h"
#include "index/mix.h"
#include "isa/kernels.h"
#include "tbe/batch.h"

namespace meshrec {
namespace {

constexpr int64_t kUnknown = -1, kFirstAdded = -2;  // kFirstAdded - s: added row s
constexpr int kPerTable = 3;                        // tensors per table in `found_by`

struct FirstRows {
  int64_t seed;
  double low, step;
};

// The rows of a table in a lookup.
struct TableRows {
  const char* data;
  int64_t num_rows, row_bytes, dim, bits;
  ScalarType type;
};

class KeyedTable {
 public:
  KeyedTable(const Tensor* tensors, const TableRows& rows, uint64_t seed, int64_t table)
      : rows_(rows), seed_(seed), table_(table) {
    const int64_t num_rows = rows.num_rows;
    for (int i = 0; i < 2; ++i) {
      if (tensors[i].scalar_type() != ScalarType::Long || tensors[i].dim() != 2)
        fail("the keys of table ", table, " must be int64 in two dimensions. Export the model again.");
      kept_.push_back(as_contiguous(tensors[i]));
    }
    kept_.push_back(as_contiguous(tensors[2]));
    buckets_ = kept_[0].const_data_ptr<int64_t>(), num_buckets_ = kept_[0].size(0);
    num_home_buckets_ = std::max<int64_t>(1, (25 * num_rows + 125) / 126);  // as in ops/keyed/naive.py
    if (kept_[0].size(1) != 8 || num_buckets_ < num_home_buckets_)
      fail("table ", table, " has ", num_rows, " rows and ", num_buckets_, " buckets of ", kept_[0].size(1),
           " words, which do not fit together. Export the model again.");
    added_ = kept_[1].const_data_ptr<int64_t>(), num_added_ = kept_[1].size(1);
    added_rows_ = static_cast<const char*>(kept_[2].const_data_ptr());
    num_added_rows_ = kept_[2].size(0);
    const int64_t added_bytes = kept_[2].dim() == 2 ? kept_[2].size(1) * int64_t(kept_[2].element_size()) : 0;
    if (kept_[1].size(0) != 2 || (num_added_rows_ > 0 && added_bytes != rows.row_bytes))
      fail("the rows that were added to table ", table, " are not as wide as the others.");
  }

  // Writes the slot for every ID in positions [begin, end) of the batch. Returns how many slots are negative.
  int64_t find(const Batch& batch, int64_t begin, int64_t end, int64_t* slots) const {
    int64_t num_absent = 0;
    for (int64_t i = begin; i < end; i += kMaxFound)
      num_absent += find_some(batch, i, std::min(end, i + kMaxFound), i == begin, slots + (i - begin));
    // Added rows are few, so a binary search for the IDs that the main table lacks is enough.
    if (num_absent > 0 && num_added_ > 0)
      for (int64_t i = begin; i < end; ++i)
        if (slots[i - begin] < 0) slots[i - begin] = added_slot(int64_t(mix(uint64_t(batch.id(i)), seed_)));
    return num_absent;
  }

  const TableRows& rows() const { return rows_; }

  const char* added_row(int64_t slot) const {
    if (slot < 0 || slot >= num_added_rows_) fail("table ", table_, " has no added row ", slot, ".");
    return added_rows_ + slot * rows_.row_bytes;
  }

 private:
  int64_t find_some(const Batch& batch, int64_t begin, int64_t end, bool is_first, int64_t* slots) const {
    if (rows_.num_rows == 0) {
      std::fill_n(slots, end - begin, kUnknown);
      return end - begin;
    }
    const int64_t num_absent =
        kernels().find_rows({.buckets = buckets_,
                             .num_buckets = num_buckets_,
                             .num_home_buckets = num_home_buckets_,
                             .num_rows = rows_.num_rows,
                             .seed = seed_,
                             .ids = batch.ids(begin),
                             .wide_ids = batch.wide_ids,
                             .count = end - begin,
                             .slots = slots,
                             .rows = {is_first ? rows_.data : nullptr, rows_.row_bytes}});
    if (num_absent < 0)
      fail("the keys of table ", table_, " are damaged. Copy the package again, or export the model again.");
    return num_absent;
  }

  int64_t added_slot(int64_t key) const {
    const int64_t* found = std::lower_bound(added_, added_ + num_added_, key);
    if (found == added_ + num_added_ || *found != key) return kUnknown;
    return kFirstAdded - added_[num_added_ + (found - added_)];
  }

  TableRows rows_;
  std::vector<Tensor> kept_;
  const int64_t *buckets_, *added_;
  const char* added_rows_;
  int64_t num_buckets_, num_home_buckets_, num_added_, num_added_rows_;
  uint64_t seed_;
  int64_t table_;
};

// Returns the initial rows for some IDs, in the row type of a table.
Tensor typed_first_rows(const std::vector<int64_t>& ids, const FirstRows& first, const TableRows& table) {
  Tensor given = empty_buffer({int64_t(ids.size())}, ScalarType::Long);
  std::copy(ids.begin(), ids.end(), given.mutable_data_ptr<int64_t>());
  const Tensor numbers = first_rows(given, first.seed, first.low, first.step, 0, table.dim);
  if (table.bits != 0) return nbit_quantize(numbers, table.bits, std::nullopt);
  return table.type == ScalarType::Float ? numbers : torch::stable::to(numbers, table.type);
}

// Finds rows in an exported table, and computes initial rows for other IDs.
class KeyedFinder : public RowFinder {
 public:
  KeyedFinder(const Batch& batch, const KeyedTable& table, const FirstRows& first)
      : batch_(batch), table_(table), first_(first) {}

  bool find(int64_t begin, int64_t end, int64_t* slots, std::unique_ptr<char[]>& beside) const override {
    if (table_.find(batch_, begin, end, slots) > 0) place_others(begin, end, slots, beside);
    return true;
  }

 private:
  // Replaces negative slots by rows outside the table.
  void place_others(int64_t begin, int64_t end, int64_t* slots, std::unique_ptr<char[]>& beside) const {
    const TableRows& rows = table_.rows();
    const int64_t num_ids = end - begin;
    // others: positions of such IDs; places: indices among these
    std::vector<int64_t> others(num_ids + 1), unknown, places;
    int64_t count = 0;
    for (int64_t i = 0; i < num_ids; ++i) others[count] = i, count += slots[i] < 0;
    for (int64_t k = 0; k < count; ++k)
      if (slots[others[k]] == kUnknown) unknown.push_back(batch_.id(begin + others[k])), places.push_back(k);
    beside.reset(new char[(count + 1) * rows.row_bytes]);
    const int64_t bytes = reinterpret_cast<intptr_t>(beside.get()) - reinterpret_cast<intptr_t>(rows.data);
    // `rest` has the sign of `bytes`: memory may be before or after the table. `skipped` bytes make the
    // distance a whole number of rows; one more row than needed was allocated for them.
    const int64_t rest = bytes % rows.row_bytes;
    const int64_t skipped = rest == 0 ? 0 : rest < 0 ? -rest : rows.row_bytes - rest;
    char* const target = beside.get() + skipped;
    draw(unknown, places, target);
    for (int64_t k = 0; k < count; ++k) {
      int64_t& slot = slots[others[k]];
      if (slot != kUnknown)
        std::memcpy(target + k * rows.row_bytes, table_.added_row(kFirstAdded - slot), rows.row_bytes);
      slot = (bytes + skipped) / rows.row_bytes + k;
    }
  }

  // Writes initial rows to the given positions.
  void draw(const std::vector<int64_t>& ids, const std::vector<int64_t>& places, char* target) const {
    const TableRows& rows = table_.rows();
    const int64_t count = ids.size();
    if (rows.bits == 0 && rows.type == ScalarType::Float) {
      kernels().draw({.ids = ids.data(),
                      .slots = places.data(),
                      .seed = uint64_t(first_.seed),
                      .low = first_.low,
                      .step = first_.step,
                      .width = rows.dim,
                      .rows = reinterpret_cast<float*>(target)},
                     0, count);
    } else if (count > 0) {
      const Tensor drawn = typed_first_rows(ids, first_, rows);
      const auto* source = static_cast<const char*>(drawn.const_data_ptr());
      for (int64_t k = 0; k < count; ++k)
        std::memcpy(target + places[k] * rows.row_bytes, source + k * rows.row_bytes, rows.row_bytes);
    }
  }

  const Batch& batch_;
  const KeyedTable& table_;
  FirstRows first_;
};

// Finds rows in a table with a hash index, as long as each ID has a slot.
class IndexFinder : public RowFinder {
 public:
  IndexFinder(const Batch& batch, const index::Index& index, uint64_t mix_seed, RowsAhead rows,
              std::atomic<int64_t>& num_absent)
      : batch_(batch), index_(index), mix_seed_(mix_seed), rows_(rows), num_absent_(num_absent) {}

  bool find(int64_t begin, int64_t end, int64_t* slots, std::unique_ptr<char[]>&) const override {
    // Once an ID is absent, the result will not be read, so all threads stop early.
    if (num_absent_ > 0) return false;
    const int64_t absent = index_.find_some({.ids = static_cast<const int64_t*>(batch_.ids(begin)),
                                             .count = end - begin,
                                             .mixes = true,
                                             .mix_seed = mix_seed_,
                                             .slots = slots,
                                             .rows = rows_});
    if (absent > 0) num_absent_ += absent;
    return absent == 0;
  }

 private:
  const Batch& batch_;
  const index::Index& index_;
  uint64_t mix_seed_;
  RowsAhead rows_;
  std::atomic<int64_t>& num_absent_;
};

// Makes the lookups in a table use a finder.
void use(Batch& batch, int64_t table, const RowFinder& finder) {
  for (Lookup& lookup : batch.lookups)
    if (lookup.table == table) lookup.finder = &finder;
}

Tensor keyed_forward(std::vector<Tensor> weight_list, std::vector<int64_t> bits, Tensor values,
                     Tensor offsets, std::optional<Tensor> sample_weights, std::optional<Tensor> segments,
                     int64_t num_keys, std::vector<int64_t> keys, std::vector<int64_t> tables,
                     std::vector<int64_t> pooling, bool flat, std::vector<int64_t> dims, int64_t out_size,
                     ScalarType out_dtype, bool check_ids, Tensor names, std::vector<int64_t> keyed,
                     std::vector<Tensor> found_by, std::vector<int64_t> seeds, std::vector<double> firsts) {
  if (found_by.size() != kPerTable * keyed.size() || seeds.size() != 2 * keyed.size() ||
      firsts.size() != 2 * keyed.size())
    fail("there must be three tensors, two seeds and two numbers for each of the ", keyed.size(),
         " tables with keys. Export the model again.");
  Weights weights = mixed_weights(weight_list, bits, tables, dims);
  Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  // Deques, because finders keep references to the tables, and lookups to the finders: elements must not
  // move.
  std::deque<KeyedTable> own_tables;
  std::deque<KeyedFinder> finders;
  alignas(64) static char nowhere;  // rows outside an empty table are counted from this address
  for (size_t k = 0; k < keyed.size(); ++k) {
    const int64_t t = keyed[k];
    if (t < 0 || t >= int64_t(bits.size())) fail("table ", t, " of ", bits.size(), " has keys.");
    if (weights.num_rows[t] == 0) weights.data[t] = &nowhere;
    const TableRows rows{.data = static_cast<const char*>(weights.data[t]),
                         .num_rows = weights.num_rows[t],
                         .row_bytes = weights.row_bytes[t],
                         .dim = weights.dims[t],
                         .bits = bits[t],
                         .type = weights.tensors[t].scalar_type()};
    own_tables.emplace_back(&found_by[kPerTable * k], rows, uint64_t(seeds[2 * k]), t);
    finders.emplace_back(batch, own_tables.back(),
                         FirstRows{seeds[2 * k + 1], firsts[2 * k], firsts[2 * k + 1]});
    use(batch, t, finders.back());
  }
  return look_up_all(batch, weights, flat, out_size, out_dtype, check_ids, names);
}

std::tuple<Tensor, Tensor> hashed_forward(std::vector<Tensor> weight_list, std::vector<int64_t> bits,
                                          Tensor values, Tensor offsets, std::optional<Tensor> sample_weights,
                                          std::optional<Tensor> segments, int64_t num_keys,
                                          std::vector<int64_t> keys, std::vector<int64_t> tables,
                                          std::vector<int64_t> pooling, bool flat, std::vector<int64_t> dims,
                                          int64_t out_size, ScalarType out_dtype, bool check_ids,
                                          Tensor names, std::vector<int64_t> hashed,
                                          std::vector<Tensor> memory, std::vector<int64_t> seeds) {
  if (memory.size() != 4 * hashed.size() || seeds.size() != 2 * hashed.size())
    fail("there must be four tensors and two seeds for each of the ", hashed.size(), " hashed tables.");
  if (values.scalar_type() != ScalarType::Long) fail("the IDs of hashed tables must be int64.");
  const Weights weights = mixed_weights(weight_list, bits, tables, dims);
  Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  std::atomic<int64_t> num_absent{0};
  // As in keyed_forward: elements must not move.
  std::deque<index::Index> indexes;
  std::deque<IndexFinder> finders;
  for (size_t k = 0; k < hashed.size(); ++k) {
    const int64_t t = hashed[k];
    if (t < 0 || t >= int64_t(bits.size())) fail("table ", t, " of ", bits.size(), " is hashed.");
    indexes.push_back(index::index_in(&memory[4 * k], seeds[2 * k]));
    const RowsAhead rows{static_cast<const char*>(weights.data[t]), weights.row_bytes[t]};
    finders.emplace_back(batch, indexes.back(), uint64_t(seeds[2 * k + 1]), rows, num_absent);
    use(batch, t, finders.back());
  }
  Tensor found = look_up_all(batch, weights, flat, out_size, out_dtype, check_ids, names);
  Tensor absent = empty_buffer({1}, ScalarType::Long);
  *absent.mutable_data_ptr<int64_t>() = num_absent;
  return {found, absent};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("keyed_forward", TORCH_BOX(&keyed_forward));
  m.impl("hashed_forward", TORCH_BOX(&hashed_forward));
}

}  // namespace meshrec
