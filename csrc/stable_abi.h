// The only header that includes libtorch: just the stable ABI, so a binary works with every torch >=
// 2.10.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <exception>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace meshrec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws an error about invalid input. The Python exception type depends on the torch version, so the message
// starts with the kind of error: see [Note: errors of operators] in src/meshrec/ops/operators.py.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  message << "invalid input: ";
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

// Runs work(begin, end) on torch's threads, for pieces of [0, count) with at least `grain` elements. If work
// throws, the caller gets the same exception after all pieces have ended; passed through libtorch, it would
// lose its message.
template <typename Work>
void parallel_for(int64_t count, int64_t grain, const Work& work) {
  if (count <= 0) return;
  std::atomic_flag failed = ATOMIC_FLAG_INIT;
  std::exception_ptr error;
  const auto run = [&](int64_t begin, int64_t end) {
    try {
      work(begin, end);
    } catch (...) {
      // Only the first thread to fail writes `error`. The end of the parallel loop orders this before the
      // read below.
      if (!failed.test_and_set()) error = std::current_exception();
    }
  };
#if defined(__SANITIZE_THREAD__)
  // The thread sanitizer does not understand OpenMP synchronization, and would report all shared data as a
  // race.
  const int64_t most =
      std::clamp<int64_t>(count / std::max<int64_t>(grain, 1), 1, torch::stable::get_num_threads());
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < most; ++t) threads.emplace_back(run, count * t / most, count * (t + 1) / most);
  run(0, count / most);
  for (std::thread& thread : threads) thread.join();
#else
  torch::stable::parallel_for(0, count, grain, run);
#endif
  if (error) std::rethrow_exception(error);
}

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Counts the remaining tasks down to 0.
class Countdown {
 public:
  explicit Countdown(int64_t count) : left_(count) {}
  // For containers, which move elements while they are filled. Not safe once other threads use the countdown.
  Countdown(Countdown&& other) : left_(other.left_.load()) {}
  // Pairs with the acquire in wait(): the waiting thread sees everything that the task wrote.
  void done() { left_.fetch_sub(1, std::memory_order_release); }
  // Ends every wait, present and future.
  void fail() { left_.store(kFailed); }
  // Waits until no task is left; returns false if a task failed.
  bool wait() const {
    for (int64_t turn = 0;; ++turn) {
      const int64_t left = left_.load(std::memory_order_acquire);
      if (left <= 0) return left == 0;
      if (turn > kTurnsAwake) std::this_thread::yield();
    }
  }

 private:
  // A waiting thread spins for this many turns before it yields the core. A failed count stays negative
  // whatever is still subtracted.
  static constexpr int64_t kTurnsAwake = 1000, kFailed = INT64_MIN / 2;
  alignas(64) std::atomic<int64_t> left_;
};

// Hands out tasks in sections. A thread starts with a separate section, so adjacent tasks, and the same
// tasks in two loops, tend to find the same caches. Then it helps with other sections.
class Dealer {
 public:
  // starts: first task in each section, then the end of the last section.
  explicit Dealer(const std::vector<int64_t>& starts) : next_(starts.size() - 1) {
    for (size_t s = 0; s < next_.size(); ++s) next_[s].task = starts[s], next_[s].end = starts[s + 1];
  }

  // Takes the next task for a thread; -1 if none is left.
  int64_t take(size_t thread) {
    for (size_t k = 0; k < next_.size(); ++k) {
      Next& next = next_[(thread + k) % next_.size()];
      // Reading first spares an exhausted section the write to its cache line, which all threads would
      // compete for.
      if (next.task.load() >= next.end) continue;
      const int64_t task = next.task.fetch_add(1);
      if (task < next.end) return task;
    }
    return -1;
  }

  // Works on the remaining tasks, together with other threads.
  template <typename Work>
  void serve(size_t thread, Countdown& left, const Work& work) try {
    for (int64_t task = take(thread); task >= 0; task = take(thread)) work(task), left.done();
  } catch (...) {
    left.fail();
    throw;
  }

 private:
  // A cache line per section, so threads that work on different sections do not share one.
  struct alignas(64) Next {
    std::atomic<int64_t> task;
    int64_t end;
  };
  std::vector<Next> next_;
};

// Divides the tasks [first, end) into sections of equal length.
inline std::vector<int64_t> even_sections(int64_t first, int64_t end, int64_t num_sections) {
  std::vector<int64_t> starts;
  for (int64_t s = 0; s <= num_sections; ++s) starts.push_back(first + (end - first) * s / num_sections);
  return starts;
}

// Runs work(task) for every task, with a thread per section; starts as for Dealer. Results must not depend on
// which thread runs which task.
template <typename Work>
void parallel_sections(const std::vector<int64_t>& starts, const Work& work) {
  Dealer dealer(starts);
  const auto serve = [&](int64_t thread) {
    for (int64_t task = dealer.take(thread); task >= 0; task = dealer.take(thread)) work(task);
  };
  const int64_t num_threads = starts.size() - 1;
  if (num_threads == 1) return serve(0);
  parallel_for(num_threads, 1, [&](int64_t thread, int64_t) { serve(thread); });
}

// The same for the tasks [0, num_tasks), in sections of equal length.
template <typename Work>
void parallel_tasks(int64_t num_tasks, const Work& work) {
  const int64_t most = std::min<int64_t>(torch::stable::get_num_threads(), num_tasks);
  parallel_sections(even_sections(0, num_tasks, std::max<int64_t>(1, most)), work);
}

inline void atomic_min(std::atomic<int64_t>& target, int64_t value) {
  int64_t seen = target.load();
  while (value < seen && !target.compare_exchange_weak(seen, value)) {
  }
}

}  // namespace meshrec
