// Memory for large tensors.
#pragma once

#include "stable_abi.h"

namespace meshrec {

// Asks the system to back memory that was not touched yet with huge pages: random rows of a large table then
// miss the TLB rarely, and large buffers fault a few times instead of thousands. Small memory is left alone.
void advise_huge_pages(void* memory, int64_t num_bytes);

// Whether this much, written at once, is gone from the caches before it is read: more than half of the last
// level. Never where the system does not tell the size.
bool outgrows_caches(int64_t num_bytes);

// An uninitialised CPU tensor, on huge pages where it is large.
Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type);

}  // namespace meshrec
