// Sorting IDs, and the distinct IDs in a batch with the index of every ID among them.
#include "index/unique.h"

#include <bit>
#include <memory>
#include <utility>

#include "index/ids.h"

namespace meshrec {

namespace {

struct Item {
  uint64_t value;  // the ID minus the smallest ID
  uint32_t place;
};

constexpr int64_t kPartItems = 1024, kMaxPartBits = 12, kFewItems = 24;
constexpr int64_t kFewForThreads = 1 << 13;  // with fewer IDs, more threads cost more than they save

bool less(const Item& a, const Item& b) { return a.value < b.value; }

void insertion_sort(Item* items, int64_t count) {
  for (int64_t i = 1; i < count; ++i) {
    const Item item = items[i];
    int64_t j = i;
    for (; j > 0 && items[j - 1].value > item.value; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// A stable pass of a radix sort.
void pass(const Item* from, Item* to, int64_t count, int shift, int bits) {
  uint32_t next[1 << 8] = {};
  const uint64_t mask = (uint64_t(1) << bits) - 1;
  for (int64_t i = 0; i < count; ++i) ++next[from[i].value >> shift & mask];
  uint32_t position = 0;
  for (uint64_t digit = 0; digit <= mask; ++digit) position += std::exchange(next[digit], position);
  for (int64_t i = 0; i < count; ++i) to[next[from[i].value >> shift & mask]++] = from[i];
}

// Sorts items that differ only in the low `bits`. A radix sort by the highest 16 of these bits puts nearly
// all evenly spread values in order. Then items that are equal in these bits are sorted.
void sort_part(Item* items, Item* spare, int64_t count, int bits) {
  if (count <= kFewItems) return insertion_sort(items, count);
  uint64_t any = 0;
  for (int64_t i = 1; i < count; ++i) any |= items[i].value ^ items[0].value;
  // Higher bits that all items share need no pass.
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

// Distributes the IDs over parts by their highest bits. A chunk of IDs has separate positions in each part.
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
  std::vector<int64_t> starts(num_parts + 1, 0);
  int64_t position = 0;
  // Positions by part, then by chunk: IDs in a part are in batch order, whatever the number of chunks.
  for (int64_t part = 0; part < num_parts; ++part) {
    starts[part] = position;
    for (auto& of_chunk : next) position += std::exchange(of_chunk[part], position);
  }
  starts[num_parts] = position;
  parallel_tasks(chunks, [&](int64_t chunk) {
    for_chunk(chunk,
              [&](int64_t i, uint64_t value, int64_t& place) { items[place++] = {value, uint32_t(i)}; });
  });
  return starts;
}

struct Part {
  int64_t number, begin, size;
  Item* items;
};

// IDs in ascending order, in parts.
struct Sorted {
  std::unique_ptr<Item[]> items;
  std::vector<int64_t> starts;
  uint64_t least;

  // Runs work(part), with several threads if there are many IDs.
  template <typename Work>
  void for_parts(const Work& work) const {
    const auto each = [&](int64_t part) {
      work(Part{part, starts[part], starts[part + 1] - starts[part], items.get() + starts[part]});
    };
    const int64_t parts = int64_t(starts.size()) - 1;
    if (starts.back() >= kFewForThreads) return parallel_tasks(parts, each);
    for (int64_t part = 0; part < parts; ++part) each(part);
  }
};

// Sorts IDs (at least one), and runs work(part) for each sorted part.
template <typename Work>
Sorted sort_ids(const Tensor& given, const Work& work) {
  const auto* ids = static_cast<const int64_t*>(given.const_data_ptr());
  const int64_t count = given.numel();
  const auto [smallest, largest] = std::minmax_element(ids, ids + count);
  const uint64_t least = uint64_t(*smallest);
  // Unsigned: the difference of two int64 values can exceed int64.
  const int bits = std::bit_width(uint64_t(*largest) - least);
  const int part_bits = int(std::clamp<int64_t>(std::bit_width(uint64_t(count / kPartItems)), 0,
                                                std::min<int64_t>(kMaxPartBits, bits)));
  const int64_t num_parts = int64_t(1) << part_bits;
  // bits - part_bits is 64 only for part_bits = 0, where the value fills the word: then one bit is split off.
  const bool whole = bits - part_bits == 64;
  const int shift = whole ? 63 : bits - part_bits;
  // Uninitialized, because `distribute` writes every item.
  Sorted sorted{std::unique_ptr<Item[]>(new Item[count]), {}, least};
  const std::unique_ptr<Item[]> spare(new Item[count]);
  sorted.starts = distribute(ids, count, least, shift, whole ? 2 : num_parts, sorted.items.get());
  sorted.for_parts([&](const Part& part) {
    sort_part(part.items, spare.get() + part.begin, part.size, shift);
    work(part);
  });
  return sorted;
}

Tensor checked(const Tensor& ids) {
  check_ids(ids);
  if (ids.numel() > UINT32_MAX) fail("a batch of ", ids.numel(), " ids; at most 2^32 - 1 at a time");
  return as_contiguous(ids);
}

Tensor index_order(Tensor given) {
  const Tensor ids = checked(given);
  Tensor order = new_int64(ids.numel());
  if (ids.numel() == 0) return order;
  auto* const to = static_cast<int64_t*>(order.mutable_data_ptr());
  sort_ids(ids, [&](const Part& part) {
    for (int64_t i = 0; i < part.size; ++i) to[part.begin + i] = part.items[i].place;
  });
  return order;
}

}  // namespace

std::tuple<Tensor, Tensor> index_unique(Tensor given) {
  const Tensor ids = checked(given);
  Tensor inverse = new_int64(ids.numel());
  if (ids.numel() == 0) return {new_int64(0), inverse};
  // counts, then the start of the distinct IDs in each part
  std::vector<int64_t> firsts((1 << kMaxPartBits) + 1, 0);
  const Sorted sorted = sort_ids(ids, [&](const Part& part) {
    int64_t distinct = part.size > 0;
    for (int64_t i = 1; i < part.size; ++i) distinct += part.items[i].value != part.items[i - 1].value;
    firsts[part.number + 1] = distinct;
  });
  for (size_t part = 1; part < sorted.starts.size(); ++part) firsts[part] += firsts[part - 1];
  Tensor distinct = new_int64(firsts[sorted.starts.size() - 1]);
  auto* to = static_cast<int64_t*>(distinct.mutable_data_ptr());
  auto* where = static_cast<int64_t*>(inverse.mutable_data_ptr());
  sorted.for_parts([&](const Part& part) {
    int64_t position = firsts[part.number] - 1;
    for (int64_t i = 0; i < part.size; ++i) {
      const Item& item = part.items[i];
      if (i == 0 || item.value != part.items[i - 1].value)
        to[++position] = int64_t(item.value + sorted.least);
      where[item.place] = position;
    }
  });
  return {distinct, inverse};
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("index_order", TORCH_BOX(&index_order));
  m.impl("index_unique", TORCH_BOX(&index_unique));
}

}  // namespace meshrec
