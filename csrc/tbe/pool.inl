// Pooled lookups. Included only by isa/kernels.inl, inside an unnamed namespace.

// Returns how many rows to prefetch ahead of the current row.
inline int64_t rows_ahead(int64_t row_bytes, bool to_l1 = false) {
  // About this many bytes of rows are on their way at a time.
  const int64_t rows = (to_l1 ? 16384 : 12288) / row_bytes;
  return rows < 4 ? 4 : rows > 64 ? 64 : rows;
}

// Returns the address of the row for an ID, or null if it is outside the table: IDs further ahead may be in
// bags that are not checked yet.
inline const char* to_prefetch(const void* rows, int64_t id, int64_t row_bytes) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(rows) +
                                       uint64_t(id) * uint64_t(row_bytes));
}

// Rows of floating-point values without gaps, from a column on. Row classes for lookups have this interface;
// the other class is in nbit/rows.inl.
template <typename Weight>
struct DenseRows {
  struct Row {
    const Weight* columns;
    Vec vector(int k) const { return load(columns + k * kLanes); }
    float number(int64_t d) const { return to_float(columns[d]); }
  };

  DenseRows(const void* memory, int64_t bytes, int64_t column)
      : first(static_cast<const Weight*>(memory) + column), row_bytes(bytes) {}

  Row row(int64_t id) const {
    return {reinterpret_cast<const Weight*>(reinterpret_cast<const char*>(first) + id * row_bytes)};
  }
  template <int kColumns, int kLocality>
  __attribute__((always_inline)) void announce(int64_t id) const {
    prefetch<kColumns* int(sizeof(Weight)), kLocality>(to_prefetch(first, id, row_bytes));
  }

  const Weight* first;
  int64_t row_bytes;
};

// Pools columns [column, column + N * kLanes) for a bag; also prefetches these columns for later rows.
template <int N, bool kWeighted, typename Rows, typename Id>
inline void pool_block(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                       int64_t ahead, float count, float* out) {
  const Rows rows(a.weight, a.row_bytes, column);
  const Id* ids = static_cast<const Id*>(a.ids);
  const bool to_l1 = a.to_l1;
  Vec sum[N];
  for (int k = 0; k < N; ++k) sum[k] = Vec{};
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < end) {
      if (to_l1) {
        rows.template announce<N * kLanes, kToL1()>(ids[i + ahead]);
      } else {
        rows.template announce<N * kLanes, kToL2()>(ids[i + ahead]);
      }
    }
    const auto row = rows.row(ids[i]);
    for (int k = 0; k < N; ++k) {
      if constexpr (kWeighted) {
        sum[k] += row.vector(k) * a.sample_weights[i];
      } else {
        sum[k] += row.vector(k);
      }
    }
  }
  if (a.mean)
    for (int k = 0; k < N; ++k) sum[k] /= count;
  // Stores past the caches must fill whole cache lines.
  constexpr bool whole_lines = N * sizeof(Vec) % 64 == 0;
  // Then no line is read just to be overwritten, and rows stay in the caches. With 26 tables of 128 columns,
  // a lookup of one ID per bag takes 0.60 ms instead of 1.06.
  if (whole_lines && a.past_caches && reinterpret_cast<uintptr_t>(out + column) % 64 == 0) {
    for (int k = 0; k < N; ++k) store_past_caches(out + column + k * kLanes, sum[k]);
  } else {
    for (int k = 0; k < N; ++k) store(out + column + k * kLanes, sum[k]);
  }
}

template <bool kWeighted, typename Rows, typename Id>
inline void pool_tail(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                      int64_t ahead, float count, float* out) {
  const Rows rows(a.weight, a.row_bytes, column);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t rest = a.dim - column;
  float sum[kLanes] = {};
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < end) rows.template announce<1, kToL2()>(ids[i + ahead]);
    const auto row = rows.row(ids[i]);
    const float factor = kWeighted ? a.sample_weights[i] : 1.0f;
    for (int64_t d = 0; d < rest; ++d) sum[d] += kWeighted ? row.number(d) * factor : row.number(d);
  }
  for (int64_t d = 0; d < rest; ++d) out[column + d] = a.mean ? sum[d] / count : sum[d];
}

template <bool kWeighted, typename Rows, typename Id>
void pool_bags(const PoolArgs a) {  // by value, so that the compiler knows that float stores do not change it
  const int64_t ahead = rows_ahead(a.row_bytes, a.to_l1), end = a.end;
  for (int64_t bag = 0; bag < a.num_bags; ++bag) {
    const int64_t first = a.offsets[bag], last = a.offsets[bag + 1];
    // Division, not multiplication by the inverse: then every element equals torch's.
    const float count = last > first ? float(last - first) : 1.0f;
    float* out = a.out + bag * a.out_stride;
    int64_t column = 0;
    const auto block = [&](auto lanes) {
      constexpr int N = decltype(lanes)::value;
      pool_block<N, kWeighted, Rows, Id>(a, column, first, last, end, ahead, count, out);
      column += N * kLanes;
    };
    while (a.dim - column >= 8 * kLanes) block(std::integral_constant<int, 8>{});
    if (a.dim - column >= 4 * kLanes) block(std::integral_constant<int, 4>{});
    if (a.dim - column >= 2 * kLanes) block(std::integral_constant<int, 2>{});
    if (a.dim - column >= kLanes) block(std::integral_constant<int, 1>{});
    if (column < a.dim) pool_tail<kWeighted, Rows, Id>(a, column, first, last, end, ahead, count, out);
  }
  // Before another thread reads the output.
  if (a.past_caches) finish_stores();
}

template <typename Rows, typename Id>
void pool(const PoolArgs& a) {
  if (a.sample_weights != nullptr) {
    pool_bags<true, Rows, Id>(a);
  } else {
    pool_bags<false, Rows, Id>(a);
  }
}

template <typename Row>
inline void row_to_float(const Row& row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, row.vector(int(d / kLanes)));
  for (; d < dim; ++d) out[d] = row.number(d);
}

template <typename Rows, typename Id>
void gather(const GatherArgs& a) {
  const Rows rows(a.weight, a.row_bytes, 0);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t ahead = rows_ahead(a.row_bytes);
  for (int64_t i = 0; i < a.num_ids; ++i) {
    if (i + ahead < a.num_ids) prefetch_row(to_prefetch(a.weight, ids[i + ahead], a.row_bytes), a.row_bytes);
    row_to_float(rows.row(ids[i]), a.dim, a.out + i * a.dim);
  }
}
