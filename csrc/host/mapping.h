// Files that are mapped into memory and may be cut short meanwhile.
//
// Whoever reads a mapped page behind the end of its file gets SIGBUS, which ends the process. A guarded
// mapping survives that: the handler of SIGBUS puts a page of zeros where the file had one, and counts. The
// reader looks at the count after it has computed, and discards results that were computed from zeros. Every
// other SIGBUS goes to the handler that was there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshrec {

// Map the first `bytes` of an open file, privately: a page that is written to becomes this process's own.
// Returns nullptr and sets errno on failure. `guard` is the number that the functions below need; -1 if there
// are too many mappings already, or if the handler cannot be set: the mapping then has no guard.
void* map_guarded(int file, size_t bytes, int* guard);

// The number of pages of a mapping that were lost so far; 0 without a guard.
uint64_t lost_pages(int guard);

void unmap_guarded(void* address, size_t bytes, int guard);

// Says that a mapping holds more than memory does: the system reads single pages of it from then on, and
// lookups request all pages of a batch before they read the first (`request_rows`). Otherwise a lookup would
// wait for one page after the other.
void expect_misses(int guard);

// Whether an address lies in a mapping of which pages are expected to be missing.
bool is_partly_in_memory(const void* address);

// Requests the pages of some rows of `row_bytes` bytes each. The disk reads them at the same time.
void request_rows(const std::vector<const char*>& rows, int64_t row_bytes);

}  // namespace meshrec
