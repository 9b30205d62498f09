// Threads that wait for a disk. They are apart from torch's threads: there are more of them than processors,
// and they sleep nearly always.
#pragma once

#include <cstdint>
#include <functional>

namespace meshrec {

// Runs work(task) for each task of [0, count) on up to `threads` threads, and waits for the end. With no
// thread, or in a forked child, which has none of its parent's threads, the caller does the work. `work` must
// not throw.
void run_on_io_threads(int64_t count, int64_t threads, const std::function<void(int64_t)>& work);

}  // namespace meshrec
