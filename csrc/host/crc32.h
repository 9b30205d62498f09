// CRC-32 as zlib computes it (the checksum of checkpoints and packages).
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshrec {

// The CRC-32 of some bytes; `crc` is the CRC-32 of the bytes before them (0: there are none).
uint32_t crc32(uint32_t crc, const void* bytes, size_t length);

// The CRC-32 of bytes [offset, offset + length) of an open file; -1 if the file is shorter or the disk fails.
int64_t crc32_of_file(int file, int64_t offset, int64_t length, uint32_t crc);

}  // namespace meshrec
