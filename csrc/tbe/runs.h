// Turns a batch into runs: for every table, the (row, gradient) pairs sorted by row, divided into ranges for
// parallel work. A stable sort by row has a unique result, so the numerical result depends neither on the
// division nor on the threads.
#pragma once

#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>

#include "host/memory.h"
#include "tbe/batch.h"

namespace meshrec {

// Uninitialized memory that a thread retains between calls, up to a limit: new pages cost more than the sort.
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
    if (next_ > end) std::memset(end, 0, next_ - end);  // saved memory must not contain undefined bytes
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
  int64_t first_pair = 0;            // among the pairs for all tables
  int64_t num_parts = 1, shift = 0;  // the part for a row is row >> shift
  int64_t lane = 0, wave = 0;
  // slot_per_id: a slot for every ID, else for every bag. scaled: gradients have factors (MEAN or weights).
  // pack: gradient rows are copied next to each other, see make_tables.
  bool slot_per_id = false, scaled = false, pack = false;
  Pair* pairs = nullptr;          // by range; sorted once the range is done
  const float** grads = nullptr;  // by slot
  float* packed = nullptr;        // gradient rows stored contiguously, or null: used in place
  float* scales = nullptr;        // null: all are 1
  const float** row_stats = nullptr;
  float* squares = nullptr;  // squares of the gradient rows, by slot; null: not computed
};

struct Range {
  int64_t table;  // index into tables
  int64_t begin, end;
  int64_t first_row, end_row;  // rows of the range
  int64_t first_run;           // among the runs for all tables, once counted
};

// Tables that a thread processes together: a lane is a sequence of waves, and every thread has a lane. The
// pairs and packed gradients for a wave fit into the thread's cache: they are still there when the ranges are
// updated, and the next wave in the lane reuses the memory.
struct Wave {
  int64_t lane = 0;
  int64_t first_table = 0, end_table = 0;
  int64_t first_chunk = 0, end_chunk = 0;
  int64_t first_range = 0, end_range = 0;
};

class Runs {
 public:
  enum Use {
    kAtOnce,  // all tables in a single wave
    kSaved,   // like kAtOnce, and can be saved
    kInWaves  // filled by for_ranges_in_waves, wave by wave; a wave overwrites the previous wave in its lane
  };
  // num_rows: by table index. Throws, before anything is written, if an ID is outside its table.
  Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows, const float* row_stats,
       Use use = kAtOnce);
  // Restores what save() returned for the same batch, without sorting again.
  Runs(const Batch& batch, const float* grad, const std::vector<int64_t>& num_rows, const Tensor& saved);

  // Numbers the runs table by table, given the count in each range. Returns the first run for each table, and
  // the total.
  std::vector<int64_t> number_runs(const std::vector<int64_t>& counts, size_t num_tables);
  // Saves the sorted ranges and pairs and the packed gradient as int64. Only the same build can read it.
  Tensor save();

  // Fills the waves, and runs work(index) for all ranges, in parallel. A thread works through its lane, then
  // helps with other lanes, so no thread waits while there is work to share. And while a thread sorts,
  // which uses the processor, another can use memory.
  // Measured on 2 threads: up to 10 % less time per step than if all threads met after every wave.
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
      Progress* last = nullptr;  // previous wave in the lane, whose memory the next wave reuses
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
  // Runs work(index) for the ranges in a wave, in parallel.
  template <typename Work>
  void for_ranges(const Wave& wave, const Work& work) const {
    parallel_sections(sections(wave.first_range, wave.end_range), work);
  }
  // Sorts the pairs in a range by row, stably.
  void sort(const Range& range) const;
  // Returns the arguments for a sorted range. With sort_now = true the range is sorted first; then the
  // arguments, and the order of the pairs, are valid only until the same thread asks for the next range.
  RunArgs arguments(int64_t range, float* scratch, bool sort_now = false) const;

  std::vector<TableRuns> tables;
  std::vector<Range> ranges;  // by wave, then by table; within a thread's share, large ranges come first
  std::vector<Wave> waves;
  int64_t num_pairs = 0;
  int64_t num_runs = 0;  // once counted

 private:
  struct Chunk {
    int64_t table, lookup, first_bag, last_bag;
    int64_t first_slot, first_grad;
    int64_t first_count;  // start of its entries (by stream and part) in positions_
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
  // By chunk, stream and part: first the number of pairs, then the position for the next pair.
  std::vector<uint32_t> positions_;
  std::unique_ptr<Arena> arena_;
  std::optional<Tensor> saved_;  // [packed gradients and pairs for each table][two counts][ranges]
  // Set if the runs were restored by `load`; packed rows are then not copied again.
  bool is_loaded_ = false;
  // As RunArgs::from_memory; set by `allocate`.
  bool rows_from_memory_ = false;
};

// Returns scratch rows for a task; the thread retains the memory.
float* task_scratch(int64_t dim);

}  // namespace meshrec
