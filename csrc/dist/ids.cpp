// Distinct IDs within a node, and their compressed encoding. ops/dist/ids_naive.py documents arguments,
// results and the format.
#include <bit>
#include <cstring>

#include "host/memory.h"
#include "stable_abi.h"

namespace meshrec {
namespace {

// As GROUP in ops/dist/ids_naive.py.
constexpr int64_t kGroup = 128;

template <typename Id>
int64_t packed_run(const Id* ids, int64_t count, uint8_t* out) {
  uint8_t* const begin = out;
  int64_t before = -1;
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t n = std::min(kGroup, count - first);
    uint64_t gaps[kGroup], all = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t id = ids[first + i];
      if (id <= before)
        fail("ids of a run must be at least 0 and ascend, each once; got ", id, " after ", before);
      // IDs ascend strictly, so the smallest gap is 1. Storing gap - 1 gives runs of consecutive IDs a width
      // of 0.
      gaps[i] = uint64_t(id - before) - 1, all |= gaps[i], before = id;
    }
    const int width = std::bit_width(all);
    *out++ = uint8_t(width);
    // 128 bits hold up to 63 pending bits and a gap of up to 63 bits.
    unsigned __int128 bits = 0;
    int held = 0;
    for (int64_t i = 0; i < n; ++i) {
      bits |= (unsigned __int128)gaps[i] << held;
      for (held += width; held >= 64; held -= 64, bits >>= 64, out += 8) {
        const uint64_t word = uint64_t(bits);
        std::memcpy(out, &word, 8);
      }
    }
    for (; held > 0; held -= 8, bits >>= 8) *out++ = uint8_t(bits);
  }
  return out - begin;
}

// Decodes a run and returns its end in the message, or null if the message ends first.
template <typename Id>
const uint8_t* unpacked_run(const uint8_t* in, const uint8_t* end, int64_t count, Id* ids) {
  int64_t before = -1;
  for (int64_t first = 0; first < count; first += kGroup) {
    const int64_t n = std::min(kGroup, count - first);
    if (in == end) return nullptr;
    const int width = *in++;
    const int64_t size = (n * width + 7) / 8;
    // A damaged message must not make the loop read past the end.
    if (width > 63 || end - in < size) return nullptr;
    const uint64_t mask = (uint64_t(1) << width) - 1;
    const uint8_t* const next = in + size;
    unsigned __int128 bits = 0;
    int held = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (held < width) {
        uint64_t word = 0;
        const int64_t bytes = std::min<int64_t>(8, next - in);
        std::memcpy(&word, in, bytes);
        bits |= (unsigned __int128)word << held, held += int(8 * bytes), in += bytes;
      }
      before += int64_t(uint64_t(bits) & mask) + 1;
      ids[first + i] = Id(before);
      bits >>= width, held -= width;
    }
    in = next;
  }
  return in;
}

std::tuple<Tensor, Tensor> pack_ids(Tensor ids, std::vector<int64_t> counts) {
  const Tensor values = contiguous(ids);
  int64_t total = 0, most = 0;
  for (int64_t count : counts) {
    if (count < 0) fail("a run has ", count, " ids");
    // Upper bound: gaps have at most 63 bits, and a group has one byte for the width.
    total += count, most += count * 8 + (count + kGroup - 1) / kGroup;
  }
  if (values.numel() != total) fail("runs have ", total, " ids, got ", values.numel());
  Tensor room = empty_buffer({most}, ScalarType::Byte),
         sizes = empty_buffer({int64_t(counts.size())}, ScalarType::Long);
  auto* const begin = static_cast<uint8_t*>(room.mutable_data_ptr());
  uint8_t* out = begin;
  int64_t first = 0;
  for (size_t run = 0; run < counts.size(); first += counts[run++]) {
    const int64_t size = values.scalar_type() == ScalarType::Int
                             ? packed_run(values.const_data_ptr<int32_t>() + first, counts[run], out)
                             : packed_run(values.const_data_ptr<int64_t>() + first, counts[run], out);
    sizes.mutable_data_ptr<int64_t>()[run] = size, out += size;
  }
  // A copy of the exact size, because the room above is only an upper bound.
  Tensor message = empty_buffer({out - begin}, ScalarType::Byte);
  std::memcpy(message.mutable_data_ptr(), begin, out - begin);
  return {message, sizes};
}

Tensor unpack_sorted_ids(Tensor message, std::vector<int64_t> counts, bool wide) {
  const Tensor bytes = contiguous(message);
  int64_t total = 0;
  for (int64_t count : counts) total += count;
  Tensor ids = empty_buffer({total}, wide ? ScalarType::Long : ScalarType::Int);
  const auto* in = static_cast<const uint8_t*>(bytes.const_data_ptr());
  const uint8_t* const end = in + bytes.numel();
  int64_t first = 0;
  bool fits = true;
  for (size_t run = 0; run < counts.size() && fits; first += counts[run++]) {
    in = wide ? unpacked_run(in, end, counts[run], ids.mutable_data_ptr<int64_t>() + first)
              : unpacked_run(in, end, counts[run], ids.mutable_data_ptr<int32_t>() + first);
    fits = counts[run] == 0 || in != nullptr;
  }
  if (!fits || in != end) fail("a message of ", bytes.numel(), " bytes does not hold ", total, " packed ids");
  return ids;
}

// A bitmap over rows: the number of bits before an ID's bit is the index among the distinct IDs.
std::tuple<Tensor, Tensor> distinct_ids(Tensor ids, int64_t num_rows) {
  const Tensor values = contiguous(ids);
  if (values.scalar_type() != ScalarType::Long) fail("ids must be int64");
  const int64_t* id = values.const_data_ptr<int64_t>();
  const int64_t count = values.numel(), num_words = (num_rows + 63) / 64;
  std::vector<uint64_t> bits(num_words);
  for (int64_t i = 0; i < count; ++i) {
    if (id[i] < 0 || id[i] >= num_rows) fail("id ", id[i], " is outside [0, ", num_rows, ")");
    bits[id[i] >> 6] |= uint64_t(1) << (id[i] & 63);
  }
  std::vector<int64_t> before(num_words);
  int64_t total = 0;
  for (int64_t word = 0; word < num_words; ++word) before[word] = total, total += std::popcount(bits[word]);
  Tensor distinct = empty_buffer({total}, ScalarType::Long), places = empty_buffer({count}, ScalarType::Long);
  int64_t* out = distinct.mutable_data_ptr<int64_t>();
  for (int64_t word = 0; word < num_words; ++word)
    for (uint64_t left = bits[word]; left != 0; left &= left - 1) *out++ = 64 * word + std::countr_zero(left);
  int64_t* place = places.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    // Rank of the ID's bit: bits in earlier words, and lower bits in this word.
    const uint64_t lower = bits[id[i] >> 6] & ((uint64_t(1) << (id[i] & 63)) - 1);
    place[i] = before[id[i] >> 6] + std::popcount(lower);
  }
  return {distinct, places};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("distinct_ids", TORCH_BOX(&distinct_ids));
  m.impl("pack_ids", TORCH_BOX(&pack_ids));
  m.impl("unpack_sorted_ids", TORCH_BOX(&unpack_sorted_ids));
}

}  // namespace meshrec
