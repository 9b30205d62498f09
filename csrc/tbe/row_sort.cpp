#include "tbe/row_sort.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

namespace meshrec {

namespace {

// 2048 counters per pass: 8 KiB, so the counters for all passes stay in the L1 cache.
constexpr int kMaxDigitBits = 11;
// Ranges of tables up to about 100k rows. Counting these in one pass, instead of a radix sort, took 3 % off
// the update of 8 such tables.
constexpr uint32_t kMaxCountedRows = 2048;

void insertion_sort(Pair* pairs, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Pair pair = pairs[i];
    int64_t j = i;
    for (; j > 0 && pairs[j - 1].row > pair.row; --j) pairs[j] = pairs[j - 1];
    pairs[j] = pair;
  }
}

// Radix sort, least significant digit first; a single pass over the pairs counts all digits. Returns where
// the sorted pairs are: `pairs` or `spare`.
template <int kPasses>
const Pair* radix_sort_in(Pair* pairs, Pair* spare, int64_t count, uint32_t first_row, int digit_bits) {
  const uint32_t mask = (1u << digit_bits) - 1;
  uint32_t counts[kPasses][1 << kMaxDigitBits];
  for (int pass = 0; pass < kPasses; ++pass) std::memset(counts[pass], 0, sizeof(uint32_t) << digit_bits);
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t key = pairs[i].row - first_row;
    for (int pass = 0; pass < kPasses; ++pass) ++counts[pass][key >> (pass * digit_bits) & mask];
  }
  Pair* from = pairs;
  Pair* to = spare;
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t position = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) position += std::exchange(counts[pass][digit], position);
    const int shift = pass * digit_bits;
    for (int64_t i = 0; i < count; ++i) {
      const Pair pair = from[i];
      to[counts[pass][(pair.row - first_row) >> shift & mask]++] = pair;
    }
    std::swap(from, to);
  }
  return from;
}

// Counting sort in a single pass, with a counter per row. Four counters share a word, so a single
// multiplication adds them up.
const Pair* counting_sort(const Pair* pairs, Pair* spare, int64_t count, uint32_t first_row,
                          uint32_t num_rows) {
  static_assert(std::endian::native == std::endian::little);
  constexpr uint64_t kEach = 0x0001000100010001;
  uint16_t counts[kMaxCountedRows];
  const uint32_t end = (num_rows + 3) / 4 * 4;
  std::memset(counts, 0, end * sizeof(uint16_t));
  for (int64_t i = 0; i < count; ++i) ++counts[pairs[i].row - first_row];
  uint64_t position = 0;
  for (uint32_t row = 0; row < end; row += 4) {
    uint64_t four;
    std::memcpy(&four, counts + row, sizeof(four));
    // Counters do not carry into each other: every sum is at most `count`, which fits 16 bits.
    const uint64_t sums = four * kEach, starts = (sums << 16) + position * kEach;
    std::memcpy(counts + row, &starts, sizeof(starts));
    position += sums >> 48;
  }
  for (int64_t i = 0; i < count; ++i) spare[counts[pairs[i].row - first_row]++] = pairs[i];
  return spare;
}

}  // namespace

const Pair* sort_by_row(Pair* pairs, Pair* spare, int64_t count, uint32_t first_row, uint32_t num_rows) {
  if (count < 48) {
    insertion_sort(pairs, count);
    return pairs;
  }
  // With many more rows than pairs, clearing the counters would take longer than a radix sort.
  if (num_rows <= kMaxCountedRows && num_rows <= 8 * count && count <= UINT16_MAX)
    return counting_sort(pairs, spare, count, first_row, num_rows);
  const int bits = std::bit_width(num_rows > 0 ? num_rows - 1 : 0);
  // For few pairs, clearing and adding up the counters would take longer than the passes.
  // At most about as many counters as pairs.
  const int most_bits = std::clamp<int>(std::bit_width(uint64_t(count)) - 1, 8, kMaxDigitBits);
  const int passes = (bits + most_bits - 1) / most_bits;
  if (passes == 0) return pairs;
  const int digit_bits = (bits + passes - 1) / passes;
  switch (passes) {
    case 1:
      return radix_sort_in<1>(pairs, spare, count, first_row, digit_bits);
    case 2:
      return radix_sort_in<2>(pairs, spare, count, first_row, digit_bits);
    case 3:
      return radix_sort_in<3>(pairs, spare, count, first_row, digit_bits);
    default:
      return radix_sort_in<4>(pairs, spare, count, first_row, digit_bits);
  }
}

}  // namespace meshrec
