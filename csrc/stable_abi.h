// The one place that includes libtorch: its stable ABI only, so that one binary serves every torch >= 2.10.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <atomic>
#include <cstdint>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace meshrec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Thrown errors of this type reach Python as ValueError.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Runs work(task) for every task in [0, num_tasks), handed out one by one: results must not depend on who
// runs what.
template <typename Work>
void parallel_tasks(int64_t num_tasks, const Work& work) {
  const int64_t num_threads = std::min<int64_t>(torch::stable::get_num_threads(), num_tasks);
  if (num_threads <= 1) {
    for (int64_t task = 0; task < num_tasks; ++task) work(task);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t, int64_t) {
    for (int64_t task = next.fetch_add(1); task < num_tasks; task = next.fetch_add(1)) work(task);
  });
}

}  // namespace meshrec
