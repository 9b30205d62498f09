// Memory for large tensors.
#pragma once

#include <memory>

#include "stable_abi.h"

namespace meshrec {

// Asks the system for huge pages under memory that was not touched yet: random rows of a large table then
// rarely miss the TLB, and large buffers fault a few times instead of thousands. Does nothing for small
// memory.
void advise_huge_pages(void* memory, int64_t num_bytes);

// Whether this many bytes, written at once, will have left the caches before they are read: more than half of
// the last level. False if the system does not tell its size.
bool outgrows_caches(int64_t num_bytes);

// Deleter that returns memory to where it came from.
struct Free {
  void operator()(void* memory) const;
};
using Memory = std::unique_ptr<void, Free>;

// Uninitialised memory from the kept buffers. Null if the size is too small or too large, or if no buffers
// are kept (see ``keep_freed_memory`` in ops/memory.py).
Memory kept_memory(size_t num_bytes);

[[noreturn]] void fail_for_memory(int64_t num_bytes);

// An uninitialised CPU tensor: from the kept buffers, or, if large, on huge pages.
Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type);

}  // namespace meshrec
