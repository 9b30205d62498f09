// The limit of a disk: threads that read given blocks of a file and do nothing with them.
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <thread>
#include <vector>

// Returns seconds; below 0 if a read fails.
extern "C" double read_blocks(int file, const int64_t* positions, int64_t count, int64_t size, int threads) {
  std::atomic<int64_t> next{0};
  std::atomic<bool> failed{false};
  const auto work = [&] {
    void* memory = std::aligned_alloc(4096, (size + 4095) / 4096 * 4096);
    for (int64_t i; (i = next.fetch_add(1)) < count;)
      if (pread(file, memory, size, positions[i]) != size) failed = true;
    std::free(memory);
  };
  const auto begin = std::chrono::steady_clock::now();
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back(work);
  for (std::thread& each : all) each.join();
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
  return failed ? -1 : taken.count();
}
