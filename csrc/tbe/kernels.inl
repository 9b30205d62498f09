// The inner loops of lookups and updates. Included only by isa/kernels.inl, inside an unnamed namespace.

// ---- forward
// ----------------------------------------------------------------------------------------------------

#include "tbe/pool.inl"

// Reads columns as vectors, or one by one at the end of a row, so a formula is written only once.
struct VectorAt {
  int64_t column;
  template <typename T>
  Vec operator()(const T* row) const {
    return load(row + column);
  }
};
struct ScalarAt {
  int64_t column;
  template <typename T>
  float operator()(const T* row) const {
    return to_float(row[column]);
  }
};

// Returns the sum of term(at) over all columns, in 16 lanes and a fixed tree: every instruction set adds in
// the same order.
template <typename Term>
inline float sum_over(int64_t dim, const Term& term) {
  constexpr int kParts = 16 / kLanes;
  Vec part[kParts];
  for (int k = 0; k < kParts; ++k) part[k] = Vec{};
  int64_t d = 0;
  for (; d + 16 <= dim; d += 16)
    for (int k = 0; k < kParts; ++k) part[k] += term(VectorAt{d + k * kLanes});
  if (d < dim) {
    float rest[16] = {};
    for (int j = 0; d + j < dim; ++j) rest[j] = term(ScalarAt{d + j});
    for (int k = 0; k < kParts; ++k) part[k] += load(rest + k * kLanes);
  }
  return lanes_total(part);
}

template <typename Weight, typename Id>
void dot(const DotArgs& a) {
  const Weight* weight = static_cast<const Weight*>(a.weight);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t ahead = rows_ahead(a.dim * int64_t(sizeof(Weight))), end = a.offsets[a.num_bags];
  for (int64_t bag = 0; bag < a.num_bags; ++bag) {
    const int64_t first = a.offsets[bag], last = a.offsets[bag + 1];
    const float* grad = a.grad + bag * a.grad_stride;
    const float scale = a.mean ? 1.0f / float(last - first) : 1.0f;
    for (int64_t i = first; i < last; ++i) {
      if (i + ahead < end) prefetch_row(weight + int64_t(ids[i + ahead]) * a.dim, a.dim);
      const Weight* row = weight + int64_t(ids[i]) * a.dim;
      a.out[i] = scale * sum_over(a.dim, [&](auto at) { return at(grad) * at(row); });
    }
  }
}

// ---- runs of equal rows
// ------------------------------------------------------------------------------------------

constexpr int64_t kPairsAhead = 16;  // rows and gradients to prefetch to the L1 cache
// With 512, rows from memory had left the L2 cache again before they were updated.
constexpr int64_t kRowsAhead = 256;  // rows, some in the next range, to prefetch from memory

inline int64_t rows_announced(const RunArgs& a) {
  // Rows in the caches are not fetched twice: 4 % less time per step for a table of a million rows.
  if (!a.from_memory) return INT32_MAX;
  return a.num_pairs < kRowsAhead ? a.num_pairs : kRowsAhead;
}
template <typename Touch>
__attribute__((always_inline)) inline void touch_far(const RunArgs& a, uint32_t row, const Touch& touch) {
  if (a.to_l1) {
    // Measured: 2 to 4 % less time for forward and update.
    touch(row, kToL1Once);  // and must not evict other data from L2 that the step needs
  } else {
    touch(row, kToL2);
  }
}
// Calls touch(row, locality) for the rows in the pairs after pair i: shortly before use to L1, and long
// before that from memory, if they are there. So rows in the next range arrive while this range is updated
// and that range is sorted, and memory is never idle. Another thread may be sorting the next range at this
// moment, so pairs read from it only decide which rows to prefetch. The current row is not touched again,
// because a hot row has thousands of pairs.
template <typename Touch>
__attribute__((always_inline)) inline void announce(const RunArgs& a, int64_t i, const Touch& touch) {
  const uint32_t row = a.pairs[i].row;
  const int64_t near = i + kPairsAhead, far = i + rows_announced(a);
  if (far < a.num_pairs) {
    if (a.pairs[far].row != row) touch_far(a, a.pairs[far].row, touch);
  } else if (far < a.num_pairs + a.num_next) {
    touch_far(a, a.next[far - a.num_pairs].row, touch);
  }
  if (near < a.num_pairs && a.pairs[near].row != row) touch(a.pairs[near].row, kToL1);
}
// Touches the rows in the next range that announce() has not reached, if it is longer than this range.
template <typename Touch>
__attribute__((always_inline)) inline void announce_rest(const RunArgs& a, const Touch& touch) {
  for (int64_t i = rows_announced(a); i < a.num_next; ++i) touch_far(a, a.next[i].row, touch);
}

template <int N, bool kScaled>
inline void sum_block(const RunArgs& a, int64_t column, int64_t first, int64_t last, float* out) {
  Vec sum[N];
  for (int k = 0; k < N; ++k) sum[k] = Vec{};
  for (int64_t i = first; i < last; ++i) {
    const uint32_t slot = a.pairs[i].slot;
    const float* grad = a.grads[slot] + column;
    for (int k = 0; k < N; ++k) {
      if constexpr (kScaled) {
        sum[k] += load(grad + k * kLanes) * a.scales[slot];
      } else {
        sum[k] += load(grad + k * kLanes);
      }
    }
  }
  for (int k = 0; k < N; ++k) store(out + column + k * kLanes, sum[k]);
}

template <bool kScaled>
inline void sum_run(const RunArgs& a, int64_t first, int64_t last, float* out) {
  int64_t column = 0;
  while (a.dim - column >= 8 * kLanes)
    sum_block<8, kScaled>(a, column, first, last, out), column += 8 * kLanes;
  if (a.dim - column >= 4 * kLanes) sum_block<4, kScaled>(a, column, first, last, out), column += 4 * kLanes;
  if (a.dim - column >= 2 * kLanes) sum_block<2, kScaled>(a, column, first, last, out), column += 2 * kLanes;
  if (a.dim - column >= kLanes) sum_block<1, kScaled>(a, column, first, last, out), column += kLanes;
  const int64_t rest = a.dim - column;
  if (rest == 0) return;
  float sum[kLanes] = {};
  for (int64_t i = first; i < last; ++i) {
    const uint32_t slot = a.pairs[i].slot;
    const float* grad = a.grads[slot] + column;
    for (int64_t d = 0; d < rest; ++d) sum[d] += kScaled ? grad[d] * a.scales[slot] : grad[d];
  }
  for (int64_t d = 0; d < rest; ++d) out[column + d] = sum[d];
}

// A run of pairs with equal rows, and the gradient sum.
struct Run {
  uint32_t row, slot;  // slot: from the first pair
  int64_t num_pairs;
  const float* grad;
};

// Calls use(run) for every run, and before it touch(row, locality).
template <typename Touch, typename Use>
inline void for_each_run(const RunArgs& a, const Touch& touch, const Use& use) {
  for (int64_t first = 0; first < a.num_pairs;) {
    Run run{a.pairs[first].row, a.pairs[first].slot, 1, a.grads[a.pairs[first].slot]};
    while (first + run.num_pairs < a.num_pairs && a.pairs[first + run.num_pairs].row == run.row)
      ++run.num_pairs;
    // A single gradient without a factor is used where it is.
    if (run.num_pairs > 1 || a.scales != nullptr) {
      (a.scales != nullptr ? sum_run<true> : sum_run<false>)(a, first, first + run.num_pairs, a.scratch);
      run.grad = a.scratch;
    }
    for (int64_t i = first; i < first + run.num_pairs; ++i) announce(a, i, touch);
    first += run.num_pairs;
    use(run);
  }
  announce_rest(a, touch);
}

void sum(const SumArgs& a) {
  const int64_t dim = a.runs.dim;
  int64_t index = 0;
  for_each_run(
      a.runs, [](uint32_t, auto) {},
      [&](const Run& run) {
        if (a.rows != nullptr) a.rows[index] = run.row;
        memcpy(a.sums + (a.dense ? int64_t(run.row) : index) * dim, run.grad, dim * sizeof(float));
        ++index;
      });
}

float square_row(const float* row, int64_t dim) {
  return sum_over(dim, [&](auto at) { return at(row) * at(row); });
}

int64_t square(const SquareArgs& a) {
  const RunArgs& runs = a.runs;
  if (a.by_slot !=
      nullptr)  // few runs have several gradients, and these are far apart: prefetch all of them first
    for (int64_t i = 1; i < runs.num_pairs; ++i)
      if (runs.pairs[i].row == runs.pairs[i - 1].row) {
        prefetch_row(runs.grads[runs.pairs[i - 1].slot], runs.dim);
        prefetch_row(runs.grads[runs.pairs[i].slot], runs.dim);
      }
  float* next = a.squares;
  for_each_run(
      a.runs, [](uint32_t, auto) {},
      [&](const Run& run) {
        const bool known = a.by_slot != nullptr && run.num_pairs == 1;
        *next++ = known ? a.by_slot[run.slot] : square_row(run.grad, a.runs.dim);
      });
  return next - a.squares;
}

#include "tbe/formulas.inl"

template <int kOptimizer, typename Weight>
void update_rows(const UpdateArgs& args) {
  const RunArgs& runs = args.runs;
  const int64_t dim = runs.dim;
  Weight* weight = static_cast<Weight*>(args.weight);
  const int64_t width0 = kStateShapes[kOptimizer].per_row[0] ? 1 : dim;
  const int64_t width1 = kStateShapes[kOptimizer].per_row[1] ? 1 : dim;
  float* work = runs.scratch + padded(dim);
  float* row_buffer = work + padded(dim);
  const bool stochastic = args.hyper.seed != 0;
  const float* mean_square = args.mean_squares;
  const auto state = [](float* base, int64_t row, int64_t width) {
    return base != nullptr ? base + row * width : base;
  };
  for_each_run(
      runs,
      [&](uint32_t row, auto locality) __attribute__((always_inline)) {
        prefetch_row<locality()>(weight + int64_t(row) * dim, dim);
        if (args.state0 != nullptr) prefetch_row<locality()>(args.state0 + int64_t(row) * width0, width0);
        if (args.state1 != nullptr) prefetch_row<locality()>(args.state1 + int64_t(row) * width1, width1);
      },
      [&](const Run& run) {
        Weight* target = weight + int64_t(run.row) * dim;
        const float* stats = args.row_stats != nullptr ? args.row_stats[run.slot] : nullptr;
        const Step step{args.hyper, stats, mean_square, work};
        if (mean_square != nullptr) ++mean_square;
        float* s0 = state(args.state0, run.row, width0);
        float* s1 = state(args.state1, run.row, width1);
        if constexpr (sizeof(Weight) == sizeof(float)) {
          step_row(Code<kOptimizer>(), target, run.grad, s0, s1, dim, step);
        } else {
          row_to_float(typename DenseRows<Weight>::Row{target}, dim, row_buffer);
          step_row(Code<kOptimizer>(), row_buffer, run.grad, s0, s1, dim, step);
          const uint64_t row = args.row_keys != nullptr ? uint64_t(args.row_keys[run.row])
                                                        : uint64_t(args.first_row) + run.row;
          const uint64_t column = uint64_t(args.first_column);
          for (int64_t d = 0; d < dim; ++d) {
            const uint32_t noise =
                stochastic ? random_bits(args.hyper.seed, args.hyper.step, row, column + uint64_t(d)) : 0;
            target[d] = round_to(target, row_buffer[d], noise, stochastic);
          }
        }
      });
}

// Specialized for the usual widths and optimizers. The gradient is summed in registers. This leaves so few
// instructions per row that the processor reaches the next rows while this row waits for memory.
template <int kOptimizer, int kDim, bool kScaled>
void update_rows_of(const UpdateArgs args) {
  static_assert(kOptimizer == kSGD || kOptimizer == kRowWiseAdagrad);
  constexpr int kVectors = kDim / kLanes, kParts = 16 / kLanes;
  // Copies, so that the compiler knows that stores to rows do not change them.
  const RunArgs a = args.runs;
  const Hyper h = args.hyper;
  float* const state0 = args.state0;
  float* weight = static_cast<float*>(args.weight);
  const float keep = h.decay_mode == kDecoupled ? 1.0f - h.lr * h.weight_decay : 1.0f;
  const float* mean_square = args.mean_squares;
  const auto touch = [&](uint32_t row, auto locality) __attribute__((always_inline)) {
    constexpr int once = locality() == kToL1() ? kToL1Once() : locality();  // gradient rows are read again
    prefetch<kDim * sizeof(float), once>(weight + int64_t(row) * kDim);
    if constexpr (kOptimizer == kRowWiseAdagrad) prefetch<64, locality()>(state0 + row);
  };
  for (int64_t i = 0; i < a.num_pairs;) {
    const uint32_t row = a.pairs[i].row;
    Vec grad[kVectors];
    const auto add = [&](bool first) __attribute__((always_inline)) {
      announce(a, i, touch);
      if (i + kPairsAhead < a.num_pairs)
        prefetch<kDim * sizeof(float), kToL1()>(a.grads[a.pairs[i + kPairsAhead].slot]);
      const uint32_t slot = a.pairs[i].slot;
      const float* from = a.grads[slot];
      for (int k = 0; k < kVectors; ++k) {
        Vec part = load(from + k * kLanes);
        if constexpr (kScaled) part *= a.scales[slot];
        grad[k] = first ? part : grad[k] + part;
      }
    };
    add(true);
    for (++i; i < a.num_pairs && a.pairs[i].row == row; ++i) add(false);
    float rate = h.lr;
    if constexpr (kOptimizer == kRowWiseAdagrad) {
      float& sum = state0[row];
      if (mean_square != nullptr) {
        sum += *mean_square++;
      } else {
        Vec part[kParts];
        for (int k = 0; k < kParts; ++k) part[k] = Vec{};
        // The same 16 lanes as in `sum_over`, so both loops give the same bits.
        for (int k = 0; k < kVectors; ++k) part[k % kParts] += grad[k] * grad[k];
        sum += lanes_total(part) / kDim;
      }
      rate = h.lr / (__builtin_sqrtf(sum) + h.eps);
    }
    float* target = weight + int64_t(row) * kDim;
    for (int k = 0; k < kVectors; ++k)
      store(target + k * kLanes, keep * load(target + k * kLanes) - rate * grad[k]);
  }
  announce_rest(a, touch);
}

template <int kOptimizer, int kDim>
void update_rows_of(const UpdateArgs& args) {
  if (args.runs.scales != nullptr) {
    update_rows_of<kOptimizer, kDim, true>(args);
  } else {
    update_rows_of<kOptimizer, kDim, false>(args);
  }
}

template <int kOptimizer, typename Weight>
void update(const UpdateArgs& a) {
  if constexpr (sizeof(Weight) == sizeof(float) && (kOptimizer == kSGD || kOptimizer == kRowWiseAdagrad)) {
    // The specialized loops have neither L2 decay nor row_stats, and compute a mean only over the local
    // columns.
    const bool own_mean = a.mean_squares != nullptr || a.hyper.row_dim == double(a.runs.dim);
    const bool plain = a.hyper.decay_mode != kL2 && a.row_stats == nullptr && own_mean;
    switch (plain ? a.runs.dim : 0) {
      case 32:
        return update_rows_of<kOptimizer, 32>(a);
      case 64:
        return update_rows_of<kOptimizer, 64>(a);
      case 128:
        return update_rows_of<kOptimizer, 128>(a);
      case 256:
        return update_rows_of<kOptimizer, 256>(a);
    }
  }
  update_rows<kOptimizer, Weight>(a);
}

template <typename Id>
bool all_below(const Id* ids, int64_t n, uint64_t bound) {
  uint64_t bad = 0;
  // Unsigned, so a negative ID is above the bound as well.
  for (int64_t i = 0; i < n; ++i) bad |= uint64_t(uint64_t(int64_t(ids[i])) >= bound);
  return bad == 0;
}
