// Counts, log-sum-exp and search over rows of scores; see scores.h. Included only by isa/kernels.inl, inside
// an unnamed namespace, after algebra.inl.

inline float lanes_sum(Vec v) {
  float total = 0;
  for (int j = 0; j < kLanes; ++j) total += v[j];
  return total;
}

inline int64_t lanes_count(Ints masks) {
  int64_t total = 0;
  for (int j = 0; j < kLanes; ++j) total -= masks[j];
  return total;
}

// Returns the log-sum-exp over a row whose maximum is not finite, as torch.logsumexp does.
inline float log_sum_of_limits(const float* row, int64_t columns, float max) {
  for (int64_t c = 0; c < columns; ++c) {
    if (std::isnan(row[c])) return row[c];
  }
  return max;
}

// Reads a row twice, because exponentials need its maximum: from the cache, if the row fits.
inline float log_sum(const float* row, int64_t columns, float max) {
  // Four sums, because an addition has to wait for the one before it.
  constexpr int kSums = 4;
  Vec sums[kSums] = {};
  int64_t c = 0;
  for (; c + kSums * kLanes <= columns; c += kSums * kLanes) {
    for (int s = 0; s < kSums; ++s) sums[s] += exponential(load(row + c + s * kLanes) - max);
  }
  for (; c + kLanes <= columns; c += kLanes) sums[0] += exponential(load(row + c) - max);
  if (c < columns) {
    Vec last = splat(-INFINITY);
    for (int64_t j = 0; c + j < columns; ++j) last[j] = row[c + j];
    sums[1] += exponential(last - max);
  }
  return max + std::log(lanes_sum((sums[0] + sums[1]) + (sums[2] + sums[3])));
}

void rank(const RankArgs& args) {
  const RankArgs a = args;
  for (int64_t b = a.first; b < a.last; ++b) {
    const float* row = a.scores + b * a.columns;
    const float target = a.targets[b];
    const Vec targets = splat(target);
    Ints at_most = {}, below = {};
    Vec maxima = splat(-INFINITY);
    int64_t c = 0;
    for (; c + kLanes <= a.columns; c += kLanes) {
      const Vec scores = load(row + c);
      // A true comparison is -1.
      at_most += scores <= targets;
      below += scores < targets;
      maxima = larger(maxima, scores);
    }
    int64_t num_at_most = lanes_count(at_most), num_below = lanes_count(below);
    float max = -INFINITY;
    for (int j = 0; j < kLanes; ++j) max = max > maxima[j] ? max : maxima[j];
    for (; c < a.columns; ++c) {
      num_at_most += row[c] <= target, num_below += row[c] < target;
      max = max > row[c] ? max : row[c];
    }
    a.above[b] = float(a.columns - num_at_most);
    a.equal[b] = float(num_at_most - num_below);
    // NaN scores below a finite maximum make the sum NaN.
    a.log_sums[b] =
        std::isfinite(max) ? log_sum(row, a.columns, max) : log_sum_of_limits(row, a.columns, max);
  }
}

// Lists the columns whose values are larger than the threshold, or NaN, until the list is nearly full.
// Returns the column to continue from.
int64_t find_larger(LargerArgs& a) {
  const Vec thresholds = splat(a.threshold);
  int64_t c = a.begin;
  const auto add = [&](int64_t end) {
    for (; c < end; ++c) {
      a.columns[a.count] = int32_t(c);
      a.count += !(a.row[c] <= a.threshold);
    }
  };
  while (c + kLanes <= a.end && a.count + kLanes <= a.room) {
#if defined(__AVX512F__)
    const bool any = _mm512_cmp_ps_mask((__m512)load(a.row + c), (__m512)thresholds, _CMP_NLE_UQ) != 0;
#else
    const bool any = lanes_count(Ints(load(a.row + c) <= thresholds)) < kLanes;
#endif
    if (any)
      add(c + kLanes);
    else
      c += kLanes;
  }
  if (c + kLanes > a.end && a.count + kLanes <= a.room) add(a.end);
  return c;
}
