// Pooled lookups. Included by kernels.inl only, inside its unnamed namespace.

// How far ahead of the row in work rows are asked for.
template <typename Weight>
int64_t rows_ahead(int64_t dim, bool to_l1 = false) {
  const int64_t rows = (to_l1 ? 16384 : 12288) / (dim * int64_t(sizeof(Weight)));
  return rows < 4 ? 4 : rows > 64 ? 64 : rows;
}

// Where the id's row is, if it has one: the ids that come may be of bags that nobody has checked yet.
template <typename Weight>
inline const void* to_prefetch(const Weight* weight, int64_t id, int64_t dim) {
  return reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(weight) +
                                       uint64_t(id) * uint64_t(dim) * sizeof(Weight));
}

// Columns [column, column + N * kLanes) of one bag; also prefetches these columns of the rows to come.
template <int N, bool kWeighted, typename Weight, typename Id>
inline void pool_block(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                       int64_t ahead, float count, float* out) {
  const Weight* weight = static_cast<const Weight*>(a.weight) + column;
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t dim = a.dim;
  const bool to_l1 = a.to_l1;
  Vec sum[N];
  for (int k = 0; k < N; ++k) sum[k] = Vec{};
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < end) {
      const void* next = to_prefetch(weight, ids[i + ahead], dim);
      if (to_l1) {
        prefetch<N * kLanes * sizeof(Weight), kToL1()>(next);
      } else {
        prefetch<N * kLanes * sizeof(Weight)>(next);
      }
    }
    const Weight* row = weight + int64_t(ids[i]) * dim;
    for (int k = 0; k < N; ++k) {
      if constexpr (kWeighted) {
        sum[k] += load(row + k * kLanes) * a.sample_weights[i];
      } else {
        sum[k] += load(row + k * kLanes);
      }
    }
  }
  if (a.mean)
    for (int k = 0; k < N; ++k) sum[k] /= count;
  constexpr bool whole_lines = N * sizeof(Vec) % 64 == 0;
  if (whole_lines && a.past_caches && reinterpret_cast<uintptr_t>(out + column) % 64 == 0) {
    for (int k = 0; k < N; ++k) store_past_caches(out + column + k * kLanes, sum[k]);
  } else {
    for (int k = 0; k < N; ++k) store(out + column + k * kLanes, sum[k]);
  }
}

template <bool kWeighted, typename Weight, typename Id>
inline void pool_tail(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                      int64_t ahead, float count, float* out) {
  const Weight* weight = static_cast<const Weight*>(a.weight) + column;
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t rest = a.dim - column;
  float sum[kLanes] = {};
  for (int64_t i = first; i < last; ++i) {
    if (i + ahead < end) prefetch<64>(to_prefetch(weight, ids[i + ahead], a.dim));
    const Weight* row = weight + int64_t(ids[i]) * a.dim;
    const float factor = kWeighted ? a.sample_weights[i] : 1.0f;
    for (int64_t d = 0; d < rest; ++d) sum[d] += kWeighted ? to_float(row[d]) * factor : to_float(row[d]);
  }
  for (int64_t d = 0; d < rest; ++d) out[column + d] = a.mean ? sum[d] / count : sum[d];
}

template <bool kWeighted, typename Weight, typename Id>
void pool_bags(const PoolArgs a) {  // by value: a store of floats cannot have changed it
  const int64_t ahead = rows_ahead<Weight>(a.dim, a.to_l1), end = a.end;
  for (int64_t bag = 0; bag < a.num_bags; ++bag) {
    const int64_t first = a.offsets[bag], last = a.offsets[bag + 1];
    // A divisor, not a factor: this way every element is the one that torch computes.
    const float count = last > first ? float(last - first) : 1.0f;
    float* out = a.out + bag * a.out_stride;
    int64_t column = 0;
    const auto block = [&](auto lanes) {
      constexpr int N = decltype(lanes)::value;
      pool_block<N, kWeighted, Weight, Id>(a, column, first, last, end, ahead, count, out);
      column += N * kLanes;
    };
    while (a.dim - column >= 8 * kLanes) block(std::integral_constant<int, 8>{});
    if (a.dim - column >= 4 * kLanes) block(std::integral_constant<int, 4>{});
    if (a.dim - column >= 2 * kLanes) block(std::integral_constant<int, 2>{});
    if (a.dim - column >= kLanes) block(std::integral_constant<int, 1>{});
    if (column < a.dim) pool_tail<kWeighted, Weight, Id>(a, column, first, last, end, ahead, count, out);
  }
  if (a.past_caches) finish_stores();
}

template <typename Weight, typename Id>
void pool(const PoolArgs& a) {
  if (a.sample_weights != nullptr) {
    pool_bags<true, Weight, Id>(a);
  } else {
    pool_bags<false, Weight, Id>(a);
  }
}
