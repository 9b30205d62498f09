#include "memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <algorithm>
#include <fstream>

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

bool outgrows_caches(int64_t num_bytes) {
  // Not sysconf: of a processor with several last levels it gives the sum.
  static const int64_t last_level = [] {
    int64_t kibibytes = 0;
    std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kibibytes;
    return kibibytes << 10;
  }();
  return last_level > 0 && num_bytes > last_level / 2;
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
