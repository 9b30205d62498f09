#include "file/io_threads.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>

namespace meshrec {

namespace {

struct Job {
  const std::function<void(int64_t)>* work;
  int64_t count;
  int64_t helpers;  // number of threads that may still join
  // May exceed `count`: every thread that finds no task left has incremented it once.
  std::atomic<int64_t> next{0};
  int64_t active = 0;  // number of threads at work; guarded by the pool's mutex
  std::condition_variable ended;
};

class IoThreads {
 public:
  void run(int64_t count, int64_t threads, const std::function<void(int64_t)>& work) {
    const auto job = std::make_shared<Job>();
    job->work = &work, job->count = count, job->helpers = std::min(threads, count);
    std::unique_lock lock(mutex_);
    // The pool grows to the largest number ever requested, and never shrinks.
    for (; num_threads_ < threads; ++num_threads_) std::thread([this] { serve(); }).detach();
    jobs_.push_back(job);
    const int64_t wanted = job->helpers;
    if (wanted >= num_threads_) {
      wake_.notify_all();
    } else {
      for (int64_t i = 0; i < wanted; ++i) wake_.notify_one();
    }
    // Both conditions: no thread may have joined yet, or a thread may still work on the last task. Afterwards
    // no thread reads `work`, which lives on the caller's stack.
    job->ended.wait(lock, [&] { return job->active == 0 && job->next.load() >= job->count; });
    std::erase(jobs_, job);
  }

 private:
  void serve() {
    std::unique_lock lock(mutex_);
    for (;;) {
      std::shared_ptr<Job> job;
      wake_.wait(lock, [&] { return (job = open_job()) != nullptr; });
      --job->helpers, ++job->active;
      lock.unlock();
      for (int64_t task; (task = job->next.fetch_add(1)) < job->count;) (*job->work)(task);
      lock.lock();
      if (--job->active == 0) job->ended.notify_all();
    }
  }

  std::shared_ptr<Job> open_job() {
    for (const auto& job : jobs_)
      if (job->helpers > 0 && job->next.load() < job->count) return job;
    return nullptr;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::shared_ptr<Job>> jobs_;
  int64_t num_threads_ = 0;
};

}  // namespace

void run_on_io_threads(int64_t count, int64_t threads, const std::function<void(int64_t)>& work) {
  // Never destroyed: the threads run until the process ends.
  static IoThreads& all = *new IoThreads;
  static const pid_t owner = getpid();
  if (threads <= 0 || count <= 1 || getpid() != owner) {
    for (int64_t task = 0; task < count; ++task) work(task);
  } else {
    all.run(count, threads, work);
  }
}

}  // namespace meshrec
