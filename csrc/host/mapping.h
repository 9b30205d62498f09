// Memory-mapped files that may be truncated by another process.
//
// A read from a mapped page past the end of the file raises SIGBUS, which ends the process. A guarded mapping
// survives this: the SIGBUS handler replaces the page by zeros, and counts it. The reader checks the count
// after the computation, and discards results computed from zeros. Any other SIGBUS is passed to the previous
// handler.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshrec {

// Maps the first `bytes` of an open file privately: a page that is written to is copied. Returns nullptr and
// sets errno on failure. `guard` receives a number for the functions below; -1 if there are too many
// mappings, or if the handler cannot be set: then the mapping is unguarded.
void* map_guarded(int file, size_t bytes, int* guard);

// Returns how many pages in a mapping have been lost so far; 0 without a guard.
uint64_t lost_pages(int guard);

void unmap_guarded(void* address, size_t bytes, int guard);

// Declares that a mapping exceeds memory. The system then reads single pages, and lookups request all pages
// for a batch before they read the first (`request_rows`). Otherwise a lookup would wait for one page after
// another.
void expect_misses(int guard);

// Whether an address is in a mapping for which expect_misses was called.
bool is_partly_in_memory(const void* address);

// Requests the pages that hold some rows with `row_bytes` bytes each. The disk reads these pages
// concurrently.
void request_rows(const std::vector<const char*>& rows, int64_t row_bytes);

}  // namespace meshrec
