// What the memory alone costs: the rows of a lookup are touched and nothing else is done. No kernel that
// reads the same rows can be faster, so the ratio to this time says how much of a kernel is its own.
#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kAhead = 48;  // rows to prefetch ahead
constexpr int64_t kLine = 16;   // floats of a cache line
constexpr int64_t kChunk = 64;  // floats per step of the inner loop; dim is a multiple of it

struct Rows {
  float* const* tables;
  const int64_t* starts;  // [num_tables + 1]: where each table's ids begin
  const int64_t* ids;
  int64_t num_tables, dim;
};

template <bool Write>
void touch(const Rows& rows, int64_t table, int64_t begin, int64_t end, float delta, float* sums) {
  float* weights = rows.tables[table];
  for (int64_t i = begin; i < end; ++i) {
    const float* ahead = weights + rows.ids[std::min(i + kAhead, end - 1)] * rows.dim;
    // For reading and into L2, whatever follows: prefetching to L1 or for writing is slower.
    for (int64_t d = 0; d < rows.dim; d += kLine) __builtin_prefetch(ahead + d, 0, 2);
    float* row = weights + rows.ids[i] * rows.dim;
    for (int64_t chunk = 0; chunk < rows.dim; chunk += kChunk)
      for (int64_t d = 0; d < kChunk; ++d) {
        if constexpr (Write)
          row[chunk + d] += delta;
        else
          sums[d] += row[chunk + d];
      }
  }
}

template <bool Write>
float touch_range(const Rows& rows, int64_t begin, int64_t end, float delta) {
  float sums[kChunk] = {};
  for (int64_t table = 0; table < rows.num_tables; ++table) {
    const int64_t from = std::max(begin, rows.starts[table]), to = std::min(end, rows.starts[table + 1]);
    if (from < to) touch<Write>(rows, table, from, to, delta, sums);
  }
  float sum = 0;
  for (float each : sums) sum += each;
  return sum;
}

template <bool Write>
float touch_all(const Rows& rows, int64_t num_threads, float delta) {
  const int64_t num_ids = rows.starts[rows.num_tables];
  std::vector<float> sums(num_threads);
  const auto part = [&](int64_t t) {
    sums[t] = touch_range<Write>(rows, num_ids * t / num_threads, num_ids * (t + 1) / num_threads, delta);
  };
  std::vector<std::thread> threads;
  for (int64_t t = 1; t < num_threads; ++t) threads.emplace_back(part, t);
  part(0);
  for (std::thread& thread : threads) thread.join();
  float sum = 0;
  for (float each : sums) sum += each;
  return sum;
}

}  // namespace

// Reads the rows in the order of the ids; returns their sum, so that no compiler drops the reads.
extern "C" float read_rows(float* const* tables, const int64_t* starts, const int64_t* ids,
                           int64_t num_tables, int64_t dim, int64_t num_threads) {
  return touch_all<false>({tables, starts, ids, num_tables, dim}, num_threads, 0);
}

// Reads and writes the rows (distinct ones, so that no two threads meet): adds `delta` to each element.
extern "C" void write_rows(float* const* tables, const int64_t* starts, const int64_t* ids,
                           int64_t num_tables, int64_t dim, int64_t num_threads, float delta) {
  touch_all<true>({tables, starts, ids, num_tables, dim}, num_threads, delta);
}
