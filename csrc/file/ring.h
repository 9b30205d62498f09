// Many concurrent file transfers without a thread for each.
#pragma once

#include <cstdint>
#include <functional>
#include <utility>

namespace meshrec {

enum class Transfer { kRead, kWrite, kDone };

// Tasks [0, count) to transfer, each with a byte range in a file and a buffer of the same size.
struct Transfers {
  int64_t count;
  int64_t largest;  // bytes in the longest range
  // Returns position and size of the byte range for a task.
  std::function<std::pair<int64_t, int64_t>(int64_t task)> stretch;
  // Called with phase 0 before any transfer, then after every transfer with the number of transfers so far.
  // Fills or consumes the buffer, and returns the next transfer.
  std::function<Transfer(int64_t task, int phase, char* buffer)> advance;
  // Called if a transfer failed: kEndOfFile or an errno.
  std::function<void(int64_t task, int64_t cause)> failed;
};

// As END_OF_FILE in ops/records/naive.py.
constexpr int64_t kEndOfFile = -2;

// Performs all transfers with up to `in_flight` concurrent requests on an io_uring for this thread. Returns
// false, without having done anything, if the system has no io_uring.
bool transfer_on_ring(int file, const Transfers& transfers, int64_t in_flight);

// Performs the transfers of a task sequentially.
void transfer_task(int file, const Transfers& transfers, int64_t task);

}  // namespace meshrec
