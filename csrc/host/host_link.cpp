// Moves messages between processes on a host. A rank publishes where in its memory the pieces for other ranks
// are, and these read them from there (process_vm_readv): a single copy, without a buffer in between.
//
// Every rank owns a small board in shared memory, which the other ranks map. It holds how many exchanges the
// rank has started, how many it has read completely, and where the pieces for exchanges in progress are.
// Exchanges are numbered, and all ranks start them in the same order. The entry points are plain C, because a
// handle is not a tensor; comms/host_link.py documents them.
// With sockets on loopback, messages took about a third of a step outside the dense part.
#include "host/host_link.h"

#if defined(__linux__)

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr uint32_t kSlots = 256;  // maximum number of exchanges in progress
// As _ERROR_BYTES in comms/host_link.py.
constexpr size_t kErrorBytes = 256;
constexpr auto kSpin = std::chrono::microseconds(50);
// how long a rank sleeps before it checks whether the peer is alive
constexpr int64_t kSleepNanoseconds = 50'000'000;

// Where a message, or a rank's part of it, is in the sender's memory.
struct Piece {
  uint64_t address;
  int64_t bytes;
};

// In shared memory, followed by the slots. Only the owner writes to it, except to ``sleepers``.
struct Board {
  uint64_t token;
  alignas(64) std::atomic<uint32_t> started;  // a futex
  std::atomic<uint32_t> sleepers;             // number of ranks that wait for ``started``
  std::atomic<uint32_t> closed;
  alignas(64) std::atomic<uint32_t> read;  // number of exchanges that the owner has read completely

  static size_t bytes(int64_t size) { return sizeof(Board) + kSlots * size * sizeof(Piece); }
  // The pieces for an exchange, one per rank.
  Piece* pieces(uint32_t number, int64_t size) {
    return reinterpret_cast<Piece*>(this + 1) + number % kSlots * size;
  }
};
static_assert(std::atomic<uint32_t>::is_always_lock_free);

enum Outcome { kDone = 0, kFailed = -1, kNotYet = -2 };

Outcome fail(char* error, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(error, kErrorBytes, format, arguments);
  va_end(arguments);
  return kFailed;
}

// Whether exchange ``number`` is among the first ``count``; both may wrap around at 2^32.
bool is_among(uint32_t number, uint32_t count) { return static_cast<int32_t>(count - number) > 0; }

struct Peer {
  int64_t pid = 0;
  int pidfd = -1;
  Board* board = nullptr;

  bool has_ended() const {
    pollfd ended{pidfd, POLLIN, 0};
    return poll(&ended, 1, 0) > 0;
  }
};

Board* map_board(int fd, int64_t size) {
  void* memory = mmap(nullptr, Board::bytes(size), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  return memory == MAP_FAILED ? nullptr : static_cast<Board*>(memory);
}

class Link {
 public:
  Link(int64_t rank, int64_t size) : rank_(rank), size_(size), peers_(size) {
    cpu_set_t cpus;
    const bool known = sched_getaffinity(0, sizeof cpus, &cpus) == 0;
    // With fewer cores than ranks, spinning may take the core from the rank that this one waits for.
    spin_ = known && CPU_COUNT(&cpus) >= size ? kSpin : kSpin.zero();
  }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  ~Link() {
    for (const Peer& peer : peers_) {
      if (peer.board != nullptr) munmap(peer.board, Board::bytes(size_));
      if (peer.pidfd >= 0) close(peer.pidfd);
    }
    if (fd_ >= 0) close(fd_);
  }

  Outcome create(uint64_t token, char* error) {
    fd_ = memfd_create("meshrec", MFD_CLOEXEC);
    if (fd_ < 0 || ftruncate(fd_, Board::bytes(size_)) != 0) {
      return fail(error, "memfd_create: %s", std::strerror(errno));
    }
    Peer& own = peers_[rank_];
    if ((own.board = map_board(fd_, size_)) == nullptr) return fail(error, "mmap: %s", std::strerror(errno));
    own.board->token = token;
    // Yama may allow only ancestors to read this process. Let processes from the same launcher read it, too.
    if (FILE* scope = std::fopen("/proc/sys/kernel/yama/ptrace_scope", "r")) {
      if (std::fgetc(scope) == '1') prctl(PR_SET_PTRACER, getppid(), 0, 0, 0);
      std::fclose(scope);
    }
    return kDone;
  }

  int fd() const { return fd_; }
  void* board() const { return peers_[rank_].board; }

  Outcome join(int64_t rank, int64_t pid, int fd, uint64_t address, uint64_t token, char* error) {
    Peer& peer = peers_[rank];
    peer.pid = pid;
    peer.pidfd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
    if (peer.pidfd < 0) return fail(error, "pidfd_open: %s", std::strerror(errno));
    // Checked first: in another PID namespace or on another host, the PID belongs to another process.
    uint64_t seen = 0;
    if (read_from(peer, &seen, address, sizeof seen, error) != kDone) return kFailed;
    if (seen != token) return fail(error, "process %lld is another one here", static_cast<long long>(pid));
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    const int shared = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (shared < 0) return fail(error, "open %s: %s", path.c_str(), std::strerror(errno));
    peer.board = map_board(shared, size_);
    close(shared);
    return peer.board != nullptr ? kDone : fail(error, "mmap: %s", std::strerror(errno));
  }

  // How many exchanges started by this rank have not been read by all ranks; these are always the latest.
  uint32_t num_unread() const {
    const uint32_t started = peers_[rank_].board->started.load();
    int32_t most = 0;
    for (const Peer& peer : peers_) {
      // A peer that skipped exchanges may be ahead.
      most = std::max(most, static_cast<int32_t>(started - peer.board->read.load()));
    }
    return most;
  }

  // ``sizes``: bytes per rank. All ranks read from the start of the message (``same``), or consecutive
  // pieces.
  Outcome start(const char* message, const int64_t* sizes, int64_t width, bool same, int64_t* number) {
    const std::lock_guard lock(mutex_);
    Board& own = *peers_[rank_].board;
    const uint32_t next = own.started.load();
    // The slot for this exchange still describes exchange `next - kSlots`, which a rank has not read yet.
    if (num_unread() >= kSlots) return kNotYet;
    Piece* pieces = own.pieces(next, size_);
    for (int64_t rank = 0; rank < size_; ++rank) {
      pieces[rank] = {reinterpret_cast<uint64_t>(message), width * sizes[rank]};
      if (!same) message += width * sizes[rank];
    }
    // Last: a peer reads the pieces as soon as it sees the new count.
    own.started.store(next + 1);
    wake(own);
    *number = next;
    return kDone;
  }

  // ``sizes``: elements per rank; ``result`` receives them in rank order.
  Outcome wait(uint32_t number, char* result, const int64_t* sizes, int64_t width, char* error) {
    std::vector<char*> at(size_, result);
    for (int64_t rank = 1; rank < size_; ++rank) at[rank] = at[rank - 1] + width * sizes[rank - 1];
    for (int64_t k = 0; k < size_; ++k) {
      // starts with this rank's own piece, while the other ranks get ready
      const int64_t rank = (rank_ + k) % size_;
      if (sizes[rank] == 0) continue;
      const Outcome outcome = read_piece(rank, number, at[rank], width * sizes[rank], error);
      if (outcome != kDone) return outcome;
    }
    finish(number);
    return kDone;
  }

  // Waits until all ranks have started the exchange.
  Outcome arrive(uint32_t number, const int64_t* sizes, int64_t width, char* error) const {
    for (int64_t rank = 0; rank < size_; ++rank) {
      const Outcome outcome =
          sizes[rank] == 0 ? kDone : await_piece(rank, number, width * sizes[rank], error);
      if (outcome != kDone) return outcome;
    }
    return kDone;
  }

  // See host_link.h.
  const void* read(uint32_t number, int64_t rank, int64_t offset, int64_t bytes, void* copy) const {
    const Peer& peer = peers_[rank];
    const uint64_t address = peer.board->pieces(number, size_)[rank_].address + offset;
    if (rank == rank_) return reinterpret_cast<const void*>(address);
    char error[kErrorBytes];
    return read_from(peer, copy, address, bytes, error) == kDone ? copy : nullptr;
  }

  void finish(uint32_t number) {
    const std::lock_guard lock(mutex_);
    Board& own = *peers_[rank_].board;
    uint32_t read = own.read.load();
    if (!is_among(number, read)) read_.insert(number);
    // `read` must count a prefix: an exchange read early is kept in the set until all earlier ones are read.
    while (read_.erase(read) > 0) ++read;
    own.read.store(read);
  }

  void leave(double seconds) {
    Board& own = *peers_[rank_].board;
    const auto deadline = Clock::now() + std::chrono::duration<double>(seconds);
    for (const Peer& peer : peers_) {
      if (&peer == &peers_[rank_] || peer.board == nullptr) continue;
      // This rank's memory must stay until the peers have read their pieces from it.
      while (is_among(peer.board->read.load(), own.started.load()) && peer.board->closed.load() == 0 &&
             !peer.has_ended() && Clock::now() < deadline) {
        usleep(1000);
      }
    }
    own.closed.store(1);
    wake(own);
  }

 private:
  static void wake(Board& own) {
    // Without sleepers, which is usual while ranks spin, no system call is needed.
    if (own.sleepers.load() > 0) syscall(SYS_futex, &own.started, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
  }

  Outcome await_piece(int64_t rank, uint32_t number, int64_t bytes, char* error) const {
    const Peer& peer = peers_[rank];
    const Outcome started = await_start(peer, number, error);
    if (started != kDone) return started;
    const Piece piece = peer.board->pieces(number, size_)[rank_];
    if (piece.bytes == bytes) return kDone;
    return fail(error, "the peer sends %lld bytes where %lld are expected",
                static_cast<long long>(piece.bytes), static_cast<long long>(bytes));
  }

  Outcome read_piece(int64_t rank, uint32_t number, char* result, int64_t bytes, char* error) const {
    const Peer& peer = peers_[rank];
    const Outcome arrived = await_piece(rank, number, bytes, error);
    if (arrived != kDone) return arrived;
    const Piece piece = peer.board->pieces(number, size_)[rank_];
    if (rank != rank_) return read_from(peer, result, piece.address, bytes, error);
    std::memcpy(result, reinterpret_cast<const void*>(piece.address), bytes);
    return kDone;
  }

  Outcome await_start(const Peer& peer, uint32_t number, char* error) const {
    Board& board = *peer.board;
    const auto is_ready = [&] { return is_among(number, board.started.load()); };
    if (is_ready()) return kDone;
    for (const auto end = Clock::now() + spin_; Clock::now() < end;) {
      if (is_ready()) return kDone;
    }
    const timespec time{0, kSleepNanoseconds};
    // Before `started` is read again: either this rank sees the new count, or the peer sees the sleeper and
    // wakes it.
    board.sleepers.fetch_add(1);
    const uint32_t seen = board.started.load();
    if (!is_among(number, seen)) syscall(SYS_futex, &board.started, FUTEX_WAIT, seen, &time, nullptr, 0);
    board.sleepers.fetch_sub(1);
    if (is_ready()) return kDone;
    // Check all peers: this one may be waiting for another rank that has ended.
    for (const Peer& each : peers_) {
      if (is_among(number, each.board->started.load())) continue;
      const auto pid = static_cast<long long>(each.pid);
      if (each.has_ended()) return fail(error, "the peer, process %lld, has ended", pid);
      if (each.board->closed.load() != 0) return fail(error, "the peer, process %lld, has left", pid);
    }
    return kNotYet;
  }

  static Outcome read_from(const Peer& peer, void* result, uint64_t address, int64_t bytes, char* error) {
    auto* at = static_cast<char*>(result);
    // The system may read fewer bytes than requested.
    while (bytes > 0) {
      const iovec here{at, static_cast<size_t>(bytes)};
      const iovec there{reinterpret_cast<void*>(address), static_cast<size_t>(bytes)};
      const ssize_t got = process_vm_readv(static_cast<pid_t>(peer.pid), &here, 1, &there, 1, 0);
      if (got <= 0) {
        return fail(error, "process_vm_readv from process %lld: %s", static_cast<long long>(peer.pid),
                    std::strerror(errno));
      }
      at += got, address += got, bytes -= got;
    }
    return kDone;
  }

  const int64_t rank_, size_;
  std::chrono::microseconds spin_;
  // The memory behind this rank's board; -1 until `create`. The peers open it through /proc.
  int fd_ = -1;
  std::vector<Peer> peers_;  // all ranks, including this one
  std::mutex mutex_;
  std::set<uint32_t> read_;  // exchanges read before an earlier exchange was read
};

}  // namespace

const void* meshrec::read_from_link(int64_t link, int64_t exchange, int64_t rank, int64_t offset,
                                    int64_t bytes, void* copy) {
  return reinterpret_cast<const Link*>(link)->read(static_cast<uint32_t>(exchange), rank, offset, bytes,
                                                   copy);
}

#define MESHREC_C extern "C" __attribute__((visibility("default")))

MESHREC_C void* meshrec_link_create(int64_t rank, int64_t size, uint64_t token, int64_t* fd,
                                    uint64_t* address, char* error) {
  auto link = std::make_unique<Link>(rank, size);
  if (link->create(token, error) != kDone) return nullptr;
  *fd = link->fd();
  *address = reinterpret_cast<uint64_t>(link->board());
  return link.release();
}

MESHREC_C int64_t meshrec_link_join(Link* link, int64_t rank, int64_t pid, int64_t fd, uint64_t address,
                                    uint64_t token, char* error) {
  return link->join(rank, pid, static_cast<int>(fd), address, token, error);
}

// start, wait and skip return how many exchanges by this rank have not been read by all ranks, or an Outcome.
MESHREC_C int64_t meshrec_link_start(Link* link, const void* message, const int64_t* sizes, int64_t width,
                                     int64_t same, int64_t* number) {
  const Outcome outcome = link->start(static_cast<const char*>(message), sizes, width, same != 0, number);
  return outcome == kDone ? link->num_unread() : int64_t{outcome};
}

MESHREC_C int64_t meshrec_link_wait(Link* link, int64_t number, void* result, const int64_t* sizes,
                                    int64_t width, char* error) {
  const Outcome outcome =
      link->wait(static_cast<uint32_t>(number), static_cast<char*>(result), sizes, width, error);
  return outcome == kDone ? link->num_unread() : int64_t{outcome};
}

MESHREC_C int64_t meshrec_link_arrive(const Link* link, int64_t number, const int64_t* sizes, int64_t width,
                                      char* error) {
  return link->arrive(static_cast<uint32_t>(number), sizes, width, error);
}

MESHREC_C int64_t meshrec_link_unread(const Link* link) { return link->num_unread(); }

MESHREC_C int64_t meshrec_link_skip(Link* link, int64_t number) {
  link->finish(static_cast<uint32_t>(number));
  return link->num_unread();
}

// Waits up to ``seconds`` for the other live ranks to read the exchanges they still need.
MESHREC_C void meshrec_link_close(Link* link, double seconds) {
  link->leave(seconds);
  delete link;
}

#else

const void* meshrec::read_from_link(int64_t, int64_t, int64_t, int64_t, int64_t, void*) { return nullptr; }

#endif  // __linux__
