// The distinct IDs of a batch, in ascending order, and where each ID is among them.
#include "index/unique.h"

#include <bit>
#include <memory>
#include <utility>

#include "index/ids.h"

namespace meshrec {

namespace {

struct Item {
  uint64_t value;  // the ID less the smallest one
  uint32_t place;
};

constexpr int64_t kPartItems = 1024, kMostPartBits = 12, kFewItems = 24;
constexpr int64_t kFewForThreads = 1 << 13;  // with fewer IDs other threads cost more than they save

bool less(const Item& a, const Item& b) { return a.value < b.value; }

void insertion_sort(Item* items, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Item item = items[i];
    int64_t j = i;
    for (; j > 0 && items[j - 1].value > item.value; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// One pass of a radix sort, stable.
void pass(const Item* from, Item* to, int64_t count, int shift, int bits) {
  uint32_t next[1 << 8] = {};
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  for (int64_t i = 0; i < count; ++i) ++next[from[i].value >> shift & mask];
  uint32_t position = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) position += std::exchange(next[digit], position);
  for (int64_t i = 0; i < count; ++i) to[next[from[i].value >> shift & mask]++] = from[i];
}

// Sorts items that differ in their low `bits` only: by the highest 16 of these with a radix sort, which puts
// nearly all of evenly spread values in order, then what is still equal there.
void sort_part(Item* items, Item* spare, int64_t count, int bits) {
  if (count <= kFewItems) return insertion_sort(items, count);
  uint64_t any = 0;
  for (int64_t i = 1; i < count; ++i) any |= items[i].value ^ items[0].value;
  bits = std::min<int>(bits, std::bit_width(any));
  if (bits == 0) return;
  const int shift = std::max(0, bits - 16), low = (bits - shift) / 2, high = bits - shift - low;
  if (low > 0) pass(items, spare, count, shift, low);
  pass(low > 0 ? spare : items, low > 0 ? items : spare, count, shift + low, high);
  if (low == 0) std::copy(spare, spare + count, items);
  if (shift == 0) return;
  for (int64_t begin = 0, end = 0; begin < count; begin = end) {
    while (end < count && items[end].value >> shift == items[begin].value >> shift) ++end;
    if (end - begin <= kFewItems)
      insertion_sort(items + begin, end - begin);
    else
      std::sort(items + begin, items + end, less);
  }
}

// Distributes the IDs over parts by their highest bits; each chunk of IDs writes to its own places of a part.
std::vector<int64_t> distribute(const int64_t* ids, int64_t count, uint64_t least, int shift,
                                int64_t num_parts, Item* items) {
  const int64_t chunks = std::clamp<int64_t>(count >> 15, 1, torch::stable::get_num_threads());
  std::vector<std::vector<int64_t>> next(chunks, std::vector<int64_t>(num_parts, 0));
  const auto for_chunk = [&](int64_t chunk, const auto& work) {
    for (int64_t i = count * chunk / chunks, end = count * (chunk + 1) / chunks; i < end; ++i) {
      const uint64_t value = uint64_t(ids[i]) - least;
      work(i, value, next[chunk][value >> shift]);
    }
  };
  parallel_tasks(
      chunks, [&](int64_t chunk) { for_chunk(chunk, [](int64_t, uint64_t, int64_t& number) { ++number; }); });
  std::vector<int64_t> begins(num_parts + 1, 0);
  int64_t position = 0;
  for (int64_t part = 0; part < num_parts; ++part) {
    begins[part] = position;
    for (auto& of_chunk : next) position += std::exchange(of_chunk[part], position);
  }
  begins[num_parts] = position;
  parallel_tasks(chunks, [&](int64_t chunk) {
    for_chunk(chunk,
              [&](int64_t i, uint64_t value, int64_t& place) { items[place++] = {value, uint32_t(i)}; });
  });
  return begins;
}

}  // namespace

std::tuple<Tensor, Tensor> index_unique(Tensor given) {
  check_ids(given);
  const Tensor contiguous = as_contiguous(given);
  const auto* ids = static_cast<const int64_t*>(contiguous.const_data_ptr());
  const int64_t count = contiguous.numel();
  if (count > UINT32_MAX) fail("unique: a batch of ", count, " ids; at most 2^32 - 1 at a time");
  Tensor inverse = new_int64(count);
  if (count == 0) return {new_int64(0), inverse};
  const auto [smallest, largest] = std::minmax_element(ids, ids + count);
  const uint64_t least = uint64_t(*smallest);
  const int bits = std::bit_width(uint64_t(*largest) - least);
  const int part_bits = int(std::clamp<int64_t>(std::bit_width(uint64_t(count / kPartItems)), 0,
                                                std::min<int64_t>(kMostPartBits, bits)));
  const int64_t num_parts = int64_t(1) << part_bits;
  // bits - part_bits is 64 only for part_bits = 0, where the value fills the word: one bit is then split off.
  const bool whole = bits - part_bits == 64;
  const int shift = whole ? 63 : bits - part_bits;
  std::unique_ptr<Item[]> items(new Item[count]), spare(new Item[count]);
  const std::vector<int64_t> begins =
      distribute(ids, count, least, shift, whole ? 2 : num_parts, items.get());
  std::vector<int64_t> firsts(begins.size(), 0);  // counts, then where each part's distinct IDs begin
  const int64_t parts = int64_t(begins.size()) - 1;
  const auto for_parts = [&](const auto& work) {
    if (count >= kFewForThreads) return parallel_tasks(parts, work);
    for (int64_t part = 0; part < parts; ++part) work(part);
  };
  for_parts([&](int64_t part) {
    Item* own = items.get() + begins[part];
    const int64_t size = begins[part + 1] - begins[part];
    sort_part(own, spare.get() + begins[part], size, shift);
    int64_t distinct = size > 0;
    for (int64_t i = 1; i < size; ++i) distinct += own[i].value != own[i - 1].value;
    firsts[part + 1] = distinct;
  });
  for (int64_t part = 0; part < parts; ++part) firsts[part + 1] += firsts[part];
  Tensor distinct = new_int64(firsts[parts]);
  auto* to = static_cast<int64_t*>(distinct.mutable_data_ptr());
  auto* where = static_cast<int64_t*>(inverse.mutable_data_ptr());
  for_parts([&](int64_t part) {
    int64_t position = firsts[part] - 1;
    for (int64_t i = begins[part]; i < begins[part + 1]; ++i) {
      const Item& item = items[i];
      if (i == begins[part] || item.value != items[i - 1].value) to[++position] = int64_t(item.value + least);
      where[item.place] = position;
    }
  });
  return {distinct, inverse};
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("index_unique", TORCH_BOX(&index_unique)); }

}  // namespace meshrec
