#include "host/mapping.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <mutex>

namespace meshrec {
namespace {

constexpr int kMaxMappings = 4096;

struct Slot {
  std::atomic<uintptr_t> begin{0};
  std::atomic<uintptr_t> end{0};  // 0: the slot is free
  std::atomic<uint64_t> lost{0};
  std::atomic<bool> misses{false};
};

// Static and atomic: a signal handler may neither lock nor allocate.
Slot slots[kMaxMappings];
std::atomic<int> num_slots{0};
// Lets lookups skip the search for the mapping if no file exceeds memory.
std::atomic<int> num_with_misses{0};
std::mutex changing;
// The handler that was set before ours; written once, by `set_handler`.
struct sigaction before{};
uintptr_t page_size = 4096;

Slot* slot_of(uintptr_t address) {
  const int count = num_slots.load(std::memory_order_acquire);
  for (int number = 0; number < count; ++number) {
    Slot& slot = slots[number];
    if (address < slot.end.load(std::memory_order_acquire) && address >= slot.begin.load()) return &slot;
  }
  return nullptr;
}

// Calls the previous handler. If that is the default, it is restored: the instruction then faults again, and
// ends the process as it would have without this handler.
void pass_on(int number, siginfo_t* info, void* context) {
  if (before.sa_flags & SA_SIGINFO) {
    before.sa_sigaction(number, info, context);
  } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
    before.sa_handler(number);
  } else {
    ::signal(number, SIG_DFL);
    if (info->si_code <= 0) ::raise(number);  // sent by a process: no instruction will fault again
  }
}

void on_sigbus(int number, siginfo_t* info, void* context) {
  const int saved = errno;
  const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
  // A positive code comes from the kernel; a signal sent by a process has no faulting address.
  Slot* slot = info->si_code > 0 ? slot_of(address) : nullptr;
  if (slot != nullptr) {
    void* page = reinterpret_cast<void*>(address / page_size * page_size);
    const int flags = MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS;
    if (::mmap(page, page_size, PROT_READ | PROT_WRITE, flags, -1, 0) != MAP_FAILED) {
      slot->lost.fetch_add(1);
      errno = saved;
      return;
    }
  }
  pass_on(number, info, context);
  errno = saved;
}

// Set only once: a handler set later in front of this one calls it, or ignores it on purpose. The caller
// holds `changing`.
bool set_handler() {
  static bool is_set = false;
  if (is_set) return true;
  page_size = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  struct sigaction ours{};
  ours.sa_sigaction = on_sigbus;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_RESTART;
  ::sigemptyset(&ours.sa_mask);
  if (::sigaction(SIGBUS, nullptr, &before) != 0) return false;
  is_set = ::sigaction(SIGBUS, &ours, nullptr) == 0;
  return is_set;
}

int guarded(uintptr_t address, size_t bytes) {
  const std::lock_guard lock(changing);
  if (!set_handler()) return -1;
  int number = 0;
  // `end` is written last, and makes the slot visible to the signal handler.
  while (number < num_slots.load() && slots[number].end.load() != 0) ++number;
  if (number == kMaxMappings) return -1;
  Slot& slot = slots[number];
  slot.lost = 0;
  slot.misses = false;
  slot.begin = address;
  slot.end.store(address + (bytes + page_size - 1) / page_size * page_size, std::memory_order_release);
  if (number == num_slots.load()) num_slots.store(number + 1, std::memory_order_release);
  return number;
}

}  // namespace

void* map_guarded(int file, size_t bytes, int* guard) {
  // No swap is reserved: few pages are written to, and a package may exceed memory.
  const int flags = MAP_PRIVATE | MAP_NORESERVE;
  void* address = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, file, 0);
  if (address == MAP_FAILED) return nullptr;
  *guard = guarded(reinterpret_cast<uintptr_t>(address), bytes);
  return address;
}

uint64_t lost_pages(int guard) { return guard < 0 ? 0 : slots[guard].lost.load(); }

void unmap_guarded(void* address, size_t bytes, int guard) {
  // Free the slot first: another mapping may get this address as soon as it is unmapped.
  if (guard >= 0) {
    if (slots[guard].misses.exchange(false)) --num_with_misses;
    slots[guard].end = 0;
  }
  ::munmap(address, bytes);
}

void expect_misses(int guard) {
  if (guard < 0 || slots[guard].misses.exchange(true)) return;
  const uintptr_t begin = slots[guard].begin;
  ::madvise(reinterpret_cast<void*>(begin), slots[guard].end - begin, MADV_RANDOM);
  ++num_with_misses;
}

bool is_partly_in_memory(const void* address) {
  if (num_with_misses.load(std::memory_order_relaxed) == 0) return false;
  const Slot* slot = slot_of(reinterpret_cast<uintptr_t>(address));
  return slot != nullptr && slot->misses;
}

namespace {

// Tells the system which ranges will be needed, in as few calls as it allows.
void advise(std::vector<iovec>& ranges) {
  size_t done = 0;
#if defined(__linux__) && defined(SYS_process_madvise) && defined(SYS_pidfd_open)
  // The system's limit on ranges per call (IOV_MAX).
  constexpr size_t kMaxAtOnce = 1024;
  const int self = int(::syscall(SYS_pidfd_open, ::getpid(), 0));
  while (self >= 0 && done < ranges.size()) {
    const size_t count = std::min(kMaxAtOnce, ranges.size() - done);
    if (::syscall(SYS_process_madvise, self, ranges.data() + done, count, MADV_WILLNEED, 0) < 0) break;
    done += count;
  }
  if (self >= 0) ::close(self);
#endif
  for (; done < ranges.size(); ++done) ::madvise(ranges[done].iov_base, ranges[done].iov_len, MADV_WILLNEED);
}

}  // namespace

void request_rows(const std::vector<const char*>& rows, int64_t row_bytes) {
  std::vector<uintptr_t> pages;
  for (const char* row : rows) {
    const auto begin = reinterpret_cast<uintptr_t>(row);
    for (uintptr_t page = begin / page_size; page <= (begin + row_bytes - 1) / page_size; ++page)
      pages.push_back(page);
  }
  std::sort(pages.begin(), pages.end());
  pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
  std::vector<iovec> ranges;
  for (const uintptr_t page : pages) {
    char* const at = reinterpret_cast<char*>(page * page_size);
    if (!ranges.empty() && static_cast<char*>(ranges.back().iov_base) + ranges.back().iov_len == at) {
      ranges.back().iov_len += page_size;
    } else {
      ranges.push_back({at, page_size});
    }
  }
  advise(ranges);
}

}  // namespace meshrec

extern "C" __attribute__((visibility("default"))) void meshrec_expect_misses(int guard) {
  meshrec::expect_misses(guard);
}

extern "C" __attribute__((visibility("default"))) void* meshrec_map(int file, size_t bytes, int* guard) {
  return meshrec::map_guarded(file, bytes, guard);
}

extern "C" __attribute__((visibility("default"))) uint64_t meshrec_lost_pages(int guard) {
  return meshrec::lost_pages(guard);
}

extern "C" __attribute__((visibility("default"))) void meshrec_unmap(void* address, size_t bytes, int guard) {
  meshrec::unmap_guarded(address, bytes, guard);
}
