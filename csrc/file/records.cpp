// Rows in file records: transfers between the file and the memory of a cache. ops/records/naive.py documents
// the operations.
#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>

#include "file/io_threads.h"
#include "file/ring.h"
#include "host/crc32.h"
#include "stable_abi.h"

namespace meshrec {

namespace {

constexpr int64_t kLargestTransfer = 1 << 17;  // maximum bytes per system call
// records closer than this many bytes are read together with the gap
constexpr int64_t kLargestGap = 1 << 11;
constexpr int64_t kMaxThreads = 32;  // tuned: more threads gave no more throughput on the disks measured
// As DAMAGED in ops/records/naive.py.
constexpr int64_t kDamaged = -1;

struct Layout {
  int64_t first_key, per_block, block_bytes, record_bytes;
  uint32_t salt;

  explicit Layout(const std::vector<int64_t>& numbers) {
    if (numbers.size() != 5) fail("a layout has 5 numbers, got ", numbers.size(), ".");
    first_key = numbers[0], per_block = numbers[1], block_bytes = numbers[2], record_bytes = numbers[3];
    salt = uint32_t(numbers[4]);
    if (per_block < 1 || record_bytes < 5 || block_bytes < per_block * record_bytes)
      fail("blocks of ", block_bytes, " bytes do not hold ", per_block, " records of ", record_bytes, ".");
  }
  int64_t block(int64_t key) const { return (key - first_key) / per_block; }
  // Offset of a record within the block.
  int64_t offset(int64_t key) const { return (key - first_key) % per_block * record_bytes; }
};

struct Part {
  char* data;
  int64_t bytes;  // bytes per row
};

struct Records {
  Layout layout;
  std::vector<Part> parts;
  const int64_t* keys;
  const int64_t* slots;
  int64_t count;

  Records(const std::vector<int64_t>& numbers, const Tensor& keys_, const std::vector<Tensor>& memory,
          const Tensor& slots_)
      : layout(numbers), count(keys_.numel()) {
    for (const Tensor* each : {&keys_, &slots_})
      if (each->scalar_type() != ScalarType::Long || !each->is_contiguous() || each->numel() != count)
        fail("keys and slots must be contiguous int64 tensors of one length.");
    keys = static_cast<const int64_t*>(keys_.const_data_ptr());
    slots = static_cast<const int64_t*>(slots_.const_data_ptr());
    int64_t bytes = 4;
    for (const Tensor& each : memory) {
      if (!each.is_contiguous() || each.dim() == 0) fail("the parts of rows must be contiguous.");
      const int64_t height = each.size(0);
      const int64_t row = height == 0 ? 0 : each.numel() / height * each.element_size();
      for (int64_t i = 0; i < count; ++i)
        if (slots[i] < 0 || slots[i] >= height) fail("slot ", slots[i], " is outside [0, ", height, ").");
      parts.push_back({static_cast<char*>(const_cast<void*>(each.const_data_ptr())), row});
      bytes += row;
    }
    if (count > 0 && bytes != layout.record_bytes)
      fail("the parts of a row have ", bytes - 4, " bytes, its record ", layout.record_bytes - 4, ".");
    for (int64_t i = 0; i < count; ++i)
      if (keys[i] < layout.first_key || (i > 0 && keys[i] <= keys[i - 1]))
        fail("keys must ascend from ", layout.first_key, " on.");
  }

  uint32_t checksum(int64_t key, const char* record) const {
    // With the key in the checksum, an intact record is rejected if it was read from another key's place.
    const int64_t place = key;
    return crc32(crc32(layout.salt, &place, sizeof place), record, layout.record_bytes - 4);
  }
  bool take(int64_t i, const char* record) const {
    uint32_t stored;
    std::memcpy(&stored, record + layout.record_bytes - 4, 4);
    if (stored != checksum(keys[i], record)) return false;
    for (const Part& part : parts) {
      std::memcpy(part.data + slots[i] * part.bytes, record, part.bytes);
      record += part.bytes;
    }
    return true;
  }
  void put(int64_t i, char* record) const {
    char* at = record;
    for (const Part& part : parts) {
      std::memcpy(at, part.data + slots[i] * part.bytes, part.bytes);
      at += part.bytes;
    }
    const uint32_t found = checksum(keys[i], record);
    std::memcpy(at, &found, 4);
  }
};

struct Failures {
  std::mutex mutex;
  std::vector<std::array<int64_t, 2>> all;  // index of the record; kDamaged, kEndOfFile or errno

  void add(int64_t record, int64_t cause) {
    const std::lock_guard lock(mutex);
    all.push_back({record, cause});
  }
  Tensor tensor(const Tensor& like) {
    // By position, because the order in which threads fail is random.
    std::sort(all.begin(), all.end());
    Tensor found = torch::stable::new_empty(like, {int64_t(all.size()), 2}, ScalarType::Long);
    auto* to = static_cast<int64_t*>(found.mutable_data_ptr());
    for (const auto& each : all) *to++ = each[0], *to++ = each[1];
    return found;
  }
};

// Records [begin, end), transferred by a single call.
struct Run {
  int64_t begin, end;
};

// Joins records whose blocks are at most `gap` bytes apart.
std::vector<Run> runs_of(const Records& records, int64_t gap) {
  std::vector<Run> runs;
  const Layout& layout = records.layout;
  for (int64_t i = 0; i < records.count; ++i) {
    const int64_t block = layout.block(records.keys[i]);
    if (!runs.empty()) {
      const int64_t first = layout.block(records.keys[runs.back().begin]);
      const int64_t last = layout.block(records.keys[i - 1]);
      const bool near = (block - last - 1) * layout.block_bytes <= gap;
      const bool fits = (block - first + 1) * layout.block_bytes <= kLargestTransfer;
      // Records in the same block always stay together, because a block is written as a whole.
      if (block == last || (near && fits)) {
        runs.back().end = i + 1;
        continue;
      }
    }
    runs.push_back({i, i + 1});
  }
  return runs;
}

// The file blocks of runs.
struct Blocks {
  const Records& records;
  const std::vector<Run>& runs;

  int64_t first(int64_t task) const { return records.layout.block(records.keys[runs[task].begin]); }
  std::pair<int64_t, int64_t> stretch(int64_t task) const {
    const int64_t last = records.layout.block(records.keys[runs[task].end - 1]);
    const int64_t bytes = records.layout.block_bytes;
    return {first(task) * bytes, (last - first(task) + 1) * bytes};
  }
  // Offset of a record within the buffer of a run.
  int64_t offset(int64_t task, int64_t i) const {
    const Layout& layout = records.layout;
    return (layout.block(records.keys[i]) - first(task)) * layout.block_bytes +
           layout.offset(records.keys[i]);
  }
  int64_t largest() const {
    int64_t found = 0;
    for (int64_t task = 0; task < int64_t(runs.size()); ++task) found = std::max(found, stretch(task).second);
    return found;
  }
};

// Transfers runs: on an io_uring, or with threads that wait for the disk.
void transfer(int64_t file, const Blocks& blocks, Failures& failures, int64_t in_flight, bool ring,
              std::function<Transfer(int64_t, int, char*)> advance) {
  const Transfers transfers{
      .count = int64_t(blocks.runs.size()),
      .largest = blocks.largest(),
      .stretch = [&](int64_t task) { return blocks.stretch(task); },
      .advance = std::move(advance),
      .failed = [&](int64_t task, int64_t cause) { failures.add(blocks.runs[task].begin, cause); }};
  if (transfers.count == 0) return;
  if (ring && in_flight > 1 && transfer_on_ring(int(file), transfers, in_flight)) return;
  run_on_io_threads(transfers.count, std::min(in_flight, kMaxThreads),
                    [&](int64_t task) { transfer_task(int(file), transfers, task); });
}

Tensor records_read(int64_t file, std::vector<int64_t> numbers, Tensor keys, std::vector<Tensor> parts,
                    Tensor slots, int64_t in_flight, bool ring) {
  const Records records(numbers, keys, parts, slots);
  const std::vector<Run> runs = runs_of(records, kLargestGap);
  const Blocks blocks{records, runs};
  Failures failures;
  transfer(file, blocks, failures, in_flight, ring, [&](int64_t task, int phase, const char* memory) {
    // Phase 0: request the blocks. Phase 1: they are in memory; check and take the records.
    if (phase == 0) return Transfer::kRead;
    for (int64_t i = runs[task].begin; i < runs[task].end; ++i)
      if (!records.take(i, memory + blocks.offset(task, i))) failures.add(i, kDamaged);
    return Transfer::kDone;
  });
  return failures.tensor(keys);
}

// Whether a run writes all records in all of its blocks, so the blocks need not be read first.
bool covers_blocks(const Records& records, Run run) {
  const Layout& layout = records.layout;
  if (layout.per_block == 1) return true;
  const int64_t blocks = layout.block(records.keys[run.end - 1]) - layout.block(records.keys[run.begin]) + 1;
  return run.end - run.begin == blocks * layout.per_block;
}

Tensor records_write(int64_t file, std::vector<int64_t> numbers, Tensor keys, std::vector<Tensor> parts,
                     Tensor slots, int64_t in_flight, bool ring) {
  const Records records(numbers, keys, parts, slots);
  // Adjacent blocks only: a gap would be written, too.
  const std::vector<Run> runs = runs_of(records, 0);
  const Blocks blocks{records, runs};
  Failures failures;
  transfer(file, blocks, failures, in_flight, ring, [&](int64_t task, int phase, char* memory) {
    const bool is_new = covers_blocks(records, runs[task]);
    if (phase == 0 && !is_new) return Transfer::kRead;
    if (phase == (is_new ? 1 : 2)) return Transfer::kDone;
    // The buffer is reused. Padding between records must not keep bytes from another block.
    if (is_new) std::memset(memory, 0, blocks.stretch(task).second);
    for (int64_t i = runs[task].begin; i < runs[task].end; ++i)
      records.put(i, memory + blocks.offset(task, i));
    return Transfer::kWrite;
  });
  return failures.tensor(keys);
}

Tensor cache_used(Tensor slots, Tensor stamps, int64_t batch) {
  const Tensor held = as_contiguous(slots);
  if (held.scalar_type() != ScalarType::Long || stamps.scalar_type() != ScalarType::Long ||
      !stamps.is_contiguous())
    fail("slots and stamps must be int64, and stamps contiguous.");
  const auto* from = static_cast<const int64_t*>(held.const_data_ptr());
  auto* stamp = static_cast<int64_t*>(stamps.mutable_data_ptr());
  std::vector<int64_t> used;
  for (int64_t i = 0; i < held.numel(); ++i) {
    const int64_t slot = from[i];
    if (slot < 0) continue;
    if (slot >= stamps.numel()) fail("slot ", slot, " is outside [0, ", stamps.numel(), ").");
    // A stamp says in which batch a slot was used last, so repeated slots are listed once without sorting.
    if (stamp[slot] == batch) continue;
    stamp[slot] = batch;
    used.push_back(slot);
  }
  Tensor found = torch::stable::new_empty(held, {int64_t(used.size())}, ScalarType::Long);
  std::copy(used.begin(), used.end(), static_cast<int64_t*>(found.mutable_data_ptr()));
  return found;
}

std::tuple<Tensor, int64_t> cache_victims(Tensor counts, Tensor pins, int64_t hand, int64_t number) {
  if (counts.scalar_type() != ScalarType::Byte || pins.scalar_type() != ScalarType::Int ||
      !counts.is_contiguous() || !pins.is_contiguous() || counts.numel() != pins.numel())
    fail("counts must be uint8, pins int32, contiguous and of one length.");
  const int64_t size = counts.numel();
  auto* count = static_cast<uint8_t*>(counts.mutable_data_ptr());
  const auto* pin = static_cast<const int32_t*>(pins.const_data_ptr());
  std::vector<int64_t> victims;
  // A clock with counts (GCLOCK): the hand passes over pinned slots, lowers counts, and takes slots whose
  // count is 0. The next call continues from there.
  std::vector<bool> taken(size_t(size), false);
  // Counts are at most 255, so after 256 turns all are 0, and another turn finds every unpinned slot.
  for (int64_t steps = 0; int64_t(victims.size()) < number && steps < 257 * size; ++steps) {
    const int64_t slot = hand;
    hand = hand + 1 == size ? 0 : hand + 1;
    if (pin[slot] != 0 || taken[slot]) continue;
    if (count[slot] != 0) {
      --count[slot];
      continue;
    }
    taken[slot] = true;
    victims.push_back(slot);
  }
  Tensor found = torch::stable::new_empty(counts, {int64_t(victims.size())}, ScalarType::Long);
  std::copy(victims.begin(), victims.end(), static_cast<int64_t*>(found.mutable_data_ptr()));
  return {found, hand};
}

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("records_read", TORCH_BOX(&records_read));
  m.impl("records_write", TORCH_BOX(&records_write));
  m.impl("cache_used", TORCH_BOX(&cache_used));
  m.impl("cache_victims", TORCH_BOX(&cache_victims));
}

}  // namespace
}  // namespace meshrec
