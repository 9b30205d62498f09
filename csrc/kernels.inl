// The inner loops. Every kernels_<isa>.cpp defines MESHREC_KERNELS (the name of its table) and includes this
// file.
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace meshrec {
namespace {

#include "simd.h"

constexpr int64_t kPrefetchBytes = 4096;  // how far ahead of the row in work, in bytes of rows

template <typename Weight>
int64_t rows_ahead(int64_t dim) {
  const int64_t rows = kPrefetchBytes / (dim * int64_t(sizeof(Weight)));
  return rows < 4 ? 4 : rows > 32 ? 32 : rows;
}

// ---- forward
// ----------------------------------------------------------------------------------------------------

// Columns [column, column + N * kLanes) of one bag; the first block of a row also prefetches the rows to
// come.
template <int N, bool kWeighted, bool kPrefetch, typename Weight, typename Id>
inline void pool_block(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                       int64_t ahead, float count, float* out) {
  const Weight* weight = static_cast<const Weight*>(a.weight);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t dim = a.dim;
  Vec sum[N];
  for (int k = 0; k < N; ++k) sum[k] = Vec{};
  for (int64_t i = first; i < last; ++i) {
    if (kPrefetch && i + ahead < end) prefetch_row(weight + int64_t(ids[i + ahead]) * dim, dim);
    const Weight* row = weight + int64_t(ids[i]) * dim + column;
    for (int k = 0; k < N; ++k) {
      if constexpr (kWeighted) {
        sum[k] += load(row + k * kLanes) * a.sample_weights[i];
      } else {
        sum[k] += load(row + k * kLanes);
      }
    }
  }
  for (int k = 0; k < N; ++k) store(out + column + k * kLanes, a.mean ? sum[k] / count : sum[k]);
}

template <bool kWeighted, bool kPrefetch, typename Weight, typename Id>
inline void pool_tail(const PoolArgs& a, int64_t column, int64_t first, int64_t last, int64_t end,
                      int64_t ahead, float count, float* out) {
  const Weight* weight = static_cast<const Weight*>(a.weight);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t rest = a.dim - column;
  float sum[kLanes] = {};
  for (int64_t i = first; i < last; ++i) {
    if (kPrefetch && i + ahead < end) prefetch_row(weight + int64_t(ids[i + ahead]) * a.dim, a.dim);
    const Weight* row = weight + int64_t(ids[i]) * a.dim + column;
    const float factor = kWeighted ? a.sample_weights[i] : 1.0f;
    for (int64_t d = 0; d < rest; ++d) sum[d] += kWeighted ? to_float(row[d]) * factor : to_float(row[d]);
  }
  for (int64_t d = 0; d < rest; ++d) out[column + d] = a.mean ? sum[d] / count : sum[d];
}

template <bool kWeighted, typename Weight, typename Id>
void pool_bags(const PoolArgs& a) {
  const int64_t ahead = rows_ahead<Weight>(a.dim), end = a.offsets[a.num_bags];
  for (int64_t bag = 0; bag < a.num_bags; ++bag) {
    const int64_t first = a.offsets[bag], last = a.offsets[bag + 1];
    // A divisor, not a factor: this way every element is the one that torch computes.
    const float count = last > first ? float(last - first) : 1.0f;
    float* out = a.out + bag * a.out_stride;
    int64_t column = 0;
    // The first block prefetches; it is the only one for the usual widths.
    const auto block = [&](auto lanes) {
      constexpr int N = decltype(lanes)::value;
      if (column == 0) {
        pool_block<N, kWeighted, true, Weight, Id>(a, column, first, last, end, ahead, count, out);
      } else {
        pool_block<N, kWeighted, false, Weight, Id>(a, column, first, last, end, ahead, count, out);
      }
      column += N * kLanes;
    };
    while (a.dim - column >= 8 * kLanes) block(std::integral_constant<int, 8>{});
    if (a.dim - column >= 4 * kLanes) block(std::integral_constant<int, 4>{});
    if (a.dim - column >= 2 * kLanes) block(std::integral_constant<int, 2>{});
    if (a.dim - column >= kLanes) block(std::integral_constant<int, 1>{});
    if (column == 0) {
      pool_tail<kWeighted, true, Weight, Id>(a, column, first, last, end, ahead, count, out);
    } else if (column < a.dim) {
      pool_tail<kWeighted, false, Weight, Id>(a, column, first, last, end, ahead, count, out);
    }
  }
}

template <typename Weight, typename Id>
void pool(const PoolArgs& a) {
  if (a.sample_weights != nullptr) {
    pool_bags<true, Weight, Id>(a);
  } else {
    pool_bags<false, Weight, Id>(a);
  }
}

template <typename Weight>
inline void row_to_float(const Weight* row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(row + d));
  for (; d < dim; ++d) out[d] = to_float(row[d]);
}

template <typename Weight, typename Id>
void gather(const GatherArgs& a) {
  const Weight* weight = static_cast<const Weight*>(a.weight);
  const Id* ids = static_cast<const Id*>(a.ids);
  const int64_t ahead = rows_ahead<Weight>(a.dim);
  for (int64_t i = 0; i < a.num_ids; ++i) {
    if (i + ahead < a.num_ids) prefetch_row(weight + int64_t(ids[i + ahead]) * a.dim, a.dim);
    row_to_float(weight + int64_t(ids[i]) * a.dim, a.dim, a.out + i * a.dim);
  }
}

// Reads columns as vectors, or one by one at the end of a row; terms are written once for both.
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

// The sum of term(at) over all columns, in 16 lanes and one fixed tree: every instruction set adds in one
// order.
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
  const int64_t ahead = rows_ahead<Weight>(a.dim), end = a.offsets[a.num_bags];
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

constexpr int64_t kPairsAhead = 24;

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

// A few runs whose gradients are summed before any of their rows is touched: the rows' cache lines arrive
// meanwhile, and the steps' long dependency chains overlap.
struct RunBatch {
  int size = 0;
  uint32_t rows[kMaxBatch];
  uint32_t slots[kMaxBatch];  // of each run's first pair
  const float* grads[kMaxBatch];
  int64_t num_pairs[kMaxBatch];
};

// The summed gradient of pairs [first, last).
inline const float* sum_pairs(const RunArgs& a, int64_t first, int64_t last, float* sum) {
  if (a.scales != nullptr) {
    sum_run<true>(a, first, last, sum);
  } else {
    sum_run<false>(a, first, last, sum);
  }
  return sum;
}

// Calls prepare(batch), and then use(batch, k) for each of its runs; touch(row) announces a row that comes
// soon, a little at a time, so that memory and arithmetic overlap.
template <typename Touch, typename Prepare, typename Use>
inline void for_each_batch(const RunArgs& a, const Touch& touch, const Prepare& prepare, const Use& use) {
  int64_t announced = a.begin;
  const auto announce = [&](int64_t count) __attribute__((always_inline)) {
    const int64_t to = announced + count < a.readable ? announced + count : a.readable;
    for (; announced < to; ++announced)
      if (announced == a.begin || a.pairs[announced].row != a.pairs[announced - 1].row)
        touch(a.pairs[announced].row);
  };
  const int64_t batch_size = 2048 / a.dim < 1 ? 1 : 2048 / a.dim < kMaxBatch ? 2048 / a.dim : kMaxBatch;
  announce(kPairsAhead);
  RunBatch batch;
  for (int64_t first = a.begin; first < a.end;) {
    const uint32_t row = a.pairs[first].row;
    int64_t last = first + 1;
    while (last < a.end && a.pairs[last].row == row) ++last;
    const uint32_t slot = a.pairs[first].slot;
    float* sum = a.scratch + batch.size * padded(a.dim);
    batch.rows[batch.size] = row;
    batch.slots[batch.size] = slot;
    batch.num_pairs[batch.size] = last - first;
    if (last == first + 1 && a.scales == nullptr) {
      batch.grads[batch.size] = a.grads[slot];
    } else {
      batch.grads[batch.size] = sum_pairs(a, first, last, sum);
    }
    first = last;
    if (++batch.size == batch_size || first >= a.end) {
      prepare(batch);
      for (int k = 0; k < batch.size; ++k) {
        announce(batch.num_pairs[k]);
        use(batch, k);
      }
      batch.size = 0;
    }
  }
}

void sum(const SumArgs& a) {
  const int64_t dim = a.runs.dim;
  int64_t run = 0;
  for_each_batch(
      a.runs, [](uint32_t) {}, [](const RunBatch&) {},
      [&](const RunBatch& batch, int k) {
        if (a.rows != nullptr) a.rows[run] = batch.rows[k];
        memcpy(a.sums + (a.dense ? int64_t(batch.rows[k]) : run) * dim, batch.grads[k], dim * sizeof(float));
        ++run;
      });
}

// ---- optimizers: formulas and their sources are in meshrec/optim/optimizers.py
// --------------------------------------

constexpr bool row_state0(int optimizer) { return optimizer == kRowWiseAdagrad; }
constexpr bool row_state1(int optimizer) {
  return optimizer == kPartialRowWiseAdam || optimizer == kPartialRowWiseLAMB;
}

struct Step {
  const Hyper& hyper;
  const float* stats;  // of this row, or null
  float* work;         // dim floats, for the normalised direction
};

inline float mean_square(const float* g, const float* w, int64_t dim, const Step& step) {
  const float l2 = step.hyper.decay_mode == kL2 ? step.hyper.weight_decay : 0.0f;
  if (step.stats != nullptr) return float(step.stats[0] / step.hyper.row_dim);
  const float total =
      l2 == 0 ? sum_over(dim, [&](auto at) { return at(g) * at(g); })  // spares reading the row
              : sum_over(dim, [&](auto at) { return (at(g) + at(w) * l2) * (at(g) + at(w) * l2); });
  return float(total / step.hyper.row_dim);
}

inline void adagrad_row(float* __restrict w, const float* __restrict g, float rate, int64_t dim,
                        const Hyper& h) {
  const float l2 = h.decay_mode == kL2 ? h.weight_decay : 0.0f;
  const float keep = h.decay_mode == kDecoupled ? 1.0f - h.lr * h.weight_decay : 1.0f;
  for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - rate * (g[d] + l2 * w[d]);
}

template <int kOptimizer>
inline void step_row(float* __restrict w, const float* __restrict g, float* __restrict s0,
                     float* __restrict s1, int64_t dim, const Step& step) {
  const Hyper& h = step.hyper;
  const float lr = h.lr, eps = h.eps;
  const float l2 = h.decay_mode == kL2 ? h.weight_decay : 0.0f;
  const bool lamb = kOptimizer == kLAMB || kOptimizer == kPartialRowWiseLAMB;
  const float keep = h.decay_mode == kDecoupled && !lamb ? 1.0f - lr * h.weight_decay : 1.0f;
  const auto grad = [&](int64_t d) { return g[d] + l2 * w[d]; };
  if constexpr (kOptimizer == kSGD) {
    for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - lr * grad(d);
  } else if constexpr (kOptimizer == kAdagrad) {
    for (int64_t d = 0; d < dim; ++d) {
      const float x = grad(d);
      s0[d] += x * x;
      w[d] = keep * w[d] - lr * x / (__builtin_sqrtf(s0[d]) + eps);
    }
  } else if constexpr (kOptimizer == kRowWiseAdagrad) {
    s0[0] += mean_square(g, w, dim, step);
    adagrad_row(w, g, lr / (__builtin_sqrtf(s0[0]) + eps), dim, h);
  } else if constexpr (kOptimizer == kLARS) {
    const float w_norm = __builtin_sqrtf(
        step.stats != nullptr ? step.stats[1] : sum_over(dim, [&](auto at) { return at(w) * at(w); }));
    const float g_norm = __builtin_sqrtf(
        step.stats != nullptr ? step.stats[0] : sum_over(dim, [&](auto at) { return at(g) * at(g); }));
    const float rate =
        w_norm > 0 && g_norm > 0 ? lr * h.trust_coefficient * w_norm / (g_norm + l2 * w_norm + eps) : lr;
    for (int64_t d = 0; d < dim; ++d) {
      s0[d] = h.momentum * s0[d] + rate * grad(d);
      w[d] = keep * w[d] - s0[d];
    }
  } else {
    // The Adam family: work holds the normalised direction r.
    float row_denominator = 0;
    if constexpr (row_state1(kOptimizer)) {
      s1[0] = h.beta2 * s1[0] + h.fresh2 * mean_square(g, w, dim, step);
      row_denominator = __builtin_sqrtf(s1[0] / h.correction2) + eps;
    }
    float* r = step.work;
    const float decay_in_r = lamb && h.decay_mode == kDecoupled ? h.weight_decay : 0.0f;
    for (int64_t d = 0; d < dim; ++d) {
      const float x = grad(d);
      s0[d] = h.beta1 * s0[d] + h.fresh1 * x;
      float denominator = row_denominator;
      if constexpr (!row_state1(kOptimizer)) {
        s1[d] = h.beta2 * s1[d] + h.fresh2 * x * x;
        denominator = __builtin_sqrtf(s1[d] / h.correction2) + eps;
      }
      r[d] = s0[d] / h.correction1 / denominator + decay_in_r * w[d];
    }
    float rate = lr;
    if (lamb) {
      const float w_square =
          step.stats != nullptr ? step.stats[1] : sum_over(dim, [&](auto at) { return at(w) * at(w); });
      const float r_square =
          step.stats != nullptr ? step.stats[2] : sum_over(dim, [&](auto at) { return at(r) * at(r); });
      if (w_square > 0 && r_square > 0) rate = lr * (__builtin_sqrtf(w_square) / __builtin_sqrtf(r_square));
    }
    for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - rate * r[d];
  }
}

// kDim = 0: any width; otherwise the loops are unrolled for it.
template <int kOptimizer, typename Weight, int kDim>
void update_rows(const UpdateArgs& args) {
  RunArgs runs = args.runs;
  if (kDim != 0) runs.dim = kDim;
  const int64_t dim = kDim != 0 ? kDim : runs.dim;
  Weight* weight = static_cast<Weight*>(args.weight);
  const int64_t width0 = row_state0(kOptimizer) ? 1 : dim, width1 = row_state1(kOptimizer) ? 1 : dim;
  float* work = runs.scratch + kMaxBatch * padded(dim);
  float* row_buffer = work + padded(dim);
  const bool stochastic = args.hyper.seed != 0;
  // All rates of a batch first: their chains of additions, root and division overlap.
  constexpr bool kRatesFirst = kOptimizer == kRowWiseAdagrad && sizeof(Weight) == sizeof(float);
  float rates[kMaxBatch];
  const auto state = [](float* base, int64_t row, int64_t width) {
    return base != nullptr ? base + row * width : base;
  };
  const auto stats = [&](const RunBatch& batch, int k) {
    return args.row_stats != nullptr ? args.row_stats[batch.slots[k]] : nullptr;
  };
  for_each_batch(
      runs,
      [&](uint32_t row) __attribute__((always_inline)) {
        prefetch_row(weight + int64_t(row) * dim, dim);
        if (args.state0 != nullptr) prefetch_row(args.state0 + int64_t(row) * width0, width0);
        if (args.state1 != nullptr) prefetch_row(args.state1 + int64_t(row) * width1, width1);
      },
      [&](const RunBatch& batch) {
        if constexpr (kRatesFirst) {
          for (int k = 0; k < batch.size; ++k) {
            float* sum = args.state0 + batch.rows[k];
            const Step step{args.hyper, stats(batch, k), work};
            *sum += mean_square(batch.grads[k], weight + int64_t(batch.rows[k]) * dim, dim, step);
            rates[k] = args.hyper.lr / (__builtin_sqrtf(*sum) + args.hyper.eps);
          }
        }
      },
      [&](const RunBatch& batch, int k) {
        const uint32_t row = batch.rows[k];
        Weight* target = weight + int64_t(row) * dim;
        if constexpr (kRatesFirst) {
          adagrad_row(target, batch.grads[k], rates[k], dim, args.hyper);
        } else {
          const Step step{args.hyper, stats(batch, k), work};
          float* s0 = state(args.state0, row, width0);
          float* s1 = state(args.state1, row, width1);
          if constexpr (sizeof(Weight) == sizeof(float)) {
            step_row<kOptimizer>(target, batch.grads[k], s0, s1, dim, step);
          } else {
            row_to_float(target, dim, row_buffer);
            step_row<kOptimizer>(row_buffer, batch.grads[k], s0, s1, dim, step);
            for (int64_t d = 0; d < dim; ++d) {
              const uint32_t noise =
                  stochastic ? random_bits(args.hyper.seed, args.hyper.step, row, uint64_t(d)) : 0;
              target[d] = round_to(target, row_buffer[d], noise, stochastic);
            }
          }
        }
      });
}

template <int kOptimizer, typename Weight>
void update(const UpdateArgs& a) {
  if constexpr (sizeof(Weight) == sizeof(float) && (kOptimizer == kSGD || kOptimizer == kRowWiseAdagrad)) {
    switch (a.runs.dim) {
      case 32:
        return update_rows<kOptimizer, Weight, 32>(a);
      case 64:
        return update_rows<kOptimizer, Weight, 64>(a);
      case 128:
        return update_rows<kOptimizer, Weight, 128>(a);
      case 256:
        return update_rows<kOptimizer, Weight, 256>(a);
    }
  }
  update_rows<kOptimizer, Weight, 0>(a);
}

template <typename Id>
bool all_below(const Id* ids, int64_t n, uint64_t bound) {
  uint64_t bad = 0;
  for (int64_t i = 0; i < n; ++i) bad |= uint64_t(uint64_t(int64_t(ids[i])) >= bound);
  return bad == 0;
}

#define MESHREC_BY_WEIGHT(function)                            \
  {                                                            \
    {function<float, int32_t>, function<float, int64_t>},      \
        {function<Half, int32_t>, function<Half, int64_t>}, {  \
      function<BFloat16, int32_t>, function<BFloat16, int64_t> \
    }                                                          \
  }
#define MESHREC_UPDATE(optimizer) \
  {update<optimizer, float>, update<optimizer, Half>, update<optimizer, BFloat16>}

const Kernels kTable = {MESHREC_NAME,
                        MESHREC_BY_WEIGHT(pool),
                        MESHREC_BY_WEIGHT(gather),
                        MESHREC_BY_WEIGHT(dot),
                        {MESHREC_UPDATE(kSGD), MESHREC_UPDATE(kAdagrad), MESHREC_UPDATE(kRowWiseAdagrad),
                         MESHREC_UPDATE(kAdam), MESHREC_UPDATE(kPartialRowWiseAdam), MESHREC_UPDATE(kLAMB),
                         MESHREC_UPDATE(kPartialRowWiseLAMB), MESHREC_UPDATE(kLARS)},
                        sum,
                        all_below<int32_t>,
                        all_below<int64_t>};

}  // namespace

const Kernels* MESHREC_KERNELS() { return &kTable; }

}  // namespace meshrec
