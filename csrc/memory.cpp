#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>

namespace meshrec {

void advise_huge_pages(void* memory, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) & ~(kHugePage - 1);
  // A refusal (no huge pages on this system) changes nothing but the speed.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type) {
  Tensor buffer = torch::stable::empty({sizes.data(), sizes.size()}, type);
  advise_huge_pages(buffer.mutable_data_ptr(), buffer.numel() * buffer.element_size());
  return buffer;
}

namespace {

void use_huge_pages(Tensor memory) {
  if (!memory.is_contiguous()) fail("use_huge_pages: the tensor must be contiguous");
  advise_huge_pages(memory.mutable_data_ptr(), memory.numel() * memory.element_size());
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("use_huge_pages", TORCH_BOX(&use_huge_pages)); }

}  // namespace
}  // namespace meshrec
