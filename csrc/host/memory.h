// Memory for large tensors.
#pragma once

#include <memory>

#include "stable_abi.h"

namespace meshrec {

// Requests huge pages for memory not yet touched: random row reads in a large table then rarely miss the TLB,
// and large buffers cause a few page faults instead of thousands. No effect on small memory.
void advise_huge_pages(void* memory, int64_t num_bytes);

// Whether this many bytes, written at once, will have left the caches before they are read: if they exceed
// half of the last-level cache. False if the cache size is unknown.
bool outgrows_caches(int64_t num_bytes);

// Deleter that returns memory to the allocator it came from.
struct Free {
  void operator()(void* memory) const;
};
using Memory = std::unique_ptr<void, Free>;

// Returns uninitialized memory from the retained buffers. Null if the size is too small or too large, or if
// buffers are not retained (see ``keep_freed_memory`` in ops/memory.py).
Memory kept_memory(size_t num_bytes);

[[noreturn]] void fail_for_memory(int64_t num_bytes);

// Returns an uninitialized CPU tensor: from the retained buffers, or with huge pages if large.
Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type);

}  // namespace meshrec
