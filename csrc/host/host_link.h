// Lets kernels read straight from other processes' memory; see host_link.cpp.
#pragma once

#include <cstdint>

namespace meshrec {

// Reads some bytes of the piece that a rank has for this one, in an exchange that the rank has started.
// Returns where they lie if the rank is this one, else ``copy``, which gets them. Null if the rank is gone.
const void* read_from_link(int64_t link, int64_t exchange, int64_t rank, int64_t offset, int64_t bytes,
                           void* copy);

// The error of a kernel whose read returned null; comms/host_link.py knows its first words.
constexpr const char* kPeerLost = "the memory of a peer could not be read: it has ended";

}  // namespace meshrec
