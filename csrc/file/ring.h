// Many transfers of a file at a time, without a thread for each.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace meshrec {

enum class Transfer { kRead, kWrite, kDone };

// Tasks [0, count) to transfer, each with one stretch of a file and a buffer of the same size.
struct Transfers {
  int64_t count;
  int64_t largest;  // bytes of the longest stretch
  // The position and the size of a task's stretch.
  std::function<std::pair<int64_t, int64_t>(int64_t task)> stretch;
  // Called with phase 0 before anything is transferred, and after each transfer with the number of transfers
  // so far. Fills or uses the buffer, and returns the next transfer.
  std::function<Transfer(int64_t task, int phase, char* buffer)> advance;
  // A transfer failed: kEndOfFile or an errno.
  std::function<void(int64_t task, int64_t cause)> failed;
};

constexpr int64_t kEndOfFile = -2;

// Makes all transfers with up to `in_flight` requests at a time on an io_uring of this thread. Returns false,
// with nothing done, if the system has none.
bool transfer_on_ring(int file, const Transfers& transfers, int64_t in_flight);

// Makes the transfers of one task, one after the other.
void transfer_task(int file, const Transfers& transfers, int64_t task);

}  // namespace meshrec
