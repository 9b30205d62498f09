// Threads waiting for a disk. Separate from torch's threads, because they outnumber the processors and
// nearly always sleep.
#pragma once

#include <cstdint>
#include <functional>

namespace meshrec {

// Runs work(task) for tasks [0, count) on up to `threads` threads, and waits until all are done. The calling
// thread does the work if `threads` is 0, or in a forked child, which does not inherit threads. `work` must
// not throw.
void run_on_io_threads(int64_t count, int64_t threads, const std::function<void(int64_t)>& work);

}  // namespace meshrec
