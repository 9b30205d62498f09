// Turns a batch into runs: for every table, the (row, gradient) pairs sorted by row, cut into ranges for
// parallel work. A stable sort by row has only one result, so the numbers depend neither on the cuts nor on
// the threads.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "host/memory.h"
#include "tbe/batch.h"

namespace meshrec {

// Uninitialised memory that a thread keeps between calls, up to a limit: new pages cost more than the sort.
class Arena {
 public:
  explicit Arena(size_t bytes);
  explicit Arena(Tensor& memory) : next_(static_cast<char*>(memory.mutable_data_ptr())) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Releases the memory taken from `offset` on.
  void rewind(size_t offset) { next_ = static_cast<char*>(memory_.get()) + offset; }
  template <typename T>
  T* take(size_t count) {
    char *start = next_, *end = start + count * sizeof(T);
    next_ += bytes<T>(count);
    if (next_ > end) std::memset(end, 0, next_ - end);  // saved memory must hold no undefined bytes
    return reinterpret_cast<T*>(start);
  }
  template <typename T>
  static size_t bytes(size_t count) {
    return (count * sizeof(T) + 63) / 64 * 64;
  }

 private:
  Memory memory_;
  size_t capacity_ = 0;
  char* next_ = nullptr;
};

struct TableRuns {
  int64_t table, num_rows, dim;
  std::vector<int64_t> lookups = {};
  int64_t num_pairs = 0, num_slots = 0, num_grads = 0;
  int64_t first_pair = 0;            // among those of all tables
  int64_t num_parts = 1, shift = 0;  // a row's part is row >> shift
  int64_t lane = 0, wave = 0;
  bool slot_per_id = false, scaled = false, pack = false;
  Pair* pairs = nullptr;          // by range; a range's are sorted once it is done
  const float** grads = nullptr;  // by slot
  float* packed = nullptr;        // the gradient rows side by side, or null: used in place
  float* scales = nullptr;        // null: all are 1
  const float** row_stats = nullptr;
  float* squares = nullptr;  // of the gradient rows, by slot; null: not computed
};

struct Range {
  int64_t table;  // index into tables
  int64_t begin, end;
  int64_t first_row, end_row;  // rows of the range
  int64_t first_run;           // among the runs of all tables, once counted
};

// Some tables, worked on one after the other by one thread: a lane has one wave after the other, and every
// thread has a lane. The pairs and packed gradients of a wave fit the thread's own cache: they are still
// there when its ranges are updated, and the next wave of the lane reuses their memory.
struct Wave {
  int64_t lane = 0;
  int64_t first_table = 0, end_table = 0;
  int64_t first_chunk = 0, end_chunk = 0;
  int64_t first_range = 0, end_range = 0;
};

class Runs {
 public:
  enum Use {
    kAtOnce,  // all tables in one wave
    kSaved,   // as kAtOnce, and can be saved
    kInWaves  // filled by for_ranges_in_waves, wave by wave; each overwrites the last of its lane
  };
  // num_rows: by table index. Throws, before anything is written, if an id is outside its table.
  Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows, const float* row_stats,
       Use use = kAtOnce);
  // Restores what save() returned for the same batch; nothing is sorted again.
  Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows, const Tensor& saved);

  // Numbers the runs table by table, given how many each range has. Returns where the runs of each table
  // begin, and their total.
  std::vector<int64_t> number_runs(const std::vector<int64_t>& counts, size_t num_tables);
  // Saves the sorted ranges and pairs and the packed gradient as int64, for the same build to read.
  Tensor save();

  // Fills the waves and runs work(index) for all ranges, in parallel. A thread works through its own lane,
  // then helps with other lanes, so that none waits while there is work to share; and while one sorts, which
  // uses the processor, another can use the memory.
  template <typename Work>
  void for_ranges_in_waves(const Batch& batch, const float* grad, const float* row_stats, const Work& work) {
    struct Progress {
      Dealer chunks, ranges;
      Countdown chunks_left, ranges_left;
    };
    const int64_t num_threads = torch::stable::get_num_threads();
    std::deque<Progress> progress;
    for (const Wave& wave : waves)
      progress.push_back({Dealer(even_sections(wave.first_chunk, wave.end_chunk, num_threads)),
                          Dealer(sections(wave.first_range, wave.end_range)),
                          Countdown(wave.end_chunk - wave.first_chunk),
                          Countdown(wave.end_range - wave.first_range)});
    const auto serve = [&](int64_t thread, int64_t lane) {
      Progress* last = nullptr;  // the wave before in the lane; the next one reuses its memory
      for (size_t w = 0; w < waves.size(); ++w) {
        if (waves[w].lane != lane) continue;
        if (last != nullptr && !last->ranges_left.wait()) return;
        last = &progress[w];
        last->chunks.serve(thread, last->chunks_left,
                           [&](int64_t chunk) { fill(batch, chunks_[chunk], grad, row_stats); });
        if (!last->chunks_left.wait()) return;
        last->ranges.serve(thread, last->ranges_left, work);
      }
    };
    const int64_t num_lanes = waves.back().lane + 1;
    const auto serve_all = [&](int64_t thread) {
      for (int64_t k = 0; k < num_lanes; ++k) serve(thread, (thread + k) % num_lanes);
    };
    if (num_threads == 1) return serve_all(0);
    parallel_for(num_threads, 1, [&](int64_t thread, int64_t) { serve_all(thread); });
  }
  // Runs work(index) for the ranges of the wave, in parallel.
  template <typename Work>
  void for_ranges(const Wave& wave, const Work& work) const {
    parallel_sections(sections(wave.first_range, wave.end_range), work);
  }
  // Sorts the pairs of the range by row, stably.
  void sort(const Range& range) const;
  // The arguments for a sorted range. With sort_now = true it is sorted first, and they hold, with its pairs
  // in order, only until the same thread asks for its next range.
  RunArgs arguments(int64_t range, float* scratch, bool sort_now = false) const;

  std::vector<TableRuns> tables;
  std::vector<Range> ranges;  // by wave, then by table; of a thread's share the large ones come first
  std::vector<Wave> waves;
  int64_t num_pairs = 0;
  int64_t num_runs = 0;  // once counted

 private:
  struct Chunk {
    int64_t table, lookup, first_bag, last_bag;
    int64_t first_slot, first_grad;
    int64_t first_count;  // where its entries in positions_ (by stream and part) begin
  };
  void make_tables(const Batch& batch, const std::vector<int64_t>& num_rows);
  void make_waves();
  void make_chunks(const Batch& batch);
  bool count(const Batch& batch, const Chunk& chunk);
  std::vector<uint32_t> place_parts(size_t first_chunk, size_t last_chunk);
  void make_ranges();
  void cut(size_t first_chunk, size_t last_chunk);
  std::vector<int64_t> sections(int64_t first_range, int64_t end_range) const;
  const Pair* sorted(const Range& range) const;
  size_t lasting_bytes() const;
  int64_t saved_words(int64_t num_ranges) const;
  void load(const Tensor& saved);
  void allocate(bool with_row_stats, bool with_squares);
  void fill(const Batch& batch, const Chunk& chunk, const float* grad, const float* row_stats);
  void pack_slots(const Batch& batch, const Chunk& chunk, const float* grad, const float* row_stats) const;

  std::vector<Chunk> chunks_;
  // By chunk, stream and part: first the number of pairs, then the position of the next pair.
  std::vector<uint32_t> positions_;
  std::unique_ptr<Arena> arena_;
  std::optional<Tensor> saved_;  // [packed gradients and pairs of each table][two numbers][ranges]
  bool is_loaded_ = false;
  bool rows_from_memory_ = false;
};

// Scratch rows for one task; its thread keeps the memory.
float* task_scratch(int64_t dim);

}  // namespace meshrec
