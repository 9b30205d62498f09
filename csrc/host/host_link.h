// Lets kernels read directly from the memory of other processes; see host_link.cpp.
#pragma once

#include <cstdint>

namespace meshrec {

// Reads some bytes of the piece that a rank has for this rank, in an exchange that the rank has started.
// Returns the address: in this process's memory if the rank is this one, otherwise ``copy``, which receives
// the bytes. Null if the rank has ended.
const void* read_from_link(int64_t link, int64_t exchange, int64_t rank, int64_t offset, int64_t bytes,
                           void* copy);

// Error message for a kernel whose read returned null; comms/host_link.py recognizes the first words.
constexpr const char* kPeerLost = "the memory of a peer could not be read: it has ended";

}  // namespace meshrec
