// Lookups of raw 64-bit IDs in tables that only read: ops/keyed/naive.py is the reference.
//
// [Note: keys in buckets]
//
// A table has its keys (mixed IDs) in ascending order, and the row of each key at the same position. They lie
// in buckets of a cache line: the number of a row, and the keys of this row and the next six. Keys are spread
// evenly, and there is a bucket for each of `num_homes` equal intervals of keys, which begins at the first
// key of the interval, or before it: no bucket begins later than where the one before ends. So a search reads
// one line for most keys, and further ones while the last key of a line is below the key (keyed.inl). All of
// it is a mapped file, and is read as it is. Rows that came later lie in a second, small table.
//
// [Note: rows beside the table]
//
// An ID without a row reads its first row, which is computed here, into memory of its own. The kernels read
// row i of a table at base + i * row_bytes. So that memory begins at a distance from the table that is a
// whole number of rows, and the slot of such an ID is that number. The kernels need no second case, and no
// known row is copied.
#include <algorithm>
#include <cstring>

#include "host/memory.h"
#include "index/first_rows.h"
#include "index/mix.h"
#include "isa/kernels.h"
#include "tbe/batch.h"

namespace meshrec {
namespace {

constexpr int64_t kGrainIds = 1 << 10;
constexpr int64_t kUnknown = -1, kFirstAdded = -2;  // kFirstAdded - s: row s of the added ones
constexpr int kPerTable = 3;                        // tensors in `found_by`

class KeyedTable {
 public:
  KeyedTable(const Tensor* tensors, int64_t num_rows, int64_t row_bytes, uint64_t seed, int64_t table)
      : num_rows_(num_rows), seed_(seed), table_(table) {
    for (int i = 0; i < 2; ++i) {
      if (tensors[i].scalar_type() != ScalarType::Long || tensors[i].dim() != 2)
        fail("the keys of table ", table, " must be int64 in two dimensions. Export the model again.");
      kept_.push_back(as_contiguous(tensors[i]));
    }
    kept_.push_back(as_contiguous(tensors[2]));
    buckets_ = kept_[0].const_data_ptr<int64_t>(), num_buckets_ = kept_[0].size(0);
    num_homes_ = std::max<int64_t>(1, (25 * num_rows + 125) / 126);  // as in ops/keyed/naive.py
    if (kept_[0].size(1) != 8 || num_buckets_ < num_homes_)
      fail("table ", table, " has ", num_rows, " rows and ", num_buckets_, " buckets of ", kept_[0].size(1),
           " words, which do not fit together. Export the model again.");
    added_ = kept_[1].const_data_ptr<int64_t>(), num_added_ = kept_[1].size(1);
    added_rows_ = static_cast<const char*>(kept_[2].const_data_ptr());
    num_added_rows_ = kept_[2].size(0);
    const int64_t added_bytes = kept_[2].dim() == 2 ? kept_[2].size(1) * int64_t(kept_[2].element_size()) : 0;
    if (kept_[1].size(0) != 2 || (num_added_rows_ > 0 && added_bytes != row_bytes))
      fail("the rows that were added to table ", table, " are not as wide as the others.");
  }

  // Writes the slot of each ID in [begin, end) of the batch. Returns how many slots are negative.
  int64_t find(const Batch& batch, int64_t begin, int64_t end, int64_t* slots) const {
    int64_t num_absent = 0;
    for (int64_t i = begin; i < end; i += kMostFound)
      num_absent += find_some(batch, i, std::min(end, i + kMostFound), slots);
    if (num_absent > 0 && num_added_ > 0)
      for (int64_t i = begin; i < end; ++i)
        if (slots[i] < 0) slots[i] = added_slot(int64_t(mix(uint64_t(batch.id(i)), seed_)));
    return num_absent;
  }

  const char* added_row(int64_t slot, int64_t row_bytes) const {
    if (slot < 0 || slot >= num_added_rows_) fail("table ", table_, " has no added row ", slot, ".");
    return added_rows_ + slot * row_bytes;
  }

 private:
  int64_t find_some(const Batch& batch, int64_t begin, int64_t end, int64_t* slots) const {
    if (num_rows_ == 0) {
      std::fill(slots + begin, slots + end, kUnknown);
      return end - begin;
    }
    const int64_t num_absent = kernels().find_rows({.buckets = buckets_,
                                                    .num_buckets = num_buckets_,
                                                    .num_homes = num_homes_,
                                                    .num_rows = num_rows_,
                                                    .seed = seed_,
                                                    .ids = batch.ids(begin),
                                                    .wide_ids = batch.wide_ids,
                                                    .count = end - begin,
                                                    .slots = slots + begin});
    if (num_absent < 0)
      fail("the keys of table ", table_, " are damaged. Copy the package again, or export the model again.");
    return num_absent;
  }

  int64_t added_slot(int64_t key) const {
    const int64_t* found = std::lower_bound(added_, added_ + num_added_, key);
    if (found == added_ + num_added_ || *found != key) return kUnknown;
    return kFirstAdded - added_[num_added_ + (found - added_)];
  }

  std::vector<Tensor> kept_;
  const int64_t *buckets_, *added_;
  const char* added_rows_;
  int64_t num_rows_, num_buckets_, num_homes_, num_added_, num_added_rows_;
  uint64_t seed_;
  int64_t table_;
};

struct FirstRows {
  int64_t seed;
  double low, step;
};

// The first rows of IDs in the type of a table.
Tensor typed_first_rows(const std::vector<int64_t>& ids, const FirstRows& first, int64_t dim, int64_t bits,
                        ScalarType type) {
  Tensor given = empty_buffer({int64_t(ids.size())}, ScalarType::Long);
  std::copy(ids.begin(), ids.end(), given.mutable_data_ptr<int64_t>());
  const Tensor numbers = first_rows(given, first.seed, first.low, first.step, 0, dim);
  if (bits != 0) return nbit_quantize(numbers, bits, std::nullopt);
  return type == ScalarType::Float ? numbers : torch::stable::to(numbers, type);
}

// Gives the negative slots of a table's lookups rows beside the table. Returns the memory of these rows.
Tensor place_others(const Batch& batch, const std::vector<const Lookup*>& lookups, int64_t* const* slots,
                    const KeyedTable& table, const FirstRows& first, int64_t bits, int64_t number,
                    Weights& weights) {
  std::vector<int64_t*> others;
  std::vector<int64_t> unknown, places;  // places: among the others
  for (size_t l = 0; l < lookups.size(); ++l) {
    for (int64_t i = lookups[l]->first_id; i < lookups[l]->first_id + lookups[l]->num_ids; ++i) {
      int64_t* slot = slots[l] + i;
      if (*slot >= 0) continue;
      if (*slot == kUnknown) unknown.push_back(batch.id(i)), places.push_back(int64_t(others.size()));
      others.push_back(slot);
    }
  }
  const int64_t row_bytes = weights.row_bytes[number], dim = weights.dims[number];
  const int64_t count = others.size();
  Tensor kept = empty_buffer({(count + 1) * row_bytes}, ScalarType::Byte);
  char* target = static_cast<char*>(kept.mutable_data_ptr());
  int64_t distance = 0;
  if (weights.num_rows[number] == 0) {
    weights.data[number] = target;
  } else {
    const int64_t bytes =
        reinterpret_cast<intptr_t>(target) - reinterpret_cast<intptr_t>(weights.data[number]);
    const int64_t rest = bytes % row_bytes;
    const int64_t skipped = rest == 0 ? 0 : rest < 0 ? -rest : row_bytes - rest;
    target += skipped;
    distance = (bytes + skipped) / row_bytes;
  }
  const int64_t num_unknown = unknown.size();
  if (bits == 0 && weights.tensors[number].scalar_type() == ScalarType::Float) {
    draw_rows({.ids = unknown.data(),
               .slots = places.data(),
               .seed = uint64_t(first.seed),
               .low = first.low,
               .step = first.step,
               .width = dim,
               .rows = reinterpret_cast<float*>(target)},
              num_unknown);
  } else if (num_unknown > 0) {
    const Tensor rows = typed_first_rows(unknown, first, dim, bits, weights.tensors[number].scalar_type());
    const auto* source = static_cast<const char*>(rows.const_data_ptr());
    for (int64_t k = 0; k < num_unknown; ++k)
      std::memcpy(target + places[k] * row_bytes, source + k * row_bytes, row_bytes);
  }
  for (int64_t i = 0; i < count; ++i) {
    if (*others[i] != kUnknown)
      std::memcpy(target + i * row_bytes, table.added_row(kFirstAdded - *others[i], row_bytes), row_bytes);
    *others[i] = distance + i;
  }
  return kept;
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
  std::vector<std::vector<int64_t>> slots(batch.lookups.size());
  std::vector<Tensor> kept;
  for (size_t k = 0; k < keyed.size(); ++k) {
    const int64_t t = keyed[k];
    if (t < 0 || t >= int64_t(bits.size())) fail("table ", t, " of ", bits.size(), " has keys.");
    const KeyedTable table(&found_by[kPerTable * k], weights.num_rows[t], weights.row_bytes[t],
                           uint64_t(seeds[2 * k]), t);
    std::vector<const Lookup*> own;
    std::vector<int64_t*> own_slots;
    std::atomic<int64_t> num_others{0};
    for (size_t l = 0; l < batch.lookups.size(); ++l) {
      Lookup& lookup = batch.lookups[l];
      if (lookup.table != t) continue;
      slots[l].resize(lookup.num_ids);
      int64_t* by_position = slots[l].data() - lookup.first_id;
      parallel_for(lookup.num_ids, kGrainIds, [&](int64_t begin, int64_t end) {
        num_others += table.find(batch, lookup.first_id + begin, lookup.first_id + end, by_position);
      });
      lookup.slots = by_position;
      own.push_back(&lookup);
      own_slots.push_back(by_position);
    }
    if (num_others == 0) continue;
    const FirstRows first{seeds[2 * k + 1], firsts[2 * k], firsts[2 * k + 1]};
    kept.push_back(place_others(batch, own, own_slots.data(), table, first, bits[t], t, weights));
  }
  return look_up_all(batch, weights, flat, out_size, out_dtype, check_ids, names);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("keyed_forward", TORCH_BOX(&keyed_forward)); }

}  // namespace meshrec
