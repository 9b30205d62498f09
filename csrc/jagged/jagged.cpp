// Kernels on jagged data: ids in `values`, divided into bags by `lengths`; bags are grouped by key (K keys).
// src/meshrec/ops/jagged/naive.py is the reference, and documents arguments and results.
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "stable_abi.h"

namespace meshrec {

namespace {

constexpr int64_t kGrainBags = 1 << 16;   // with fewer bags per thread, a thread costs more than it saves
constexpr int64_t kGrainIds = 1 << 13;    // the same for ids that are searched and scattered
constexpr int64_t kBlock = 8;             // bags that are bucketized together
constexpr int64_t kGrainBytes = 1 << 17;  // as kGrainBags, for bytes that are copied

// Calls f with a null pointer of the tensor's type; check_integers must have passed the tensor.
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

Tensor new_int64(const Tensor& like, int64_t size) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(&size, 1), ScalarType::Long);
}

// Stands for the weights in a result when none were given.
Tensor no_weights(const Tensor& like) {
  const int64_t size = 0;
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(&size, 1),
                                  ScalarType::Float);
}

// Computes offsets[i] = sum of lengths[0..i) for i in 0..count: sums chunks in parallel, then writes them in
// parallel.
template <class In, class Out>
void prefix_sums(const In* lengths, int64_t count, Out* offsets) {
  const int64_t threads = torch::stable::get_num_threads();
  const int64_t chunks = std::clamp<int64_t>(count / kGrainBags, 1, threads);
  const auto chunk_begin = [&](int64_t chunk) { return count * chunk / chunks; };
  std::vector<int64_t> starts(chunks + 1, 0);
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
    }
  });
}

Tensor lengths_to_offsets(const Tensor& lengths) {
  check_integers(lengths, "lengths_to_offsets: lengths");
  const Tensor input = as_contiguous(lengths);
  const int64_t count = input.numel();
  Tensor offsets = new_like(input, {count + 1});
  with_integers(input, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    prefix_sums(input.const_data_ptr<T>(), count, offsets.mutable_data_ptr<T>());
  });
  return offsets;
}

// The first bag of each key, then the total number of bags.
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

// Rows [from, from + count) of the input become rows [to, to + count) of the output.
struct Run {
  int64_t from, to, count;
};

// Merges neighbours in `order` into runs. `firsts`: the first row of each part of the input.
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

// The first id of each key, then the total number of ids.
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

// Throws unless the sizes of the chosen parts add up to the size that the caller gave.
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

// The bucket whose interval contains id: that of the last bound <= id. Needs bounds[0] <= id.
int64_t bucket_of(int64_t id, const int64_t* bounds, int64_t num_buckets) {
  int64_t low = 0;
  for (int64_t rest = num_buckets; rest > 1;) {
    const int64_t half = rest / 2;
    low += bounds[low + half] <= id ? half : 0;
    rest -= half;
  }
  return low;
}

// The arguments of one bucketize_jagged, as pointers.
template <class Length, class Id>
struct Bucketize {
  const Length* lengths;
  const Id* values;
  const int64_t* boundaries;
  std::vector<int64_t> bags;     // first bag of each key
  std::vector<int64_t> offsets;  // first id of each bag
  int64_t num_buckets;
  int64_t num_bags() const { return bags.back(); }
  int64_t num_ids() const { return offsets.back(); }

  // Calls f(counters, first, count) for blocks of up to kBlock neighbouring bags, in parallel. The counters
  // of a block, [num_buckets, kBlock], lie together in the cache. In the tensors those of one bag lie
  // num_bags apart; a power of two would put them all in a few cache sets.
  template <class Counter, class F>
  void for_each_block(F&& f) const {
    const int64_t ids_per_bag = num_bags() ? num_ids() / num_bags() + 1 : 1;
    const int64_t grain = std::max<int64_t>(kGrainIds / ids_per_bag, kBlock);
    parallel_for(num_bags(), grain, [&](int64_t begin, int64_t end) {
      std::vector<Counter> counters(num_buckets * kBlock);
      for (int64_t first = begin; first < end; first += kBlock)
        f(counters.data(), first, std::min(kBlock, end - first));
    });
  }

  int64_t key_of(int64_t bag) const {
    return std::upper_bound(bags.begin(), bags.end(), bag) - bags.begin() - 1;
  }

  // Calls f(i, column, bounds) for each id of a block of bags, until f returns false.
  template <class F>
  void for_each_id(int64_t first, int64_t count, F&& f) const {
    int64_t key = key_of(first);
    for (int64_t column = 0; column < count; ++column) {
      const int64_t bag = first + column;
      while (bag >= bags[key + 1]) ++key;
      const int64_t* bounds = boundaries + key * (num_buckets + 1);
      for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i)
        if (!f(i, column, bounds)) return;
    }
  }

  // Finds the bucket of each id and the new lengths. Returns the first id outside all intervals, or num_ids.
  int64_t count(int32_t* buckets, Length* new_lengths) const {
    std::atomic<int64_t> first_bad{num_ids()};
    for_each_block<Length>([&](Length* counters, int64_t first, int64_t count) {
      std::fill_n(counters, num_buckets * kBlock, Length(0));
      for_each_id(first, count, [&](int64_t i, int64_t column, const int64_t* bounds) {
        const int64_t id = values[i];
        if (id < bounds[0] || id >= bounds[num_buckets]) {
          int64_t known = first_bad.load(std::memory_order_relaxed);
          while (i < known && !first_bad.compare_exchange_weak(known, i, std::memory_order_relaxed)) {
          }
          return false;
        }
        const int64_t bucket = bucket_of(id, bounds, num_buckets);
        buckets[i] = static_cast<int32_t>(bucket);
        ++counters[bucket * kBlock + column];
        return true;
      });
      for (int64_t bucket = 0; bucket < num_buckets; ++bucket)
        std::copy_n(counters + bucket * kBlock, count, new_lengths + bucket * num_bags() + first);
    });
    return first_bad;
  }

  // Writes ids and positions; `starts` has the first position of each new bag.
  void scatter(const int32_t* buckets, const int64_t* starts, Id* new_values, int64_t* positions) const {
    for_each_block<int64_t>([&](int64_t* cursors, int64_t first, int64_t count) {
      for (int64_t bucket = 0; bucket < num_buckets; ++bucket)
        std::copy_n(starts + bucket * num_bags() + first, count, cursors + bucket * kBlock);
      for_each_id(first, count, [&](int64_t i, int64_t column, const int64_t* bounds) {
        const int64_t place = cursors[buckets[i] * kBlock + column]++;
        new_values[place] = static_cast<Id>(values[i] - bounds[buckets[i]]);
        positions[i] = place;
        return true;
      });
    });
  }

  [[noreturn]] void fail_outside(int64_t i) const {
    const int64_t bag = std::upper_bound(offsets.begin(), offsets.end(), i) - offsets.begin() - 1;
    const int64_t key = key_of(bag);
    const int64_t* bounds = boundaries + key * (num_buckets + 1);
    fail("bucketize_jagged: id ", values[i], " of key ", key, " (sample ", bag - bags[key], ") is outside [",
         bounds[0], ", ", bounds[num_buckets], ")");
  }
};

void check_boundaries(const Tensor& boundaries) {
  if (boundaries.scalar_type() != ScalarType::Long || boundaries.dim() != 2 || boundaries.size(1) < 2)
    fail("bucketize_jagged: boundaries must be an int64 tensor [num_keys, num_buckets + 1]");
  const int64_t width = boundaries.size(1);
  const auto* bounds = boundaries.const_data_ptr<int64_t>();
  for (int64_t key = 0; key < boundaries.size(0); ++key)
    if (!std::is_sorted(bounds + key * width, bounds + (key + 1) * width))
      fail("bucketize_jagged: the boundaries of key ", key, " must not fall");
}

template <class Length>
void check_lengths(const Length* lengths, int64_t num_bags, int64_t total, int64_t num_ids) {
  const std::string op = "bucketize_jagged";
  for (int64_t bag = 0; bag < num_bags; ++bag)
    if (lengths[bag] < 0)
      fail(op, ": the length of bag ", bag, " is ", lengths[bag], "; lengths are 0 or more");
  if (total != num_ids) fail(op, ": the lengths sum to ", total, ", but there are ", num_ids, " values");
}

template <class T>
void scatter_rows(const Tensor& weights, const int64_t* positions, const Tensor& output) {
  const T* source = weights.const_data_ptr<T>();
  T* target = output.mutable_data_ptr<T>();
  parallel_for(weights.numel(), kGrainIds, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) target[positions[i]] = source[i];
  });
}

Tensor scatter_weights(const Tensor& weights, const Tensor& positions) {
  const Tensor output = new_like(weights, {weights.numel()});
  const auto* places = positions.const_data_ptr<int64_t>();
  switch (weights.scalar_type()) {
    case ScalarType::Float:
      scatter_rows<float>(weights, places, output);
      break;
    case ScalarType::Double:
      scatter_rows<double>(weights, places, output);
      break;
    case ScalarType::Half:
      scatter_rows<torch::headeronly::Half>(weights, places, output);
      break;
    case ScalarType::BFloat16:
      scatter_rows<torch::headeronly::BFloat16>(weights, places, output);
      break;
    default:
      fail("bucketize_jagged: weights must be floating point");
  }
  return output;
}

template <class Length, class Id>
std::tuple<Tensor, Tensor, Tensor> bucketize(const Tensor& lengths, const Tensor& values,
                                             const Tensor& boundaries, std::vector<int64_t> bags) {
  const int64_t num_bags = lengths.numel(), num_ids = values.numel(), num_buckets = boundaries.size(1) - 1;
  Bucketize<Length, Id> work{lengths.const_data_ptr<Length>(),     values.const_data_ptr<Id>(),
                             boundaries.const_data_ptr<int64_t>(), std::move(bags),
                             std::vector<int64_t>(num_bags + 1),   num_buckets};
  prefix_sums(work.lengths, num_bags, work.offsets.data());
  check_lengths(work.lengths, num_bags, work.num_ids(), num_ids);
  const Tensor new_lengths = new_like(lengths, {num_buckets * num_bags});
  const auto buckets = std::make_unique_for_overwrite<int32_t[]>(num_ids);
  const int64_t bad = work.count(buckets.get(), new_lengths.mutable_data_ptr<Length>());
  if (bad < num_ids) work.fail_outside(bad);
  const auto starts = std::make_unique_for_overwrite<int64_t[]>(num_buckets * num_bags + 1);
  prefix_sums(new_lengths.const_data_ptr<Length>(), num_buckets * num_bags, starts.get());
  const Tensor new_values = new_like(values, {num_ids});
  const Tensor positions = new_int64(values, num_ids);
  work.scatter(buckets.get(), starts.get(), new_values.mutable_data_ptr<Id>(),
               positions.mutable_data_ptr<int64_t>());
  return {new_lengths, new_values, positions};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> bucketize_jagged(const Tensor& lengths_any,
                                                            const Tensor& values_any,
                                                            std::optional<Tensor> weights,
                                                            std::optional<Tensor> segments,
                                                            const Tensor& boundaries_any) {
  const std::string op = "bucketize_jagged";
  check_integers(lengths_any, op + ": lengths");
  check_integers(values_any, op + ": values");
  const Tensor lengths = as_contiguous(lengths_any);
  const Tensor values = as_contiguous(values_any);
  const Tensor boundaries = as_contiguous(boundaries_any);
  check_boundaries(boundaries);
  if (weights && (weights->dim() != 1 || weights->numel() != values.numel()))
    fail(op, ": weights must be one per value, got ", weights->numel(), " for ", values.numel(), " values");
  auto bags = first_bags(segments, boundaries.size(0), lengths.numel(), op);
  auto [new_lengths, new_values, positions] = with_integers(lengths, [&](auto* length) {
    return with_integers(values, [&](auto* id) {
      using Length = std::remove_pointer_t<decltype(length)>;
      using Id = std::remove_pointer_t<decltype(id)>;
      return bucketize<Length, Id>(lengths, values, boundaries, bags);
    });
  });
  Tensor new_weights = weights ? scatter_weights(as_contiguous(*weights), positions) : no_weights(values);
  return {new_lengths, new_values, new_weights, positions};
}

}  // namespace

}  // namespace meshrec

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("lengths_to_offsets", TORCH_BOX(&meshrec::lengths_to_offsets));
  m.impl("permute_jagged", TORCH_BOX(&meshrec::permute_jagged));
  m.impl("bucketize_jagged", TORCH_BOX(&meshrec::bucketize_jagged));
}
