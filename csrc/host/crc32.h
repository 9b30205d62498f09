// CRC-32 as zlib computes it (the checksum of checkpoints and packages).
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshrec {

// The CRC-32 of bytes that follow on others, whose CRC-32 is `crc` (0: none).
uint32_t crc32(uint32_t crc, const void* bytes, size_t length);

// The CRC-32 of bytes [offset, offset + length) of an open file, which may be shorter: then -1, as after an
// error of the disk.
int64_t crc32_of_file(int file, int64_t offset, int64_t length, uint32_t crc);

}  // namespace meshrec
