// Table-batched lookups: all features in all tables in a single parallel loop.
#include <algorithm>
#include <cmath>

#include "host/mapping.h"
#include "host/memory.h"
#include "tbe/batch.h"

namespace meshrec {

namespace {

bool ids_fit(const Batch& batch, int64_t first, int64_t count, int64_t num_rows) {
  if (batch.wide_ids)
    return kernels().all_below64(static_cast<const int64_t*>(batch.ids(first)), count, num_rows);
  return kernels().all_below32(static_cast<const int32_t*>(batch.ids(first)), count, num_rows);
}

void check_sample_weights(const Batch& batch, const Lookup& lookup, const Tensor& names) {
  const auto [table, feature] = names_of(lookup, &names);
  for (int64_t bag = lookup.first_bag; bag < lookup.first_bag + lookup.num_bags; ++bag)
    for (int64_t i = batch.bags[bag]; i < batch.bags[bag + 1]; ++i)
      if (std::isnan(batch.sample_weights[i]))
        fail("table '", table, "': the weight of id ", batch.id(i), " of feature '", feature, "' (sample ",
             bag - lookup.first_bag, ") is NaN. Weights must be numbers; find where this one comes from.");
}

// `slots`: rows to read instead of the piece's IDs; null: the IDs are rows.
void look_up(const Batch& batch, const Weights& weights, const Piece& piece, const int64_t* slots,
             float* out) {
  const Lookup& lookup = batch.lookups[piece.lookup];
  const void* weight = weights.data[lookup.table];
  const int64_t row_bytes = weights.row_bytes[lookup.table];
  const int type = weights.types[lookup.table];
  const int64_t row = piece.first_bag - lookup.first_bag;
  const int64_t first = batch.bags[piece.first_bag], last = batch.bags[piece.first_bag + piece.num_bags];
  const bool is_wide = slots != nullptr || batch.wide_ids;
  if (lookup.pooling == kNone) {
    float* target = out + lookup.out_offset + (first - lookup.first_id) * lookup.dim;
    const void* ids = slots != nullptr ? slots : batch.ids(first);
    kernels().gather[type][is_wide]({weight, row_bytes, lookup.dim, ids, last - first, target});
    return;
  }
  // Kernels index IDs by batch position, and `slots` starts at the piece's first position.
  const void* by_position = slots != nullptr ? slots - first : batch.ids(0);
  // With `slots`, rows are known, and can be prefetched, only up to the end of the piece.
  kernels().pool[type][is_wide](
      {weight, row_bytes, lookup.dim, by_position, batch.bags + piece.first_bag, batch.sample_weights,
       piece.num_bags, slots != nullptr ? last : lookup.first_id + lookup.num_ids, lookup.pooling == kMean,
       out + lookup.out_offset + row * lookup.out_stride, lookup.out_stride,
       outgrows_caches(batch.out_size * int64_t(sizeof(float))), prefetch_to_l1()});
}

Tensor tbe_forward(std::vector<Tensor> weight_list, Tensor values, Tensor offsets,
                   std::optional<Tensor> sample_weights, std::optional<Tensor> segments, int64_t num_keys,
                   std::vector<int64_t> keys, std::vector<int64_t> tables, std::vector<int64_t> pooling,
                   bool flat, int64_t out_size, ScalarType out_dtype, bool check_ids, Tensor names) {
  const Weights weights = make_weights(std::move(weight_list), false);
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat},
                 feature_dims(tables, weights.dims));
  return look_up_all(batch, weights, flat, out_size, out_dtype, check_ids, names);
}

Tensor tbe_sample_weight_grad(Tensor grad, std::vector<Tensor> weight_list, Tensor values, Tensor offsets,
                              std::optional<Tensor> segments, int64_t num_keys, std::vector<int64_t> keys,
                              std::vector<int64_t> tables, std::vector<int64_t> pooling, bool flat,
                              std::vector<int64_t> dims) {
  const Weights weights = make_weights(std::move(weight_list), false);
  const Batch batch =
      make_batch(values, offsets, std::nullopt, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  if (std::find(pooling.begin(), pooling.end(), kNone) != pooling.end())
    fail("per-sample weights belong to pooled lookups; a sequence lookup takes none.");
  const Tensor g = checked_grad(grad, batch);
  const float* grad_data = static_cast<const float*>(g.const_data_ptr());
  Tensor result = torch::stable::new_zeros(g, {batch.num_ids});
  float* out = static_cast<float*>(result.mutable_data_ptr());
  // If several features read a key, the result is the sum of their gradients: process the features
  // sequentially, and the bags of a feature in parallel.
  const std::vector<Piece> pieces = cut(batch);
  const int64_t none = batch.lookups.size();
  std::atomic<int64_t> bad_id{none};
  std::vector<bool> written(num_keys, false);
  for (size_t feature = 0; feature < keys.size(); ++feature) {
    const bool again = written[keys[feature]];
    std::vector<Piece> own;
    for (const Piece& piece : pieces)
      if (batch.lookups[piece.lookup].feature == int64_t(feature) && batch.lookups[piece.lookup].table >= 0)
        own.push_back(piece);
    if (!own.empty()) written[keys[feature]] = true;
    parallel_tasks(own.size(), [&](int64_t task) {
      const Piece& piece = own[task];
      const Lookup& lookup = batch.lookups[piece.lookup];
      const int64_t first = batch.bags[piece.first_bag], last = batch.bags[piece.first_bag + piece.num_bags];
      if (!ids_fit(batch, first, last - first, weights.num_rows[lookup.table]))
        return atomic_min(bad_id, piece.lookup);
      // The kernel overwrites `out`, so the sum from earlier features is saved and added back.
      std::vector<float> before;
      if (again) before.assign(out + first, out + last);
      const int64_t row = piece.first_bag - lookup.first_bag;
      kernels().dot[weights.types[lookup.table]][batch.wide_ids](
          {weights.data[lookup.table], lookup.dim, batch.ids(0), batch.bags + piece.first_bag, piece.num_bags,
           lookup.pooling == kMean, grad_data + lookup.out_offset + row * lookup.out_stride,
           lookup.out_stride, out});
      for (size_t i = 0; i < before.size(); ++i) out[first + i] += before[i];
    });
  }
  if (bad_id < none) fail_for_id(batch, bad_id, weights.num_rows[batch.lookups[bad_id].table], nullptr);
  return result;
}

std::tuple<Tensor, Tensor> clamp_ids(Tensor values, Tensor offsets, std::optional<Tensor> segments,
                                     int64_t num_keys, std::vector<int64_t> keys, std::vector<int64_t> tables,
                                     std::vector<int64_t> num_rows) {
  // Pooling and widths only complete the arguments; they have no effect here.
  const std::vector<int64_t> pooling(keys.size(), kSum), dims(keys.size(), 1);
  const Batch batch =
      make_batch(values, offsets, std::nullopt, {segments, num_keys, keys, tables, pooling, true}, dims);
  Tensor clean = torch::stable::clone(batch.values);
  Tensor counts = torch::stable::new_zeros(batch.offsets, {int64_t(keys.size())});
  auto* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  for (const Lookup& lookup : batch.lookups) {
    if (lookup.table < 0) continue;
    // Features may share a key: an ID is counted for each feature, and set to 0 if it is outside one of the
    // tables.
    const int64_t rows = num_rows.at(lookup.table);
    if (ids_fit(batch, lookup.first_id, lookup.num_ids, rows)) continue;
    for (int64_t i = lookup.first_id; i < lookup.first_id + lookup.num_ids; ++i) {
      const int64_t id = batch.id(i);
      if (id >= 0 && id < rows) continue;
      ++count[lookup.feature];
      if (batch.wide_ids) {
        static_cast<int64_t*>(clean.mutable_data_ptr())[i] = 0;
      } else {
        static_cast<int32_t*>(clean.mutable_data_ptr())[i] = 0;
      }
    }
  }
  return {clean, counts};
}

// Requests all rows to read from a disk, before the first is read.
void request_missing(const Batch& batch, const Weights& weights) {
  for (const Lookup& lookup : batch.lookups) {
    if (lookup.table < 0 || lookup.finder != nullptr || !is_partly_in_memory(weights.data[lookup.table]))
      continue;
    const auto* const table = static_cast<const char*>(weights.data[lookup.table]);
    const int64_t row_bytes = weights.row_bytes[lookup.table];
    std::vector<const char*> rows;
    for (int64_t i = lookup.first_id; i < lookup.first_id + lookup.num_ids; ++i) {
      const int64_t id = batch.id(i);
      // The check in the lookup reports IDs outside the table.
      if (id >= 0 && id < weights.num_rows[lookup.table]) rows.push_back(table + id * row_bytes);
    }
    request_rows(rows, row_bytes);
  }
}

}  // namespace

Tensor look_up_all(const Batch& batch, const Weights& weights, bool flat, int64_t out_size,
                   ScalarType out_dtype, bool check_ids, const Tensor& names) {
  const int64_t expected = flat ? batch.out_size : batch.out_rows;
  if (out_size != expected) fail("out_size is ", out_size, " but the lookups give ", expected, ".");
  const std::vector<int64_t> size =
      flat ? std::vector<int64_t>{batch.out_size} : std::vector<int64_t>{batch.out_rows, batch.out_columns};
  Tensor result = empty_buffer(size, ScalarType::Float);
  float* out = static_cast<float*>(result.mutable_data_ptr());

  request_missing(batch, weights);
  const std::vector<Piece> pieces = cut(batch);
  const int64_t none = batch.lookups.size();
  // The smallest lookup with an error is reported, in whatever order the tasks run.
  std::atomic<int64_t> bad_id{none}, bad_weight{none};
  parallel_tasks(pieces.size(), [&](int64_t task) {
    const Piece& piece = pieces[task];
    const Lookup& lookup = batch.lookups[piece.lookup];
    const int64_t first = batch.bags[piece.first_bag], last = batch.bags[piece.first_bag + piece.num_bags];
    if (check_ids) {
      if (lookup.finder == nullptr && !ids_fit(batch, first, last - first, weights.num_rows[lookup.table]))
        return atomic_min(bad_id, piece.lookup);
      if (batch.sample_weights != nullptr) {
        bool nan = false;
        // Only NaN differs from itself.
        for (int64_t i = first; i < last; ++i) nan |= batch.sample_weights[i] != batch.sample_weights[i];
        if (nan) atomic_min(bad_weight, piece.lookup);
      }
    }
    if (lookup.finder == nullptr) return look_up(batch, weights, piece, nullptr, out);
    const std::unique_ptr<int64_t[]> slots(new int64_t[last - first + 1]);
    std::unique_ptr<char[]> beside;
    if (lookup.finder->find(first, last, slots.get(), beside))
      look_up(batch, weights, piece, slots.get(), out);
  });
  if (bad_id < none) fail_for_id(batch, bad_id, weights.num_rows[batch.lookups[bad_id].table], &names);
  if (bad_weight < none) check_sample_weights(batch, batch.lookups[bad_weight], names);
  return out_dtype == ScalarType::Float ? result : torch::stable::to(result, out_dtype);
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("tbe_forward", TORCH_BOX(&tbe_forward));
  m.impl("tbe_sample_weight_grad", TORCH_BOX(&tbe_sample_weight_grad));
  m.impl("clamp_ids", TORCH_BOX(&clamp_ids));
}

}  // namespace meshrec
