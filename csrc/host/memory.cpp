#include "host/memory.h"

#if defined(__linux__)
#include <pthread.h>
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
// Exists from torch 2.11 on. With older torch, no buffers are retained.
extern "C" __attribute__((weak)) AOTITorchError torch_from_blob(void*, int64_t, const int64_t*,
                                                                const int64_t*, int64_t, int32_t, int32_t,
                                                                int32_t, AtenTensorHandle*, int32_t,
                                                                const uint8_t*, int64_t,
                                                                void (*)(void*, void*), void*);
#define MESHREC_KEEPS_BUFFERS 1
#endif

namespace meshrec {

void advise_huge_pages(void* memory, int64_t num_bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHugePage = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + num_bytes) & ~(kHugePage - 1);
  // If the system refuses (no huge pages), only the speed changes.
  if (end > begin) (void)madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

bool outgrows_caches(int64_t num_bytes) {
  // Not sysconf, which returns the sum for a processor with several last-level caches.
  static const int64_t last_level = [] {
    int64_t kibibytes = 0;
    std::ifstream("/sys/devices/system/cpu/cpu0/cache/index3/size") >> kibibytes;
    return kibibytes << 10;
  }();
  return last_level > 0 && num_bytes > last_level / 2;
}

namespace {

int32_t shim_type(ScalarType type) {
  return torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
}

}  // namespace

#if defined(MESHREC_KEEPS_BUFFERS)

namespace {

// sizes of retained buffers, in bytes
constexpr size_t kSmallest = size_t(1) << 17, kLargest = size_t(1) << 25;

// Retains the large buffers of a training step, allocated first-fit in a single range of address space:
// buffers freed by a phase of the step are reused by the next phase. In malloc's heap, smaller blocks would
// settle between them. And glibc cuts aligned blocks out of larger ones, so a freed block does not fit the
// next request with the same size.
// Counted for a sharded model with 338 MB of tables: at the peak of a step, 83 MB were live, and 30 MB were
// such holes.
class Buffers {
 public:
  // Reserves the address range; returns false if the system does not have enough.
  bool open() {
    const std::lock_guard lock(mutex_);
    if (memory_ != nullptr) return true;
    void* memory =
        mmap(nullptr, kReserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return false;
    advise_huge_pages(memory, kReserved);
    memory_ = static_cast<char*>(memory);
    free_.emplace(0, kReserved);
    return true;
  }

  // Returns null if buffers are not retained, or if the range is full.
  void* take(size_t num_bytes) {
    num_bytes = (num_bytes + kPage - 1) / kPage * kPage;
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(free_.begin(), free_.end(),
                                    [&](const auto& piece) { return piece.second >= num_bytes; });
    if (found == free_.end()) return nullptr;
    const auto [begin, size] = *found;
    free_.erase(found);
    if (size > num_bytes) free_.emplace(begin + num_bytes, size - num_bytes);
    taken_.emplace(begin, num_bytes);
    touched_ = std::max(touched_, begin + num_bytes);
    return memory_ + begin;
  }

  // Returns whether the memory belongs to this range.
  bool give_back(void* memory) {
    const std::lock_guard lock(mutex_);
    const size_t offset = static_cast<char*>(memory) - memory_;
    if (memory_ == nullptr || offset >= kReserved) return false;
    // Moves the map node instead of allocating one: freeing memory must not fail.
    auto piece = free_.insert(taken_.extract(offset)).position;
    if (const auto next = std::next(piece);
        next != free_.end() && piece->first + piece->second == next->first) {
      piece->second += next->second;
      free_.erase(next);
    }
    if (piece != free_.begin()) {
      const auto previous = std::prev(piece);
      if (previous->first + previous->second == piece->first) {
        previous->second += piece->second;
        free_.erase(piece);
        piece = previous;
      }
    }
    // Returns free memory at the end to the system, except kKept bytes that the next step may need.
    if (piece->first + kKept < touched_ && piece->first + piece->second >= touched_) {
      const size_t end = piece->first + kKept;
      (void)madvise(memory_ + end, touched_ - end, MADV_DONTNEED);
      touched_ = end;
    }
    return true;
  }

  std::mutex& mutex() { return mutex_; }

 private:
  // kReserved is address space only (16 GiB); pages are taken when they are first written. kKept: 256 MiB.
  static constexpr size_t kPage = 4096, kReserved = size_t(1) << 34, kKept = size_t(1) << 28;

  std::mutex mutex_;
  char* memory_ = nullptr;
  size_t touched_ = 0;                     // no page beyond has been touched
  std::map<size_t, size_t> free_, taken_;  // sizes in bytes, by offset
};

// Never destroyed: tensors may be freed after all other objects.
Buffers& buffers() {
  static Buffers& all = *new Buffers;
  return all;
}

Tensor tensor_over(Memory memory, const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t k = sizes.size(); k-- > 1;) strides[k - 1] = strides[k] * sizes[k];
  AtenTensorHandle tensor;
  const auto free_it = [](void* data, void*) { Free()(data); };
  STABLE_TORCH_ERROR_CODE_CHECK(torch_from_blob(
      memory.get(), int64_t(sizes.size()), sizes.data(), strides.data(), 0, shim_type(type),
      aoti_torch_device_type_cpu(), -1, &tensor, aoti_torch_layout_strided(), nullptr, 0, free_it, nullptr));
  // From here on, the tensor's deleter frees the memory.
  (void)memory.release();
  return Tensor(tensor);
}

}  // namespace

void Free::operator()(void* memory) const {
  if (!buffers().give_back(memory)) std::free(memory);
}

Memory kept_memory(size_t num_bytes) {
  const bool fits = num_bytes >= kSmallest && num_bytes <= kLargest;
  return Memory(fits ? buffers().take(num_bytes) : nullptr);
}

extern "C" __attribute__((visibility("default"))) bool meshrec_keep_buffers() {
  if (torch_from_blob == nullptr) return false;
  static const int registered =
      // A child forked while another thread holds the mutex could never lock it. So fork waits for the mutex,
      // and both processes release it.
      pthread_atfork([] { buffers().mutex().lock(); }, [] { buffers().mutex().unlock(); },
                     [] { buffers().mutex().unlock(); });
  return registered == 0 && buffers().open();
}

#else

namespace {

Tensor tensor_over(Memory, const std::vector<int64_t>&, ScalarType) { fail("no buffers are kept here"); }

}  // namespace

void Free::operator()(void* memory) const { std::free(memory); }

Memory kept_memory(size_t) { return nullptr; }

extern "C" __attribute__((visibility("default"))) bool meshrec_keep_buffers() { return false; }

#endif

void fail_for_memory(int64_t num_bytes) {
  throw std::runtime_error("not enough memory: could not allocate " + std::to_string(num_bytes) +
                           " bytes for a batch's ids or embeddings; use smaller batches, or more ranks");
}

Tensor empty_buffer(std::vector<int64_t> sizes, ScalarType type) {
  int64_t num_bytes = aoti_torch_dtype_element_size(shim_type(type));
  for (int64_t size : sizes)
    if (size < 0 || __builtin_mul_overflow(num_bytes, size, &num_bytes))
      fail("a buffer cannot have ", size,
           " elements along a dimension: from 0 on, and below 2^63 bytes in all.");
  if (Memory memory = kept_memory(num_bytes)) return tensor_over(std::move(memory), sizes, type);
  std::optional<Tensor> buffer;
  try {
    buffer = torch::stable::empty({sizes.data(), sizes.size()}, type);
  } catch (const std::runtime_error&) {  // without a cause, but such sizes fail only for lack of memory
    fail_for_memory(num_bytes);
  }
  advise_huge_pages(buffer->mutable_data_ptr(), num_bytes);
  return *buffer;
}

namespace {

void use_huge_pages(Tensor memory) {
  if (!memory.is_contiguous()) fail("use_huge_pages: the tensor must be contiguous");
  advise_huge_pages(memory.mutable_data_ptr(), memory.numel() * memory.element_size());
}

Tensor new_buffer(Tensor like, int64_t num_elements) {
  return empty_buffer({num_elements}, like.scalar_type());
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("use_huge_pages", TORCH_BOX(&use_huge_pages));
  m.impl("new_buffer", TORCH_BOX(&new_buffer));
}

}  // namespace
}  // namespace meshrec
