// CRC-32 as computed by zlib: the checksum for checkpoints and packages.
#pragma once

#include <cstddef>
#include <cstdint>

namespace meshrec {

// Returns the CRC-32 over some bytes. `crc` is the CRC-32 over the bytes before them (0: none).
uint32_t crc32(uint32_t crc, const void* bytes, size_t length);

// Returns the CRC-32 over bytes [offset, offset + length) in an open file; -1 if the file is shorter or the
// disk fails.
int64_t crc32_of_file(int file, int64_t offset, int64_t length, uint32_t crc);

}  // namespace meshrec
