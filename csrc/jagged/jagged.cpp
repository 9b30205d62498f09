// Kernels on jagged data: IDs in `values`, divided into bags by `lengths`; bags are grouped by key (K keys).
// src/meshrec/ops/jagged/naive.py is the reference, and documents arguments and results.
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "stable_abi.h"

namespace meshrec {

namespace {

constexpr int64_t kGrainBags = 1 << 16;   // with fewer bags, another thread costs more than it saves
constexpr int64_t kGrainBytes = 1 << 17;  // like kGrainBags, for bytes to copy

// Calls f with a null pointer of the element type, as a type tag; check_integers must have accepted the
// tensor.
template <class F>
auto with_integers(const Tensor& tensor, F&& f) {
  if (tensor.scalar_type() == ScalarType::Int) return f(static_cast<int32_t*>(nullptr));
  return f(static_cast<int64_t*>(nullptr));
}

void check_integers(const Tensor& tensor, const std::string& what) {
  if (tensor.dim() != 1) fail(what, " must have 1 dimension, got ", tensor.dim());
  if (tensor.scalar_type() != ScalarType::Int && tensor.scalar_type() != ScalarType::Long)
    fail(what, " must be int32 or int64");
}

Tensor new_like(const Tensor& like, std::vector<int64_t> sizes) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()));
}

// Placeholder for absent weights in a result.
Tensor no_weights(const Tensor& like) {
  const int64_t size = 0;
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(&size, 1),
                                  ScalarType::Float);
}

// Computes offsets[i] = sum of lengths[0..i) for i in 0..count: sums chunks in parallel, then writes the
// offsets in parallel. Returns the sum of all lengths, which may not fit the type of the offsets.
template <class In, class Out>
int64_t prefix_sums(const In* lengths, int64_t count, Out* offsets) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t chunks = std::clamp<int64_t>(count / kGrainBags, 1, threads);
  const auto chunk_begin = [&](int64_t chunk) { return count * chunk / chunks; };
  std::vector<int64_t> starts(chunks + 1, 0);
  int64_t total = 0;  // written by the last chunk
  // A single chunk starts at 0, so its sum is not needed.
  if (chunks > 1) {
    parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        int64_t sum = 0;
        for (int64_t i = chunk_begin(chunk); i < chunk_begin(chunk + 1); ++i) sum += lengths[i];
        starts[chunk + 1] = sum;
      }
    });
    for (int64_t chunk = 0; chunk < chunks; ++chunk) starts[chunk + 1] += starts[chunk];
  }
  offsets[0] = 0;
  parallel_for(chunks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      int64_t sum = starts[chunk];
      for (int64_t i = chunk_begin(chunk); i < chunk_begin(chunk + 1); ++i) {
        sum += lengths[i];
        offsets[i + 1] = static_cast<Out>(sum);
      }
      if (chunk == chunks - 1) total = sum;
    }
  });
  return total;
}

Tensor lengths_to_offsets(const Tensor& lengths) {
  check_integers(lengths, "lengths_to_offsets: lengths");
  const Tensor input = as_contiguous(lengths);
  const int64_t count = input.numel();
  Tensor offsets = new_like(input, {count + 1});
  with_integers(input, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t total = prefix_sums(input.const_data_ptr<T>(), count, offsets.mutable_data_ptr<T>());
    if (total != static_cast<T>(total))
      fail("lengths_to_offsets: the lengths sum to ", total,
           ", which int32 offsets cannot hold; pass int64 lengths");
  });
  return offsets;
}

// Returns the first bag per key, followed by the bag count.
std::vector<int64_t> first_bags(const std::optional<Tensor>& segments, int64_t num_keys, int64_t num_bags,
                                const std::string& op) {
  if (num_keys < 0) fail(op, ": num_keys must be 0 or more, got ", num_keys);
  std::vector<int64_t> firsts(num_keys + 1);
  if (!segments) {
    const int64_t bags = num_keys ? num_bags / num_keys : 0;
    if (bags * num_keys != num_bags)
      fail(op, ": ", num_bags, " bags do not divide evenly among ", num_keys,
           " keys; pass segments, the first bag of each key");
    for (int64_t key = 0; key <= num_keys; ++key) firsts[key] = key * bags;
    return firsts;
  }
  if (segments->scalar_type() != ScalarType::Long || segments->dim() != 1 || !segments->is_cpu())
    fail(op, ": segments must be an int64 vector on the CPU");
  if (segments->numel() != num_keys + 1)
    fail(op, ": segments must have num_keys + 1 = ", num_keys + 1, " elements, got ", segments->numel());
  const Tensor input = as_contiguous(*segments);
  std::copy_n(input.const_data_ptr<int64_t>(), num_keys + 1, firsts.begin());
  if (firsts.front() != 0 || firsts.back() != num_bags || !std::is_sorted(firsts.begin(), firsts.end()))
    fail(op, ": segments must rise from 0 to the number of bags, ", num_bags);
  return firsts;
}

int64_t num_rows(const Tensor& values, const std::string& what) {
  if (values.dim() < 1) fail(what, " must have at least 1 dimension");
  return values.size(0);
}

// Input rows [from, from + count), which become output rows [to, to + count).
struct Run {
  int64_t from, to, count;
};

// Merges adjacent entries in `order` into runs. `firsts`: first row of each input part.
std::vector<Run> runs_of(const std::vector<int64_t>& order, const std::vector<int64_t>& firsts) {
  std::vector<Run> runs;
  int64_t to = 0;
  for (const int64_t part : order) {
    const int64_t from = firsts[part];
    const int64_t count = firsts[part + 1] - from;
    if (!runs.empty() && runs.back().from + runs.back().count == from)
      runs.back().count += count;
    else
      runs.push_back({from, to, count});
    to += count;
  }
  return runs;
}

Tensor copy_runs(const Tensor& tensor, const std::vector<Run>& runs) {
  const Tensor input = as_contiguous(tensor);
  std::vector<int64_t> sizes(input.sizes().begin(), input.sizes().end());
  int64_t row_bytes = static_cast<int64_t>(input.element_size());
  for (size_t dim = 1; dim < sizes.size(); ++dim) row_bytes *= sizes[dim];
  sizes[0] = runs.empty() ? 0 : runs.back().to + runs.back().count;
  const Tensor output = new_like(input, sizes);
  if (output.numel() == 0) return output;
  const auto* source = static_cast<const char*>(input.const_data_ptr());
  auto* target = static_cast<char*>(output.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(kGrainBytes / row_bytes, 1);
  parallel_for(sizes[0], grain, [&](int64_t begin, int64_t end) {
    auto run = std::upper_bound(runs.begin(), runs.end(), begin,
                                [](int64_t row, const Run& candidate) { return row < candidate.to; }) -
               1;
    for (int64_t row = begin; row < end; ++run) {
      const int64_t stop = std::min(end, run->to + run->count);
      if (row < stop)
        std::memcpy(target + row * row_bytes, source + (run->from + row - run->to) * row_bytes,
                    (stop - row) * row_bytes);
      row = std::max(row, stop);
    }
  });
  return output;
}

// Returns the first ID per key, followed by the ID count.
std::vector<int64_t> first_ids(const Tensor& lengths, const std::vector<int64_t>& bags, int64_t num_ids) {
  const std::string op = "permute_jagged";
  const int64_t num_keys = static_cast<int64_t>(bags.size()) - 1;
  std::vector<int64_t> ids(bags.size(), 0);
  with_integers(lengths, [&](auto* type) {
    const auto* data = lengths.const_data_ptr<std::remove_pointer_t<decltype(type)>>();
    for (int64_t key = 0; key < num_keys; ++key) {
      int64_t sum = 0;
      for (int64_t bag = bags[key]; bag < bags[key + 1]; ++bag) sum += data[bag];
      if (sum < 0) fail(op, ": the lengths of key ", key, " sum to ", sum, "; lengths are 0 or more");
      ids[key + 1] = ids[key] + sum;
    }
  });
  if (ids.back() != num_ids)
    fail(op, ": the lengths sum to ", ids.back(), ", but there are ", num_ids, " values");
  return ids;
}

// Throws unless the selected parts have the total size given by the caller.
void check_total(const std::vector<int64_t>& order, const std::vector<int64_t>& firsts, int64_t given,
                 const std::string& name) {
  int64_t total = 0;
  for (const int64_t key : order) total += firsts[key + 1] - firsts[key];
  if (total != given)
    fail("permute_jagged: the keys in order hold ", total, " ", name, ", but num_", name, " is ", given);
}

std::tuple<Tensor, Tensor, Tensor> permute_jagged(std::vector<int64_t> order, int64_t num_keys,
                                                  const Tensor& lengths_any, const Tensor& values,
                                                  std::optional<Tensor> weights,
                                                  std::optional<Tensor> segments, int64_t num_bags,
                                                  int64_t num_values) {
  const std::string op = "permute_jagged";
  check_integers(lengths_any, op + ": lengths");
  const Tensor lengths = as_contiguous(lengths_any);
  const int64_t num_ids = num_rows(values, op + ": values");
  if (weights && num_rows(*weights, op + ": weights") != num_ids)
    fail(op, ": ", weights->size(0), " weights do not match ", num_ids, " values");
  const std::vector<int64_t> bags = first_bags(segments, num_keys, lengths.numel(), op);
  const std::vector<int64_t> ids = first_ids(lengths, bags, num_ids);
  for (const int64_t key : order)
    if (key < 0 || key >= num_keys) fail(op, ": order names key ", key, "; there are ", num_keys, " keys");
  check_total(order, bags, num_bags, "bags");
  check_total(order, ids, num_values, "values");
  const std::vector<Run> id_runs = runs_of(order, ids);
  return {copy_runs(lengths, runs_of(order, bags)), copy_runs(values, id_runs),
          weights ? copy_runs(*weights, id_runs) : no_weights(values)};
}

}  // namespace

}  // namespace meshrec

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("lengths_to_offsets", TORCH_BOX(&meshrec::lengths_to_offsets));
  m.impl("permute_jagged", TORCH_BOX(&meshrec::permute_jagged));
}
