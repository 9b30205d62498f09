// The step of each optimizer on a row, in fp32. kernels.inl includes this file, and does not compile if an
// optimizer in formulas.inc has no step_row. meshrec/ops/tbe/formulas.py has the formulas in plain torch,
// meshrec/optim/optimizers.py the sources.

template <int kOptimizer>
struct Code {};

// Inputs for the step on a row, apart from the row.
struct Step {
  const Hyper& hyper;
  const float* stats;        // for this row, or null
  const float* mean_square;  // for this row, or null
  float* work;               // dim floats, for the normalized direction

  // Factor for adding the row to the gradient (L2 decay).
  float l2() const { return hyper.decay_mode == kL2 ? hyper.weight_decay : 0.0f; }
  // Factor by which the row shrinks (decoupled decay).
  float keep() const { return hyper.decay_mode == kDecoupled ? 1.0f - hyper.lr * hyper.weight_decay : 1.0f; }
  // Returns the squared norm of x, or of the whole row if it is known: RowSum in formulas.py lists the
  // statistics.
  float square_of(int which, const float* x, int64_t dim) const {
    return stats != nullptr ? stats[which] : sum_over(dim, [&](auto at) { return at(x) * at(x); });
  }
};

// As RowSum in ops/tbe/formulas.py.
constexpr int kGradientSum = 0, kWeightSum = 1, kDirectionSum = 2;

inline float mean_square(const float* g, const float* w, int64_t dim, const Step& step) {
  const float l2 = step.l2();
  if (step.mean_square != nullptr) return *step.mean_square;
  if (step.stats != nullptr) return float(step.stats[kGradientSum] / step.hyper.row_dim);
  const float total =
      l2 == 0
          ? sum_over(dim, [&](auto at) { return at(g) * at(g); })  // without decay, the row need not be read
          : sum_over(dim, [&](auto at) { return (at(g) + at(w) * l2) * (at(g) + at(w) * l2); });
  return float(total / step.hyper.row_dim);
}

inline void step_row(Code<kSGD>, float* __restrict w, const float* __restrict g, float*, float*, int64_t dim,
                     const Step& step) {
  const float lr = step.hyper.lr, l2 = step.l2(), keep = step.keep();
  for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - lr * (g[d] + l2 * w[d]);
}

inline void step_row(Code<kAdagrad>, float* __restrict w, const float* __restrict g, float* __restrict sum,
                     float*, int64_t dim, const Step& step) {
  const float lr = step.hyper.lr, eps = step.hyper.eps, l2 = step.l2(), keep = step.keep();
  for (int64_t d = 0; d < dim; ++d) {
    const float x = g[d] + l2 * w[d];
    sum[d] += x * x;
    w[d] = keep * w[d] - lr * x / (__builtin_sqrtf(sum[d]) + eps);
  }
}

inline void step_row(Code<kRowWiseAdagrad>, float* __restrict w, const float* __restrict g,
                     float* __restrict sum, float*, int64_t dim, const Step& step) {
  const float l2 = step.l2(), keep = step.keep();
  sum[0] += mean_square(g, w, dim, step);
  const float rate = step.hyper.lr / (__builtin_sqrtf(sum[0]) + step.hyper.eps);
  for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - rate * (g[d] + l2 * w[d]);
}

inline void step_row(Code<kLARS>, float* __restrict w, const float* __restrict g,
                     float* __restrict momentum_buffer, float*, int64_t dim, const Step& step) {
  const Hyper& h = step.hyper;
  const float l2 = step.l2(), keep = step.keep();
  const float w_norm = __builtin_sqrtf(step.square_of(kWeightSum, w, dim));
  const float g_norm = __builtin_sqrtf(step.square_of(kGradientSum, g, dim));
  const float rate =
      w_norm > 0 && g_norm > 0 ? h.lr * h.trust_coefficient * w_norm / (g_norm + l2 * w_norm + h.eps) : h.lr;
  for (int64_t d = 0; d < dim; ++d) {
    momentum_buffer[d] = h.momentum * momentum_buffer[d] + rate * (g[d] + l2 * w[d]);
    w[d] = keep * w[d] - momentum_buffer[d];
  }
}

// Step for Adam and LAMB; the direction r is stored in step.work.
template <bool kRowState, bool kLamb>
inline void step_by_moments(float* __restrict w, const float* __restrict g, float* __restrict exp_avg,
                            float* __restrict exp_avg_sq, int64_t dim, const Step& step) {
  const Hyper& h = step.hyper;
  // LAMB adds decoupled decay to the direction, before the trust ratio scales both.
  const float l2 = step.l2(), keep = kLamb ? 1.0f : step.keep();
  // Row-wise state: a single second moment for the row, the mean over its columns.
  float row_denominator = 0;
  if constexpr (kRowState) {
    exp_avg_sq[0] = h.beta2 * exp_avg_sq[0] + h.fresh2 * mean_square(g, w, dim, step);
    row_denominator = __builtin_sqrtf(exp_avg_sq[0] / h.correction2) + h.eps;
  }
  float* r = step.work;
  const float decay_in_r = kLamb && h.decay_mode == kDecoupled ? h.weight_decay : 0.0f;
  for (int64_t d = 0; d < dim; ++d) {
    const float x = g[d] + l2 * w[d];
    exp_avg[d] = h.beta1 * exp_avg[d] + h.fresh1 * x;
    float denominator = row_denominator;
    if constexpr (!kRowState) {
      exp_avg_sq[d] = h.beta2 * exp_avg_sq[d] + h.fresh2 * x * x;
      denominator = __builtin_sqrtf(exp_avg_sq[d] / h.correction2) + h.eps;
    }
    r[d] = exp_avg[d] / h.correction1 / denominator + decay_in_r * w[d];
  }
  float rate = h.lr;
  if constexpr (kLamb) {
    const float w_square = step.square_of(kWeightSum, w, dim),
                r_square = step.square_of(kDirectionSum, r, dim);
    if (w_square > 0 && r_square > 0) rate = h.lr * (__builtin_sqrtf(w_square) / __builtin_sqrtf(r_square));
  }
  for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - rate * r[d];
}

inline void step_row(Code<kAdam>, float* w, const float* g, float* s0, float* s1, int64_t dim,
                     const Step& step) {
  step_by_moments<false, false>(w, g, s0, s1, dim, step);
}

inline void step_row(Code<kPartialRowWiseAdam>, float* w, const float* g, float* s0, float* s1, int64_t dim,
                     const Step& step) {
  step_by_moments<true, false>(w, g, s0, s1, dim, step);
}

inline void step_row(Code<kLAMB>, float* w, const float* g, float* s0, float* s1, int64_t dim,
                     const Step& step) {
  step_by_moments<false, true>(w, g, s0, s1, dim, step);
}

inline void step_row(Code<kPartialRowWiseLAMB>, float* w, const float* g, float* s0, float* s1, int64_t dim,
                     const Step& step) {
  step_by_moments<true, true>(w, g, s0, s1, dim, step);
}

inline void step_row(Code<kFTRL>, float* __restrict w, const float* __restrict g, float* __restrict sum,
                     float* __restrict linear, int64_t dim, const Step& step) {
  const Hyper& h = step.hyper;
  const float l2 = step.l2();
  for (int64_t d = 0; d < dim; ++d) {
    const float x = g[d] + l2 * w[d], total = sum[d] + x * x;
    const float root = __builtin_sqrtf(total);
    // x^2 / (sqrt(total) + sqrt(sum)) is sqrt(total) - sqrt(sum) without cancellation. 1e-37 avoids 0 / 0.
    const float z = linear[d] + (x - x * x / (root + __builtin_sqrtf(sum[d]) + 1e-37f) / h.lr * w[d]);
    sum[d] = total;
    linear[d] = z;
    const float over = __builtin_fabsf(z) - h.l1;
    const float size = over / ((h.beta + root) / h.lr + h.l2);
    w[d] = over > 0 ? -__builtin_copysignf(size, z) : 0.0f;
  }
}

inline void step_row(Code<kRowWiseRMSpropAR>, float* __restrict w, const float* __restrict g,
                     float* __restrict sum, float* __restrict prev_iter, int64_t dim, const Step& step) {
  const Hyper& h = step.hyper;
  const float l2 = step.l2();
  sum[0] = h.beta2 * sum[0] + h.fresh2 * mean_square(g, w, dim, step);
  const float rate = h.lr / (__builtin_sqrtf(sum[0]) + h.eps);
  // 0: the row has never been updated.
  const float now = float(h.step), gap = prev_iter[0] == 0 ? 1.0f : now - prev_iter[0];
  prev_iter[0] = now;
  const float shrinkage = 1.0f - h.lr * h.ar_alpha * gap;
  const float keep = step.keep() * (shrinkage < h.min_shrinkage ? h.min_shrinkage
                                    : shrinkage > 1.0f          ? 1.0f
                                                                : shrinkage);
  for (int64_t d = 0; d < dim; ++d) w[d] = keep * w[d] - rate * (g[d] + l2 * w[d]);
}
