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

// Hands out the tasks [0, num_tasks): the first num_large of them one by one to whoever comes, the others in
// sections. A thread begins with a section of its own, so that neighbouring tasks, and the same tasks of two
// loops, tend to meet the same caches; then it helps with the others' sections.
class Dealer {
 public:
  Dealer(int64_t num_tasks, int64_t num_large, int64_t num_threads)
      : num_large_(num_large), num_small_(num_tasks - num_large), next_(num_threads + 1) {
    for (int64_t s = 0; s < num_threads; ++s) next_[s].task = first(s);
    next_.back().task = 0;
  }

  // The next task for a thread, or -1.
  int64_t take(int64_t thread) {
    const int64_t num_threads = next_.size() - 1;
    int64_t task = take_from(num_threads, num_large_);
    for (int64_t k = 0; task < 0 && k < num_threads; ++k) {
      const int64_t section = (thread + k) % num_threads;
      task = take_from(section, first(section + 1));
    }
    return task;
  }

 private:
  struct alignas(64) Next {
    std::atomic<int64_t> task;
  };
  int64_t first(int64_t section) const {
    return num_large_ + num_small_ * section / (int64_t(next_.size()) - 1);
  }
  int64_t take_from(int64_t section, int64_t end) {
    if (next_[section].task.load() >= end) return -1;
    const int64_t task = next_[section].task.fetch_add(1);
    return task < end ? task : -1;
  }

  int64_t num_large_, num_small_;
  std::vector<Next> next_;  // of each section, and of the large tasks
};

// Runs work(task) for every task in [0, num_tasks); results must not depend on who runs what.
template <typename Work>
void parallel_tasks(int64_t num_tasks, int64_t num_large, const Work& work) {
  const int64_t num_threads =
      std::max<int64_t>(1, std::min<int64_t>(torch::stable::get_num_threads(), num_tasks));
  Dealer dealer(num_tasks, num_large, num_threads);
  const auto serve = [&](int64_t thread) {
    for (int64_t task = dealer.take(thread); task >= 0; task = dealer.take(thread)) work(task);
  };
  if (num_threads == 1) return serve(0);
  torch::stable::parallel_for(0, num_threads, 1, [&](int64_t thread, int64_t) { serve(thread); });
}

template <typename Work>
void parallel_tasks(int64_t num_tasks, const Work& work) {
  parallel_tasks(num_tasks, 0, work);
}

inline void atomic_min(std::atomic<int64_t>& target, int64_t value) {
  int64_t seen = target.load();
  while (value < seen && !target.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace meshrec
