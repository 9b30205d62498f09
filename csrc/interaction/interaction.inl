// Dot products of all pairs of a sample's vectors, and their gradient. Included by isa/kernels.inl only,
// inside its unnamed namespace.

constexpr int kPairRows = 4;  // vectors per tile

inline const float* interaction_vector(const InteractionArgs& a, int64_t sample, int64_t i) {
  return i == 0 ? a.dense + sample * a.dim : a.sparse + (sample * a.num_sparse + i - 1) * a.dim;
}

// Computes columns [column, column + 2 * kLanes) of the products of vectors [first, first + kPairRows) with
// all.
inline void product_tile(const float* columns, int64_t stride, int64_t dim, int64_t first, int64_t column,
                         float* out) {
  Vec sum[kPairRows][2] = {};
  for (int64_t d = 0; d < dim; ++d, columns += stride) {
    const Vec low = load(columns + column), high = load(columns + column + kLanes);
    for (int r = 0; r < kPairRows; ++r) {
      sum[r][0] += low * columns[first + r];
      sum[r][1] += high * columns[first + r];
    }
  }
  for (int r = 0; r < kPairRows; ++r) {
    store(out + r * stride + column, sum[r][0]);
    store(out + r * stride + column + kLanes, sum[r][1]);
  }
}

// Works on the transposed vectors, so that no sum runs across lanes.
void interact(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = interaction_stride(num_vectors), tile = 2 * kLanes;
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  float *columns = a.scratch, *products = a.scratch + a.dim * stride;
  std::memset(columns, 0, a.dim * stride * sizeof(float));
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    for (int64_t i = 0; i < num_vectors; ++i) {
      const float* vector = interaction_vector(a, sample, i);
      for (int64_t d = 0; d < a.dim; ++d) columns[d * stride + i] = vector[d];
    }
    float* out = a.out + sample * (a.dim + num_pairs);
    std::memcpy(out, a.dense + sample * a.dim, a.dim * sizeof(float));
    out += a.dim;
    for (int64_t first = 0; first < num_vectors; first += kPairRows) {
      for (int64_t column = (first + 1) / tile * tile; column < num_vectors; column += tile) {
        product_tile(columns, stride, a.dim, first, column, products);
      }
      for (int64_t i = first; i < num_vectors && i < first + kPairRows; ++i) {
        const int64_t count = num_vectors - i - 1;
        std::memcpy(out, products + (i - first) * stride + i + 1, count * sizeof(float));
        out += count;
      }
    }
  }
}

// Computes columns [column, column + N * kLanes) of the gradients of vectors [first, first + kPairRows).
template <int N>
inline void gradient_tile(const float* vectors, int64_t stride, int64_t num_vectors, const float* pairs,
                          int64_t pairs_stride, int64_t column, float* out) {
  Vec sum[kPairRows][N] = {};
  for (int64_t j = 0; j < num_vectors; ++j) {
    Vec row[N];
    for (int k = 0; k < N; ++k) row[k] = load(vectors + j * stride + column + k * kLanes);
    for (int r = 0; r < kPairRows; ++r) {
      for (int k = 0; k < N; ++k) sum[r][k] += row[k] * pairs[r * pairs_stride + j];
    }
  }
  for (int r = 0; r < kPairRows; ++r) {
    for (int k = 0; k < N; ++k) store(out + r * stride + column + k * kLanes, sum[r][k]);
  }
}

void interact_grad(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = padded(a.dim);
  const int64_t pairs_stride = interaction_stride(num_vectors);
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  float *vectors = a.scratch, *pairs = vectors + num_vectors * stride;
  float* out = pairs + (num_vectors + kPairRows) * pairs_stride;
  std::memset(a.scratch, 0, (out - a.scratch) * sizeof(float));
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    const float *grad = a.grad + sample * (a.dim + num_pairs), *next = grad + a.dim;
    for (int64_t i = 0; i < num_vectors; ++i) {
      std::memcpy(vectors + i * stride, interaction_vector(a, sample, i), a.dim * sizeof(float));
      for (int64_t j = i + 1; j < num_vectors; ++j) {
        pairs[i * pairs_stride + j] = pairs[j * pairs_stride + i] = *next++;
      }
    }
    for (int64_t first = 0; first < num_vectors; first += kPairRows) {
      const float* own = pairs + first * pairs_stride;
      int64_t column = 0;
      for (; column + 4 * kLanes <= stride; column += 4 * kLanes) {
        gradient_tile<4>(vectors, stride, num_vectors, own, pairs_stride, column, out);
      }
      for (; column < stride; column += kLanes) {
        gradient_tile<1>(vectors, stride, num_vectors, own, pairs_stride, column, out);
      }
      for (int64_t i = first; i < num_vectors && i < first + kPairRows; ++i) {
        float* target =
            i == 0 ? a.grad_dense + sample * a.dim : a.grad_sparse + (sample * a.num_sparse + i - 1) * a.dim;
        const float* sums = out + (i - first) * stride;
        for (int64_t d = 0; d < a.dim; ++d) target[d] = i == 0 ? sums[d] + grad[d] : sums[d];
      }
    }
  }
}
