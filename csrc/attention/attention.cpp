// Attention over jagged sequences. ops/attention/naive.py documents arguments and results; attention.inl
// explains how a sample is computed.
#include "attention/attention.h"

#include <cmath>
#include <memory>
#include <numeric>
#include <tuple>

#include "host/memory.h"
#include "isa/kernels.h"
#include "stable_abi.h"

namespace meshrec {
namespace {

constexpr double kBucketWidth = 0.301;  // BUCKET_WIDTH in naive.py
constexpr int64_t kTasks = 64;          // maximum; each task sums bias gradients separately

TimeBuckets time_buckets(int64_t num_buckets) {
  thread_local int64_t num_known = -1;  // cached: all layers in a model have the same count
  thread_local TimeBuckets found;
  if (num_buckets == num_known) return found;
  num_known = num_buckets;
  // The same fp32 bounds as in naive.py.
  std::vector<float> starts(num_buckets);
  for (int64_t k = 0; k < num_buckets; ++k) starts[k] = float(std::exp(kBucketWidth * double(k)));
  int64_t bucket = 0;
  for (int slot = 0; slot < kBucketSlots; ++slot) {
    // A slot starts at (1 + k / 8) * 2^e: exponent and upper mantissa bits, in order.
    const double begin = std::ldexp(1 + (slot % 8) / 8., slot / 8);
    while (bucket + 1 < num_buckets && starts[bucket + 1] <= begin) ++bucket;
    found.first[slot] = int32_t(bucket);
    found.border[slot] = bucket + 1 < num_buckets ? starts[bucket + 1] : INFINITY;
  }
  return found;
}

// Returns the tensor itself if its tokens are rows (slices of a fused projection are); otherwise a copy.
Tensor as_tokens(const Tensor& tensor) {
  const bool in_rows = tensor.stride(2) == 1 && tensor.stride(1) == tensor.size(2);
  return in_rows ? tensor : torch::stable::contiguous(tensor);
}

AttentionTokens tokens_of(const Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.stride(0), tensor.size(2)};
}

struct Attention {
  Tensor query, key, value, offsets, query_offsets, num_targets;
  std::optional<Tensor> position, time, timestamps;
  TimeBuckets buckets;
  AttentionArgs args{};
  std::vector<AttentionUnit> units;  // longest first
  bool has_unread_keys = false;      // of samples without queries

  Attention(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& bounds,
            const Tensor& query_bounds, const Tensor& targets)
      : query(as_tokens(queries)),
        key(as_tokens(keys)),
        value(as_tokens(values)),
        offsets(as_contiguous(bounds)),
        query_offsets(as_contiguous(query_bounds)),
        num_targets(as_contiguous(targets)) {
    for (const Tensor* each : {&query, &key, &value}) {
      if (each->scalar_type() != ScalarType::Float || each->dim() != 3) {
        fail("jagged_attention: queries, keys and values must be float32 [N, H, D]");
      }
    }
    for (const Tensor* each : {&offsets, &query_offsets, &num_targets}) {
      if (each->scalar_type() != ScalarType::Long || each->dim() != 1) {
        fail("jagged_attention: offsets and numbers of targets must be int64 vectors");
      }
    }
    const int64_t num_samples = num_targets.numel();
    if (offsets.numel() != num_samples + 1 || query_offsets.numel() != num_samples + 1 ||
        key.size(0) != value.size(0) || key.size(1) != query.size(1) || value.size(1) != query.size(1) ||
        key.size(2) != query.size(2)) {
      fail("jagged_attention: the sizes of queries, keys, values, offsets and targets do not fit each other");
    }
    args.query = tokens_of(query), args.key = tokens_of(key), args.value = tokens_of(value);
    args.num_heads = query.size(1);
  }

  void add_biases(const std::optional<Tensor>& positions, const std::optional<Tensor>& times,
                  const std::optional<Tensor>& stamps) {
    if (positions) {
      position = as_contiguous(*positions);
      if (position->numel() != 2 * args.max_length - 1) fail("jagged_attention: position must be [2 L - 1]");
      args.position = position->const_data_ptr<float>();
    }
    if (times) {
      if (!stamps || stamps->scalar_type() != ScalarType::Long || stamps->numel() != key.size(0)) {
        fail("jagged_attention: a time bias needs int64 timestamps [N]");
      }
      time = as_contiguous(*times), timestamps = as_contiguous(*stamps);
      args.time = time->const_data_ptr<float>();
      args.timestamps = timestamps->const_data_ptr<int64_t>();
      buckets = time_buckets(time->numel());
      args.buckets = &buckets;
    }
    for (const std::optional<Tensor>* each : {&position, &time}) {
      if (*each && (*each)->scalar_type() != ScalarType::Float)
        fail("jagged_attention: biases must be float32");
    }
  }

  // Divides the work into units: a sample each, or some heads of a sample if there are few samples.
  void cut() {
    const int64_t *bounds = offsets.const_data_ptr<int64_t>(),
                  *queries = query_offsets.const_data_ptr<int64_t>();
    const int64_t *targets = num_targets.const_data_ptr<int64_t>(), num_samples = num_targets.numel();
    if (bounds[0] != 0 || queries[0] != 0 || bounds[num_samples] != key.size(0) ||
        queries[num_samples] != query.size(0)) {
      fail("jagged_attention: the offsets must begin with 0 and end with the number of tokens");
    }
    const int64_t parts =
        // Aims at kTasks / 2 units. More parts would cost more: a divided sample computes bias and mask once
        // per part.
        std::clamp<int64_t>(kTasks / 2 / std::max<int64_t>(num_samples, 1), 1, args.num_heads);
    for (int64_t b = 0; b < num_samples; ++b) {
      const int64_t length = bounds[b + 1] - bounds[b], num_queries = queries[b + 1] - queries[b];
      if (length < 0 || length > args.max_length || num_queries < 0 || num_queries > length ||
          targets[b] < 0 || targets[b] > length) {
        fail("jagged_attention: sample ", b, " has ", length, " tokens, ", num_queries, " queries and ",
             targets[b], " targets; max_length is ", args.max_length);
      }
      if (num_queries == 0) {
        has_unread_keys |= length > 0;
        continue;
      }
      for (int64_t part = 0; part < parts; ++part) {
        units.push_back({bounds[b], length, queries[b], num_queries, targets[b],
                         args.num_heads * part / parts, args.num_heads * (part + 1) / parts});
      }
    }
    // Longest first: run() deals units to tasks in turn, so the tasks get about the same work.
    std::stable_sort(units.begin(), units.end(), [](const AttentionUnit& a, const AttentionUnit& b) {
      return a.length * a.num_queries > b.length * b.num_queries;
    });
  }

  int64_t num_tasks() const { return std::min<int64_t>(kTasks, units.size()); }

  // Runs every unit, after prepare(task, args) for its task. The assignment of units to tasks does not depend
  // on the thread count.
  template <typename Prepare>
  void run(void (*work)(const AttentionArgs&, const AttentionUnit&), const Prepare& prepare) const {
    parallel_tasks(num_tasks(), [&](int64_t task) {
      // The scratch serves all units of the task, so its size is that of the largest.
      int64_t size = 0;
      for (size_t u = task; u < units.size(); u += kTasks) {
        const int64_t heads = units[u].last_head - units[u].first_head;
        size = std::max(size, attention_scratch(units[u].length, heads, args.query.width, args.value.width));
      }
      const std::unique_ptr<void, decltype(&std::free)> scratch(
          std::aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64), &std::free);
      if (scratch == nullptr) fail_for_memory(size * sizeof(float));
      // A copy, because every task has its own scratch and bias gradients.
      AttentionArgs own = args;
      own.scratch = static_cast<float*>(scratch.get());
      prepare(task, own);
      for (size_t u = task; u < units.size(); u += kTasks) work(own, units[u]);
    });
  }
};

#define MESHREC_ATTENTION_OPTIONS                                                                   \
  Tensor query, Tensor key, Tensor value, Tensor offsets, Tensor query_offsets, Tensor num_targets, \
      std::optional<Tensor> position, std::optional<Tensor> time, std::optional<Tensor> timestamps, \
      int64_t max_length, double scale, bool softmax, bool causal, int64_t window, int64_t num_contextual

Attention attention_of(MESHREC_ATTENTION_OPTIONS) {
  Attention found(query, key, value, offsets, query_offsets, num_targets);
  found.args.max_length = max_length, found.args.scale = float(scale);
  found.args.softmax = softmax, found.args.causal = causal;
  found.args.window = window, found.args.num_contextual = num_contextual;
  return found;
}

std::tuple<Tensor, Tensor> jagged_attention(MESHREC_ATTENTION_OPTIONS) {
  Attention all = attention_of(query, key, value, offsets, query_offsets, num_targets, position, time,
                               timestamps, max_length, scale, softmax, causal, window, num_contextual);
  all.add_biases(position, time, timestamps);
  all.cut();
  const int64_t num_queries = all.query.size(0), heads = all.args.num_heads;
  Tensor out = empty_buffer({num_queries, heads, all.args.value.width}, ScalarType::Float);
  Tensor log_sums = empty_buffer({softmax ? num_queries : 0, heads}, ScalarType::Float);
  all.args.out = out.mutable_data_ptr<float>();
  all.args.log_sums = log_sums.mutable_data_ptr<float>();
  all.run(kernels().attend, [](int64_t, AttentionArgs&) {});
  return {out, log_sums};
}

// Adds the partial sums in task order, so the result is the same for any thread count.
Tensor sum_of_parts(const std::vector<float>& parts, int64_t num_tasks, int64_t size, int64_t lanes) {
  Tensor found = empty_buffer({size}, ScalarType::Float);
  float* sums = found.mutable_data_ptr<float>();
  for (int64_t j = 0; j < size; ++j) {
    double sum = 0;
    for (int64_t task = 0; task < num_tasks; ++task) {
      const float* part = parts.data() + (task * size + j) * lanes;
      for (int64_t lane = 0; lane < lanes; ++lane) sum += part[lane];
    }
    sums[j] = float(sum);
  }
  return found;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> jagged_attention_grad(Tensor grad, Tensor out,
                                                                         Tensor log_sums,
                                                                         MESHREC_ATTENTION_OPTIONS) {
  Attention all = attention_of(query, key, value, offsets, query_offsets, num_targets, position, time,
                               timestamps, max_length, scale, softmax, causal, window, num_contextual);
  all.add_biases(position, time, timestamps);
  all.cut();
  const Tensor grad_out = as_contiguous(grad), result = as_contiguous(out), sums = as_contiguous(log_sums);
  AttentionArgs& args = all.args;
  const int64_t num_queries = all.query.size(0), num_tokens = all.key.size(0), heads = args.num_heads;
  if (grad_out.scalar_type() != ScalarType::Float ||
      grad_out.numel() != num_queries * heads * args.value.width) {
    fail("jagged_attention_grad: the gradient must be float32, shaped like the result");
  }
  Tensor grad_query = empty_buffer({num_queries, heads, args.query.width}, ScalarType::Float);
  Tensor grad_key = empty_buffer({num_tokens, heads, args.key.width}, ScalarType::Float);
  Tensor grad_value = empty_buffer({num_tokens, heads, args.value.width}, ScalarType::Float);
  args.grad = grad_out.const_data_ptr<float>();
  // The arguments serve both directions; the gradient only reads the output and the sums.
  args.out = const_cast<float*>(result.const_data_ptr<float>());
  args.log_sums = const_cast<float*>(sums.const_data_ptr<float>());
  args.grad_query = grad_query.mutable_data_ptr<float>();
  args.grad_key = grad_key.mutable_data_ptr<float>();
  args.grad_value = grad_value.mutable_data_ptr<float>();
  // A sample without queries has no unit, so nothing else writes the gradients of its keys and values.
  if (all.has_unread_keys) {
    torch::stable::zero_(grad_key), torch::stable::zero_(grad_value);
  }
  const int64_t positions = position ? 2 * max_length - 1 : 0, buckets = time ? all.time->numel() : 0;
  std::vector<float> grad_position(all.num_tasks() * positions);
  std::vector<float> grad_time(all.num_tasks() * buckets * kHistogramLanes);
  all.run(kernels().attend_grad, [&](int64_t task, AttentionArgs& own) {
    own.grad_position = position ? grad_position.data() + task * positions : nullptr;
    own.grad_time = time ? grad_time.data() + task * buckets * kHistogramLanes : nullptr;
  });
  return {grad_query, grad_key, grad_value, sum_of_parts(grad_position, all.num_tasks(), positions, 1),
          sum_of_parts(grad_time, all.num_tasks(), buckets, kHistogramLanes)};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("jagged_attention", TORCH_BOX(&jagged_attention));
  m.impl("jagged_attention_grad", TORCH_BOX(&jagged_attention_grad));
}

}  // namespace meshrec
