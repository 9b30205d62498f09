// Memory for large tensors.
#pragma once

#include <memory>

#include "stable_abi.h"

namespace meshrec {

// Asks the system to back memory that was not touched yet with huge pages: random rows of a large table then
// miss the TLB rarely, and large buffers fault a few times instead of thousands. Small memory is left alone.
void advise_huge_pages(void* memory, int64_t num_bytes);

// Whether this much, written at once, is gone from the caches before it is read: more than half of the last
// level. Never where the system does not tell the size.
bool outgrows_caches(int64_t num_bytes);

// Memory that returns to where it came from.
struct Free {
  void operator()(void* memory) const;
};
using Memory = std::unique_ptr<void, Free>;

// Uninitialised memory from among the kept buffers, or null: it is small or large, or nothing is kept (see
// ``keep_freed_memory`` in ops/memory.py).
Memory kept_memory(size_t num_bytes);

[[noreturn]] void fail_for_memory(int64_t num_bytes);

// An uninitialised CPU tensor, from among the kept buffers or on huge pages where it is large.
Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type);

}  // namespace meshrec
