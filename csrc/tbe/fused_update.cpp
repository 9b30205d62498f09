// The backward pass: sums the gradients for every touched row, and immediately applies the optimizer step to
// the row.
#include <algorithm>
#include <cmath>

#include "tbe/runs.h"

namespace meshrec {

namespace {

enum HyperSlot {
#define HYPER(type, name) kAt_##name,
#include "formulas.inc"
#undef HYPER
  kHyperSize
};

Hyper make_hyper(const Tensor& tensor) {
  if (tensor.scalar_type() != ScalarType::Double || tensor.numel() != kHyperSize || !tensor.is_cpu())
    fail("hyper must be a float64 CPU tensor with ", int(kHyperSize),
         " entries. A spec's hyper() makes one.");
  const Tensor held = as_contiguous(tensor);
  const auto* h = static_cast<const double*>(held.const_data_ptr());
  Hyper hyper;
#define HYPER(type, name) hyper.name = type(h[kAt_##name]);
#include "formulas.inc"
#undef HYPER
  // In double, because 1 - beta would lose digits in fp32 for a beta near 1.
  hyper.fresh1 = float(1 - h[kAt_beta1]);
  hyper.fresh2 = float(1 - h[kAt_beta2]);
  hyper.correction1 = float(1 - std::pow(h[kAt_beta1], h[kAt_step]));
  hyper.correction2 = float(1 - std::pow(h[kAt_beta2], h[kAt_step]));
  return hyper;
}

const StateShape& state_shape(int64_t optimizer) {
  if (optimizer < 0 || optimizer >= kNumOptimizers)
    fail("optimizer ", optimizer, " is unknown; codes 0 to ", int(kNumOptimizers) - 1, " exist.");
  return kStateShapes[optimizer];
}

std::vector<float*> state_data(const std::vector<Tensor>& state, const StateShape& shape,
                               const Weights& weights) {
  const size_t num_tables = weights.tensors.size();
  if (state.size() != size_t(shape.num_slots) * num_tables)
    fail("got ", state.size(), " state tensors for ", num_tables, " tables of an optimizer with ",
         shape.num_slots, " state slots.");
  std::vector<float*> data;
  for (size_t k = 0; k < state.size(); ++k) {
    const size_t table = k % num_tables;
    const int64_t width = shape.per_row[k / num_tables] ? 1 : weights.dims[table];
    if (state[k].scalar_type() != ScalarType::Float || !state[k].is_contiguous() ||
        state[k].numel() != weights.num_rows[table] * width)
      fail("state tensor ", k, " must be contiguous float32 with ", weights.num_rows[table] * width,
           " elements.");
    data.push_back(static_cast<float*>(state[k].mutable_data_ptr()));
  }
  return data;
}

void tbe_update(Tensor grad, Tensor values, Tensor offsets, std::optional<Tensor> sample_weights,
                std::optional<Tensor> segments, int64_t num_keys, std::vector<int64_t> keys,
                std::vector<int64_t> tables, std::vector<int64_t> pooling, bool flat,
                std::vector<int64_t> dims, std::vector<Tensor> weight_list, std::vector<Tensor> state,
                int64_t optimizer, Tensor hyper_tensor, std::optional<Tensor> row_stats,
                std::vector<int64_t> origins, std::optional<Tensor> sorted_runs,
                std::optional<Tensor> mean_squares, std::optional<std::vector<Tensor>> row_keys) {
  const Weights weights = make_weights(std::move(weight_list), true);
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  const StateShape& shape = state_shape(optimizer);
  const std::vector<float*> states = state_data(state, shape, weights);
  const Hyper hyper = make_hyper(hyper_tensor);
  const Tensor g = checked_grad(grad, batch);
  if (!origins.empty() && origins.size() != 2 * weights.tensors.size())
    fail("origins must hold a row and a column for each of the ", weights.tensors.size(),
         " tables, or nothing.");
  const auto origin = [&](int64_t table, int64_t axis) {
    return origins.empty() ? 0 : origins[2 * table + axis];
  };
  std::optional<Tensor> stats;
  if (row_stats.has_value()) {
    stats = as_contiguous(*row_stats);
    if (stats->scalar_type() != ScalarType::Float || stats->numel() != 3 * batch.num_ids)
      fail("row_stats must be float32 [num_ids, 3].");
    for (const Lookup& lookup : batch.lookups)
      if (lookup.table >= 0 && lookup.pooling != kNone)
        fail("row_stats belong to lookups that are not pooled.");
  }
  const auto* stats_data = stats.has_value() ? static_cast<const float*>(stats->const_data_ptr()) : nullptr;
  const auto* grads = static_cast<const float*>(g.const_data_ptr());
  const bool sorted = sorted_runs.has_value();
  Runs runs = sorted ? Runs(batch, grads, weights.num_rows, *sorted_runs)
                     : Runs(batch, grads, weights.num_rows, stats_data, Runs::kInWaves);
  std::optional<Tensor> mean;
  if (mean_squares.has_value()) {
    mean = as_contiguous(*mean_squares);
    if (!sorted || mean->scalar_type() != ScalarType::Float || mean->numel() != runs.num_runs)
      fail("mean_squares must be float32 with one number for each of the sorted runs, and come with them.");
  }
  if (row_keys.has_value() && row_keys->size() != weights.tensors.size())
    fail("row_keys must hold a tensor for each of the ", weights.tensors.size(), " tables.");
  const auto keys_of = [&](int64_t table) -> const int64_t* {
    if (!row_keys.has_value() || (*row_keys)[table].numel() == 0) return nullptr;
    const Tensor& found = (*row_keys)[table];
    if (found.scalar_type() != ScalarType::Long || !found.is_contiguous() ||
        found.numel() != weights.num_rows[table])
      fail("row_keys must be contiguous int64, one for each row of the weight.");
    return static_cast<const int64_t*>(found.const_data_ptr());
  };
  const auto* means = mean.has_value() ? static_cast<const float*>(mean->const_data_ptr()) : nullptr;
  const int64_t num_tables = weights.tensors.size();
  // State tensors are ordered by slot, then by table.
  const auto slot_data = [&](int64_t slot, int64_t table) {
    return slot < shape.num_slots ? states[slot * num_tables + table] : nullptr;
  };
  const auto update = [&](int64_t index) {
    const Range& range = runs.ranges[index];
    const TableRuns& table = runs.tables[range.table];
    // Sorted runs come from tbe_row_squares, which has sorted the ranges in place.
    UpdateArgs args{.runs = runs.arguments(index, task_scratch(table.dim), !sorted),
                    .weight = weights.data[table.table],
                    .state0 = slot_data(0, table.table),
                    .state1 = slot_data(1, table.table),
                    .row_stats = table.row_stats,
                    .mean_squares = means == nullptr ? nullptr : means + range.first_run,
                    .hyper = hyper,
                    .row_keys = keys_of(table.table),
                    .first_row = origin(table.table, 0),
                    .first_column = origin(table.table, 1)};
    // With column splits, the caller gives the width of the whole row, over which row-wise optimizers
    // average.
    if (args.hyper.row_dim == 0) args.hyper.row_dim = double(table.dim);
    kernels().update[optimizer][weights.types[table.table]](args);
  };
  if (sorted) {
    runs.for_ranges(runs.waves.front(), update);
  } else {
    runs.for_ranges_in_waves(batch, grads, stats_data, update);
  }
}

int64_t count_runs(const Pair* pairs, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += i == begin || pairs[i].row != pairs[i - 1].row;
  return count;
}

std::vector<Tensor> tbe_sparse_grad(Tensor grad, Tensor values, Tensor offsets,
                                    std::optional<Tensor> sample_weights, std::optional<Tensor> segments,
                                    int64_t num_keys, std::vector<int64_t> keys, std::vector<int64_t> tables,
                                    std::vector<int64_t> pooling, bool flat, std::vector<int64_t> dims,
                                    std::vector<int64_t> num_rows) {
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  const Tensor g = checked_grad(grad, batch);
  Runs runs(batch, static_cast<const float*>(g.const_data_ptr()), num_rows, nullptr);
  std::vector<int64_t> counts(runs.ranges.size());
  // Counted first, so that every range knows where its rows start in the result.
  runs.for_ranges(runs.waves.front(), [&](int64_t task) {
    const Range& range = runs.ranges[task];
    runs.sort(range);
    counts[task] = count_runs(runs.tables[range.table].pairs, range.begin, range.end);
  });
  const std::vector<int64_t> starts = runs.number_runs(counts, num_rows.size());
  std::vector<int64_t> table_dims(num_rows.size(), 0);
  for (const TableRuns& table : runs.tables) table_dims[table.table] = table.dim;
  std::vector<Tensor> result;
  for (size_t t = 0; t < num_rows.size(); ++t) {
    const int64_t rows = starts[t + 1] - starts[t];
    result.push_back(torch::stable::new_empty(g, {rows}, ScalarType::Long));
    result.push_back(torch::stable::new_empty(g, {rows, table_dims[t]}));
  }
  runs.for_ranges(runs.waves.front(), [&](int64_t task) {
    const Range& range = runs.ranges[task];
    const TableRuns& table = runs.tables[range.table];
    const int64_t start = range.first_run - starts[table.table];
    kernels().sum({runs.arguments(task, task_scratch(table.dim)),
                   static_cast<int64_t*>(result[2 * table.table].mutable_data_ptr()) + start,
                   static_cast<float*>(result[2 * table.table + 1].mutable_data_ptr()) + start * table.dim,
                   false});
  });
  return result;
}

std::tuple<Tensor, Tensor, Tensor> tbe_row_squares(Tensor grad, Tensor values, Tensor offsets,
                                                   std::optional<Tensor> sample_weights,
                                                   std::optional<Tensor> segments, int64_t num_keys,
                                                   std::vector<int64_t> keys, std::vector<int64_t> tables,
                                                   std::vector<int64_t> pooling, bool flat,
                                                   std::vector<int64_t> dims, std::vector<int64_t> num_rows) {
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  const Tensor g = checked_grad(grad, batch);
  Runs runs(batch, static_cast<const float*>(g.const_data_ptr()), num_rows, nullptr, Runs::kSaved);
  // The position of a range's runs is known only after all ranges are counted. Until then, the squares are
  // stored at the positions of the range's IDs.
  const std::unique_ptr<float[]> loose(new float[runs.num_pairs]);
  std::vector<int64_t> run_counts(runs.ranges.size());
  runs.for_ranges(runs.waves.front(), [&](int64_t task) {
    const Range& range = runs.ranges[task];
    const TableRuns& table = runs.tables[range.table];
    runs.sort(range);
    run_counts[task] = kernels().square({runs.arguments(task, task_scratch(table.dim)), table.squares,
                                         loose.get() + table.first_pair + range.begin});
  });
  const std::vector<int64_t> starts = runs.number_runs(run_counts, num_rows.size());
  Tensor squares = torch::stable::new_empty(g, {runs.num_runs});
  Tensor counts = torch::stable::new_empty(g, {int64_t(num_rows.size())}, ScalarType::Long);
  auto* count = static_cast<int64_t*>(counts.mutable_data_ptr());
  for (size_t t = 0; t < num_rows.size(); ++t) count[t] = starts[t + 1] - starts[t];
  auto* square = static_cast<float*>(squares.mutable_data_ptr());
  parallel_tasks(runs.ranges.size(), [&](int64_t task) {
    const Range& range = runs.ranges[task];
    std::copy_n(loose.get() + runs.tables[range.table].first_pair + range.begin, run_counts[task],
                square + range.first_run);
  });
  return {squares, counts, runs.save()};
}

std::vector<Tensor> tbe_dense_grad(Tensor grad, std::vector<Tensor> weight_list, Tensor values,
                                   Tensor offsets, std::optional<Tensor> sample_weights,
                                   std::optional<Tensor> segments, int64_t num_keys,
                                   std::vector<int64_t> keys, std::vector<int64_t> tables,
                                   std::vector<int64_t> pooling, bool flat, std::vector<int64_t> dims) {
  const Weights weights = make_weights(std::move(weight_list), false);
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  const Tensor g = checked_grad(grad, batch);
  const Runs runs(batch, static_cast<const float*>(g.const_data_ptr()), weights.num_rows, nullptr);
  std::vector<Tensor> result;
  for (size_t t = 0; t < weights.tensors.size(); ++t)
    result.push_back(torch::stable::new_zeros(g, {weights.num_rows[t], weights.dims[t]}));
  runs.for_ranges(runs.waves.front(), [&](int64_t task) {
    const Range& range = runs.ranges[task];
    const TableRuns& table = runs.tables[range.table];
    kernels().sum({runs.arguments(task, task_scratch(table.dim), true), nullptr,
                   static_cast<float*>(result[table.table].mutable_data_ptr()), true});
  });
  // Summed in fp32 and rounded once.
  for (size_t t = 0; t < weights.tensors.size(); ++t)
    if (weights.types[t] != kFloat)
      result[t] = torch::stable::to(result[t], weights.tensors[t].scalar_type());
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("tbe_update", TORCH_BOX(&tbe_update));
  m.impl("tbe_row_squares", TORCH_BOX(&tbe_row_squares));
  m.impl("tbe_sparse_grad", TORCH_BOX(&tbe_sparse_grad));
  m.impl("tbe_dense_grad", TORCH_BOX(&tbe_dense_grad));
}

}  // namespace meshrec
