// Passes over the scores of all rows in a table, or of marked rows only. src/meshrec/ops/index/marked.py is
// the reference.
#include <limits>
#include <mutex>
#include <optional>

#include "index/ids.h"

namespace meshrec {

namespace {

// Scores are read in place: with torch's copies, they took 19 of the 25 ms of a step that evicts.
constexpr int64_t kGrainValues = 1 << 15;

// Runs work(values, marks) on an int32 or int64 tensor and marks; without marks, all values count.
template <typename Work>
void with_marked(const Tensor& values, const std::optional<Tensor>& marks, const Work& work) {
  if (values.dim() != 1 || !values.is_contiguous()) fail("the values must be contiguous with 1 dimension");
  const bool* chosen = nullptr;
  if (marks.has_value()) {
    if (marks->scalar_type() != ScalarType::Bool || marks->numel() != values.numel() ||
        !marks->is_contiguous())
      fail("the marks must be bool and contiguous, one for each of ", values.numel(), " values");
    chosen = static_cast<const bool*>(marks->const_data_ptr());
  }
  const auto each = [&](const auto* value) {
    if (chosen != nullptr) return work(value, [chosen](int64_t i) { return chosen[i]; });
    work(value, [](int64_t) { return true; });
  };
  if (values.scalar_type() == ScalarType::Int)
    return each(static_cast<const int32_t*>(values.const_data_ptr()));
  if (values.scalar_type() != ScalarType::Long) fail("the values must be int32 or int64");
  each(static_cast<const int64_t*>(values.const_data_ptr()));
}

// The division into pieces does not depend on the thread count.
int64_t num_pieces(int64_t count) { return (count + kGrainValues - 1) / kGrainValues; }

template <typename Work>
void for_values(int64_t count, const Work& work) {
  parallel_for(num_pieces(count), 1, [&](int64_t begin, int64_t end) {
    for (int64_t piece = begin; piece < end; ++piece)
      work(piece, piece * kGrainValues, std::min(count, (piece + 1) * kGrainValues));
  });
}

Tensor marked_range(Tensor values, std::optional<Tensor> marks) {
  const int64_t count = values.numel();
  struct Range {
    int64_t least = INT64_MAX, greatest = INT64_MIN, number = 0;
  };
  std::vector<Range> found(size_t(num_pieces(count)));
  with_marked(values, marks, [&](const auto* value, const auto& is_marked) {
    for_values(count, [&](int64_t piece, int64_t begin, int64_t end) {
      using Value = std::decay_t<decltype(*value)>;
      Value least = std::numeric_limits<Value>::max(), greatest = std::numeric_limits<Value>::min();
      int64_t number = 0;
      for (int64_t i = begin; i < end; ++i) {
        const bool is_counted = is_marked(i);
        // Selections instead of branches, because marks may be unpredictable.
        least = std::min(least, is_counted ? value[i] : least);
        greatest = std::max(greatest, is_counted ? value[i] : greatest);
        number += is_counted;
      }
      if (number > 0) found[size_t(piece)] = {least, greatest, number};
    });
  });
  Range all;
  for (const Range& each : found)
    all = {std::min(all.least, each.least), std::max(all.greatest, each.greatest), all.number + each.number};
  Tensor result = new_int64(3);
  auto* to = static_cast<int64_t*>(result.mutable_data_ptr());
  to[0] = all.least, to[1] = all.greatest, to[2] = all.number;
  return result;
}

Tensor marked_histogram(Tensor values, std::optional<Tensor> marks, int64_t base, int64_t shift,
                        int64_t size) {
  if (shift < 0 || shift > 63 || size < 1)
    fail("a histogram needs a shift in [0, 63] and a size of 1 or more");
  const int64_t count = values.numel();
  Tensor result = new_int64(size);
  auto* const sums = static_cast<int64_t*>(result.mutable_data_ptr());
  std::fill_n(sums, size, 0);
  std::mutex adding;
  with_marked(values, marks, [&](const auto* value, const auto& is_marked) {
    const uint64_t first = uint64_t(base >> shift);
    const auto add = [&](int64_t begin, int64_t end, int64_t* counts, int64_t lanes) {
      for (int64_t i = begin; i < end; ++i) {
        // A value below the base wraps around to a large number, so a single comparison checks both ends.
        const uint64_t digit = uint64_t(int64_t(value[i]) >> shift) - first;
        if (is_marked(i) && digit < uint64_t(size)) ++counts[lanes * int64_t(digit) + (i & (lanes - 1))];
      }
    };
    if (count < kGrainValues) return add(0, count, sums, 1);
    parallel_for(count, kGrainValues, [&](int64_t begin, int64_t end) {
      // Four counters per digit, so equal adjacent values do not wait for each other's sum.
      std::vector<int64_t> counts(size_t(4 * size), 0);
      add(begin, end, counts.data(), 4);
      const std::lock_guard lock(adding);
      for (int64_t digit = 0; digit < size; ++digit)
        for (int64_t k = 0; k < 4; ++k) sums[digit] += counts[size_t(4 * digit + k)];
    });
  });
  return result;
}

Tensor marked_between(Tensor values, std::optional<Tensor> marks, int64_t least, int64_t greatest) {
  const int64_t count = values.numel();
  std::vector<int64_t> starts(size_t(num_pieces(count)) + 1, 0);
  Tensor result = new_int64(0);
  with_marked(values, marks, [&](const auto* value, const auto& is_marked) {
    const auto is_chosen = [&](int64_t i) {
      return bool(is_marked(i)) & bool(value[i] >= least) & bool(value[i] <= greatest);
    };
    // Two passes: the counts of the first give every piece its positions in the result.
    for_values(count, [&](int64_t piece, int64_t begin, int64_t end) {
      int64_t number = 0;
      for (int64_t i = begin; i < end; ++i) number += is_chosen(i);
      starts[size_t(piece) + 1] = number;
    });
    for (size_t piece = 1; piece < starts.size(); ++piece) starts[piece] += starts[piece - 1];
    result = new_int64(starts.back());
    auto* const to = static_cast<int64_t*>(result.mutable_data_ptr());
    for_values(count, [&](int64_t piece, int64_t begin, int64_t end) {
      int64_t at = starts[size_t(piece)];
      const int64_t stop = starts[size_t(piece) + 1];
      for (int64_t i = begin; i < end && at < stop; ++i)
        if (is_chosen(i)) to[at++] = i;
    });
  });
  return result;
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("marked_range", TORCH_BOX(&marked_range));
  m.impl("marked_histogram", TORCH_BOX(&marked_histogram));
  m.impl("marked_between", TORCH_BOX(&marked_between));
}

}  // namespace
}  // namespace meshrec
