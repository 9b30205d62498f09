// What kernels read straight from other processes; see host_link.cpp.
#pragma once

#include <cstdint>

namespace meshrec {

// Some bytes of the piece that a rank has for this one, in an exchange that it has started: where they lie if
// the rank is this one, else a copy in ``copy``. Null if they could not be read: the rank is gone.
const void* read_from_link(int64_t link, int64_t exchange, int64_t rank, int64_t offset, int64_t bytes,
                           void* copy);

}  // namespace meshrec
