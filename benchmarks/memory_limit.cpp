// What the memory alone costs: the rows of a lookup are touched and nothing else is done. No kernel that
// reads the same rows can be faster, so the ratio to this time says how much of a kernel is its own.
#include <algorithm>
#include <cstdint>

namespace {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
// As wide as the registers: GCC 12 keeps wider vectors in memory, which made this loop slower than a lookup.
typedef float Vec __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
constexpr int64_t kLine = 16;   // floats of a cache line
constexpr int64_t kChunk = 64;  // floats per step of the inner loop; dim is a multiple of it
constexpr int64_t kVectors = kChunk / kLanes;

struct Rows {
  float* const* tables;
  const int64_t* starts;  // [num_tables + 1]: where each table's ids begin
  const int64_t* ids;
  int64_t num_tables, dim;
};

// Prefetches the row `ahead` places on, into the cache that kLocality says (3: L1, 2: L2); unrolled, as a
// loop over few lines is slower than the memory.
template <bool Write, int kLocality>
void touch(const Rows& rows, int64_t table, int64_t begin, int64_t end, int64_t ahead, float delta,
           float* total) {
  float* weights = rows.tables[table];
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    float* row = weights + rows.ids[i] * rows.dim;
    const float* next = weights + rows.ids[std::min(i + ahead, end - 1)] * rows.dim;
    for (int64_t chunk = 0; chunk < rows.dim; chunk += kChunk) {
#pragma GCC unroll 4
      for (int64_t d = 0; d < kChunk; d += kLine) __builtin_prefetch(next + chunk + d, 0, kLocality);
#pragma GCC unroll 16
      for (int64_t k = 0; k < kVectors; ++k) {
        Vec& part = *reinterpret_cast<Vec*>(row + chunk + k * kLanes);
        if constexpr (Write)
          part += delta;
        else
          sums[k] += part;
      }
    }
  }
  for (const Vec& sum : sums)
    for (int64_t d = 0; d < kLanes; ++d) *total += sum[d];
}

template <bool Write, int kLocality>
float touch_all(const Rows& rows, int64_t num_threads, int64_t ahead, float delta) {
  const int64_t num_ids = rows.starts[rows.num_tables];
  float sum = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) reduction(+ : sum)
  for (int64_t t = 0; t < num_threads; ++t) {
    const int64_t begin = num_ids * t / num_threads, end = num_ids * (t + 1) / num_threads;
    for (int64_t table = 0; table < rows.num_tables; ++table) {
      const int64_t from = std::max(begin, rows.starts[table]), to = std::min(end, rows.starts[table + 1]);
      if (from < to) touch<Write, kLocality>(rows, table, from, to, ahead, delta, &sum);
    }
  }
  return sum;
}

}  // namespace

// Reads the rows in the order of the ids; returns their sum, so that no compiler drops the reads.
extern "C" float read_rows(float* const* tables, const int64_t* starts, const int64_t* ids,
                           int64_t num_tables, int64_t dim, int64_t num_threads, int64_t ahead, bool near) {
  const Rows rows{tables, starts, ids, num_tables, dim};
  return near ? touch_all<false, 3>(rows, num_threads, ahead, 0)
              : touch_all<false, 2>(rows, num_threads, ahead, 0);
}

// Touches every cache line of rows of row_bytes (a multiple of 4), wherever in a line they begin.
extern "C" int64_t read_lines(const char* const* tables, const int64_t* starts, const int64_t* ids,
                              int64_t num_tables, int64_t row_bytes, int64_t num_threads, int64_t ahead,
                              bool near) {
  const int64_t num_ids = starts[num_tables];
  int64_t sum = 0;
#pragma omp parallel for num_threads(num_threads) schedule(static, 1) reduction(+ : sum)
  for (int64_t t = 0; t < num_threads; ++t) {
    const int64_t begin = num_ids * t / num_threads, end = num_ids * (t + 1) / num_threads;
    for (int64_t table = 0; table < num_tables; ++table) {
      const int64_t from = std::max(begin, starts[table]), to = std::min(end, starts[table + 1]);
      for (int64_t i = from; i < to; ++i) {
        const char* next = tables[table] + ids[std::min(i + ahead, to - 1)] * row_bytes;
        const char* row = tables[table] + ids[i] * row_bytes;
        const auto each_line = [row_bytes](const char* first, const auto& touch) {
          for (int64_t byte = 0; byte < row_bytes - 4; byte += 64) touch(first + byte);
          touch(first + row_bytes - 4);
        };
        if (near) {
          each_line(next, [](const char* p) { __builtin_prefetch(p, 0, 3); });
        } else {
          each_line(next, [](const char* p) { __builtin_prefetch(p, 0, 2); });
        }
        each_line(row, [&](const char* p) { sum += *reinterpret_cast<const int32_t*>(p); });
      }
    }
  }
  return sum;
}

// Reads and writes the rows (distinct ones, so that no two threads meet): adds `delta` to each element.
extern "C" void write_rows(float* const* tables, const int64_t* starts, const int64_t* ids,
                           int64_t num_tables, int64_t dim, int64_t num_threads, int64_t ahead, bool near,
                           float delta) {
  const Rows rows{tables, starts, ids, num_tables, dim};
  near ? touch_all<true, 3>(rows, num_threads, ahead, delta)
       : touch_all<true, 2>(rows, num_threads, ahead, delta);
}
