#include "file/ring.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <tuple>
#include <vector>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#if defined(IORING_SETUP_DEFER_TASKRUN)
#define MESHREC_HAS_RING 1
#endif
#endif

namespace meshrec {

namespace {

constexpr int64_t kAlignment = 4096;
// Buffers for lanes start at multiples of a sector, as direct I/O (O_DIRECT) requires.
constexpr int64_t kSector = 512;

struct FreeAligned {
  void operator()(char* memory) const { std::free(memory); }
};

// Returns per-thread memory the disk can access directly; null if there is none.
char* transfer_buffer(int64_t num_bytes) {
  thread_local std::unique_ptr<char, FreeAligned> memory;
  thread_local int64_t size = 0;
  if (size < num_bytes) {
    size = (num_bytes + kAlignment - 1) / kAlignment * kAlignment;
    memory.reset(static_cast<char*>(std::aligned_alloc(kAlignment, size)));
    if (memory == nullptr) size = 0;
  }
  return memory.get();
}

// Transfers all bytes. Returns 0, kEndOfFile or errno.
template <typename Call>
int64_t transfer_all(const Call& call, int file, char* memory, int64_t num_bytes, int64_t position) {
  while (num_bytes > 0) {
    const ssize_t done = call(file, memory, size_t(num_bytes), off_t(position));
    if (done < 0 && errno == EINTR) continue;
    if (done < 0) return errno;
    if (done == 0) return kEndOfFile;
    memory += done, position += done, num_bytes -= done;
  }
  return 0;
}

}  // namespace

void transfer_task(int file, const Transfers& transfers, int64_t task) {
  const auto [position, size] = transfers.stretch(task);
  char* const memory = transfer_buffer(size);
  if (memory == nullptr) return transfers.failed(task, ENOMEM);
  Transfer next = transfers.advance(task, 0, memory);
  for (int phase = 1; next != Transfer::kDone; ++phase) {
    const int64_t cause = next == Transfer::kRead ? transfer_all(::pread, file, memory, size, position)
                                                  : transfer_all(::pwrite, file, memory, size, position);
    if (cause != 0) return transfers.failed(task, cause);
    next = transfers.advance(task, phase, memory);
  }
}

#ifdef MESHREC_HAS_RING

namespace {

// At least the number of lanes, and a lane has one request in flight: neither queue can overflow.
constexpr unsigned kEntries = 256;
constexpr int64_t kMaxBytes = 1 << 22;  // maximum buffer bytes per thread

// An io_uring for a single thread; its pages are shared with the kernel.
class Ring {
 public:
  Ring() : owner_(getpid()) {
    io_uring_params given{};
    // the least overhead for a single thread
    given.flags = IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN;
    file_ = setup(given);
    if (file_ < 0 && errno == EINVAL) {
      // Kernels before 6.1 do not know these flags, and return EINVAL.
      given = io_uring_params{};
      file_ = setup(given);
    }
    if (file_ < 0) return;
    queue_bytes_ = given.sq_off.array + given.sq_entries * sizeof(unsigned);
    done_bytes_ = given.cq_off.cqes + given.cq_entries * sizeof(io_uring_cqe);
    entry_bytes_ = given.sq_entries * sizeof(io_uring_sqe);
    queue_ = mapped(queue_bytes_, IORING_OFF_SQ_RING);
    done_ = mapped(done_bytes_, IORING_OFF_CQ_RING);
    entries_ = reinterpret_cast<io_uring_sqe*>(mapped(entry_bytes_, IORING_OFF_SQES));
    if (queue_ == nullptr || done_ == nullptr || entries_ == nullptr) {
      close();
      return;
    }
    tail_ = reinterpret_cast<unsigned*>(queue_ + given.sq_off.tail);
    order_ = reinterpret_cast<unsigned*>(queue_ + given.sq_off.array);
    mask_ = given.sq_entries - 1;
    done_head_ = reinterpret_cast<unsigned*>(done_ + given.cq_off.head);
    done_tail_ = reinterpret_cast<unsigned*>(done_ + given.cq_off.tail);
    completions_ = reinterpret_cast<io_uring_cqe*>(done_ + given.cq_off.cqes);
    done_mask_ = given.cq_entries - 1;
  }
  ~Ring() { close(); }
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;

  // A forked child inherits the pages of the parent's ring, and must not touch them.
  bool is_usable() const { return file_ >= 0 && getpid() == owner_; }

  void push(bool write, int file, char* memory, int64_t size, int64_t position, uint64_t tag) {
    io_uring_sqe& entry = entries_[*tail_ & mask_];
    std::memset(&entry, 0, sizeof entry);
    entry.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
    entry.fd = file;
    entry.addr = reinterpret_cast<uint64_t>(memory);
    entry.len = unsigned(size);
    entry.off = uint64_t(position);
    entry.user_data = tag;
    order_[*tail_ & mask_] = *tail_ & mask_;
    // Release: the kernel must not see the new tail before the entry.
    __atomic_store_n(tail_, *tail_ + 1, __ATOMIC_RELEASE);
    ++num_new_;
  }
  // Submits the pushed requests, and waits for `wanted` completions. Returns 0 or errno.
  int submit(unsigned wanted) {
    for (;;) {
      const long taken =
          syscall(__NR_io_uring_enter, file_, num_new_, wanted, IORING_ENTER_GETEVENTS, nullptr, 0);
      if (taken >= 0) {
        num_new_ -= unsigned(taken);
        if (num_new_ == 0) return 0;
      } else if (errno != EINTR && errno != EAGAIN && errno != EBUSY) {
        return errno;
      }
    }
  }
  template <typename Take>
  void completed(const Take& take) {
    unsigned head = *done_head_;
    // Acquire: the results must not be read before the tail.
    const unsigned end = __atomic_load_n(done_tail_, __ATOMIC_ACQUIRE);
    for (; head != end; ++head) {
      const io_uring_cqe& each = completions_[head & done_mask_];
      take(each.user_data, each.res);
    }
    // Release: the system may overwrite the results once it sees the new head.
    __atomic_store_n(done_head_, head, __ATOMIC_RELEASE);
  }

 private:
  static int setup(io_uring_params& given) { return int(syscall(__NR_io_uring_setup, kEntries, &given)); }
  char* mapped(size_t bytes, int64_t offset) const {
    void* const found =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, offset);
    return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
  }
  void close() {
    if (queue_ != nullptr) ::munmap(queue_, queue_bytes_);
    if (done_ != nullptr) ::munmap(done_, done_bytes_);
    if (entries_ != nullptr) ::munmap(entries_, entry_bytes_);
    queue_ = done_ = nullptr, entries_ = nullptr;
    if (file_ >= 0 && getpid() == owner_) ::close(file_);
    file_ = -1;
  }

  const pid_t owner_;
  int file_ = -1;
  char *queue_ = nullptr, *done_ = nullptr;
  io_uring_sqe* entries_ = nullptr;
  size_t queue_bytes_ = 0, done_bytes_ = 0, entry_bytes_ = 0;
  unsigned *tail_ = nullptr, *order_ = nullptr, *done_head_ = nullptr, *done_tail_ = nullptr;
  unsigned mask_ = 0, done_mask_ = 0, num_new_ = 0;
  io_uring_cqe* completions_ = nullptr;
};

// A task with a request in flight.
struct Lane {
  int64_t task = -1;
  int phase = 0;
  Transfer kind = Transfer::kDone;
  int64_t position = 0, size = 0, done = 0;
};

}  // namespace

bool transfer_on_ring(int file, const Transfers& transfers, int64_t in_flight) {
  thread_local Ring ring;
  if (!ring.is_usable()) return false;
  const int64_t room = std::max<int64_t>(1, (transfers.largest + kSector - 1) / kSector * kSector);
  const int64_t num_lanes = std::clamp<int64_t>(std::min(in_flight, kMaxBytes / room), 1,
                                                std::min<int64_t>(kEntries, transfers.count));
  char* const memory = transfer_buffer(num_lanes * room);
  if (memory == nullptr) return false;
  std::vector<Lane> lanes(static_cast<size_t>(num_lanes));
  int64_t next = 0, num_busy = 0;
  const auto buffer = [&](size_t lane) { return memory + int64_t(lane) * room; };
  const auto push = [&](size_t number) {
    const Lane& lane = lanes[number];
    ring.push(lane.kind == Transfer::kWrite, file, buffer(number) + lane.done, lane.size - lane.done,
              lane.position + lane.done, number);
  };
  // Continues the task in a lane, or starts new tasks, until a task has a request.
  const auto fill = [&](size_t number) {
    Lane& lane = lanes[number];
    for (;;) {
      if (lane.task >= 0) {
        lane.kind = transfers.advance(lane.task, lane.phase, buffer(number));
        if (lane.kind != Transfer::kDone) {
          lane.done = 0;
          push(number);
          return true;
        }
      }
      if (next >= transfers.count) return false;
      lane = Lane{.task = next++};
      std::tie(lane.position, lane.size) = transfers.stretch(lane.task);
    }
  };
  for (size_t number = 0; number < lanes.size(); ++number) num_busy += fill(number);
  while (num_busy > 0) {
    // Waiting for several completions at once saves system calls; meanwhile, the other requests keep the disk
    // busy.
    const int failure = ring.submit(unsigned(std::max<int64_t>(1, std::min(num_busy, num_lanes / 4))));
    if (failure != 0) std::abort();  // the kernel may still write to the buffers
    ring.completed([&](uint64_t number, int result) {
      Lane& lane = lanes[number];
      if (result == -EINTR || result == -EAGAIN) return push(number);
      // A short transfer: request the remaining bytes.
      if (result > 0 && (lane.done += result) < lane.size) return push(number);
      if (result <= 0) {
        transfers.failed(lane.task, result < 0 ? -result : kEndOfFile);
        lane.task = -1;
      }
      ++lane.phase;
      if (!fill(number)) --num_busy;
    });
  }
  return true;
}

#else

bool transfer_on_ring(int, const Transfers&, int64_t) { return false; }

#endif

}  // namespace meshrec
