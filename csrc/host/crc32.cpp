#include "host/crc32.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <memory>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace meshrec {
namespace {

constexpr uint32_t kPolynomial = 0xEDB88320;  // zlib's, bits reversed
constexpr size_t kBuffer = 1 << 18;           // bytes per read: they fit into the L2 cache

// tables[k][b]: CRC of byte b followed by k zero bytes.
using Tables = std::array<std::array<uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (size_t k = 1; k < tables.size(); ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t before = tables[k - 1][byte];
      tables[k][byte] = (before >> 8) ^ tables[0][before & 255];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// Processes eight bytes at a time with table lookups. `crc` is without the inversions at both ends.
uint32_t by_tables(uint32_t crc, const unsigned char* bytes, size_t length) {
  for (; length >= 8; bytes += 8, length -= 8) {
    uint32_t next = crc;
    for (int k = 0; k < 4; ++k) next ^= static_cast<uint32_t>(bytes[k]) << (8 * k);
    crc = kTables[7][next & 255] ^ kTables[6][(next >> 8) & 255] ^ kTables[5][(next >> 16) & 255] ^
          kTables[4][next >> 24] ^ kTables[3][bytes[4]] ^ kTables[2][bytes[5]] ^ kTables[1][bytes[6]] ^
          kTables[0][bytes[7]];
  }
  for (; length > 0; ++bytes, --length) crc = (crc >> 8) ^ kTables[0][(crc ^ *bytes) & 255];
  return crc;
}

#if defined(__x86_64__)

// The first step loads four vectors of 16 bytes.
constexpr size_t kMinFolded = 64;

// Folds 64 bytes into the next 64 with carry-less products: V. Gopal et al., "Fast CRC Computation for
// Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009), with the constants for this polynomial.
// `length` must be a multiple of 16 and at least `kMinFolded`.
__attribute__((target("pclmul,sse4.1"))) uint32_t folded(uint32_t crc, const unsigned char* bytes,
                                                         size_t length) {
  const auto load = [](const unsigned char* at) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
  };
  const __m128i by_64 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i by_16 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i by_8 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i sum[4];
  for (int lane = 0; lane < 4; ++lane) sum[lane] = load(bytes + 16 * lane);
  sum[0] = _mm_xor_si128(sum[0], _mm_cvtsi32_si128(static_cast<int>(crc)));
  for (bytes += 64, length -= 64; length >= 64; bytes += 64, length -= 64) {
    for (int lane = 0; lane < 4; ++lane) {
      const __m128i low = _mm_clmulepi64_si128(sum[lane], by_64, 0x00);
      const __m128i high = _mm_clmulepi64_si128(sum[lane], by_64, 0x11);
      sum[lane] = _mm_xor_si128(_mm_xor_si128(low, high), load(bytes + 16 * lane));
    }
  }
  __m128i all = sum[0];
  const auto fold = [&](__m128i next) __attribute__((target("pclmul,sse4.1"))) {
    const __m128i low = _mm_clmulepi64_si128(all, by_16, 0x00);
    const __m128i high = _mm_clmulepi64_si128(all, by_16, 0x11);
    all = _mm_xor_si128(_mm_xor_si128(low, high), next);
  };
  for (int lane = 1; lane < 4; ++lane) fold(sum[lane]);
  for (; length > 0; bytes += 16, length -= 16) fold(load(bytes));
  // Reduces 128 bits to 96, then to 64, then to the 32 bits of the remainder.
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  all = _mm_xor_si128(_mm_srli_si128(all, 8), _mm_clmulepi64_si128(all, by_16, 0x10));
  all = _mm_xor_si128(_mm_srli_si128(all, 4), _mm_clmulepi64_si128(_mm_and_si128(all, low_words), by_8, 0));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(all, low_words), barrett, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), barrett, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(all, quotient), 1));
}

bool can_fold() {
  static const bool can = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  return can;
}

#endif

}  // namespace

uint32_t crc32(uint32_t crc, const void* bytes, size_t length) {
  const auto* at = static_cast<const unsigned char*>(bytes);
  // zlib inverts the value before and after.
  crc = ~crc;
#if defined(__x86_64__)
  if (length >= kMinFolded && can_fold()) {
    const size_t whole = length / 16 * 16;
    crc = folded(crc, at, whole);
    at += whole;
    length -= whole;
  }
#endif
  return ~by_tables(crc, at, length);
}

int64_t crc32_of_file(int file, int64_t offset, int64_t length, uint32_t crc) {
  // Reads into a buffer that stays in the cache: mapping the file would cause a page fault every few pages.
  const auto buffer = std::make_unique_for_overwrite<unsigned char[]>(kBuffer);
  while (length > 0) {
    const auto wanted = static_cast<size_t>(std::min<int64_t>(length, kBuffer));
    const ssize_t count = ::pread(file, buffer.get(), wanted, offset);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) return -1;
    crc = crc32(crc, buffer.get(), static_cast<size_t>(count));
    offset += count;
    length -= count;
  }
  return crc;
}

}  // namespace meshrec

extern "C" __attribute__((visibility("default"))) uint32_t meshrec_crc32(uint32_t crc, const void* bytes,
                                                                         size_t length) {
  return meshrec::crc32(crc, bytes, length);
}

extern "C" __attribute__((visibility("default"))) int64_t meshrec_crc32_of_file(int file, int64_t offset,
                                                                                int64_t length,
                                                                                uint32_t crc) {
  return meshrec::crc32_of_file(file, offset, length, crc);
}
