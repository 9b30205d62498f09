// Dot products between all pairs of a sample's vectors, and their gradient. Included only by isa/kernels.inl,
// inside an unnamed namespace.

constexpr int kPairRows = 4;  // vectors per tile

// Rounds to T and back.
template <typename T>
inline float rounded(float value) {
  if constexpr (std::is_same_v<T, float>) {
    return value;
  } else {
    return to_float(round_to(static_cast<T*>(nullptr), value, 0, false));
  }
}

inline void write(float* p, float value) { *p = value; }
inline void write(BFloat16* p, float value) { *p = round_to(p, value, 0, false); }

// Copies n values to another type.
template <typename From, typename To>
inline void copy_values(const From* from, int64_t n, To* to) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, n * sizeof(To));
  } else {
    for (int64_t d = 0; d < n; ++d) write(to + d, to_float(from[d]));
  }
}

// Calls work with vector i in a sample: vector 0 is dense, of type D, the others are sparse, of type S.
template <typename D, typename S, typename Work>
__attribute__((always_inline)) inline void with_vector(const InteractionArgs& a, int64_t sample, int64_t i,
                                                       const Work& work) {
  if (i == 0) {
    work(static_cast<const D*>(a.dense) + sample * a.dim);
  } else {
    work(static_cast<const S*>(a.sparse) + (sample * a.num_sparse + i - 1) * a.dim);
  }
}

// Computes columns [column, column + 2 * kLanes) in the products of vectors [first, first + kPairRows) with
// all vectors.
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

// Works on transposed vectors, so no sum runs across lanes.
template <typename D, typename S>
void interact(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = interaction_stride(num_vectors), tile = 2 * kLanes;
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  float *columns = a.scratch, *products = a.scratch + a.dim * stride;
  // Lanes past the last vector stay 0, so whole tiles can be computed.
  std::memset(columns, 0, a.dim * stride * sizeof(float));
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    for (int64_t i = 0; i < num_vectors; ++i) {
      with_vector<D, S>(a, sample, i, [&](const auto* vector) {
        for (int64_t d = 0; d < a.dim; ++d) columns[d * stride + i] = rounded<D>(to_float(vector[d]));
      });
    }
    D* out = static_cast<D*>(a.out) + sample * (a.dim + num_pairs);
    std::memcpy(out, static_cast<const D*>(a.dense) + sample * a.dim, a.dim * sizeof(D));
    out += a.dim;
    for (int64_t first = 0; first < num_vectors; first += kPairRows) {
      // Only pairs i < j are needed, so tiles left of the diagonal are skipped.
      for (int64_t column = (first + 1) / tile * tile; column < num_vectors; column += tile) {
        product_tile(columns, stride, a.dim, first, column, products);
      }
      for (int64_t i = first; i < num_vectors && i < first + kPairRows; ++i) {
        const int64_t count = num_vectors - i - 1;
        copy_values(products + (i - first) * stride + i + 1, count, out);
        out += count;
      }
    }
  }
}

// Computes columns [column, column + N * kLanes) in the gradients for vectors [first, first + kPairRows).
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

template <typename D, typename S>
void interact_grad(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = padded(a.dim);
  const int64_t pairs_stride = interaction_stride(num_vectors);
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  float *vectors = a.scratch, *pairs = vectors + num_vectors * stride;
  float* out = pairs + (num_vectors + kPairRows) * pairs_stride;
  // Once per chunk: all samples write the same elements, so padding and the diagonal stay 0.
  std::memset(a.scratch, 0, (out - a.scratch) * sizeof(float));
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    const D *grad = static_cast<const D*>(a.grad) + sample * (a.dim + num_pairs), *next = grad + a.dim;
    for (int64_t i = 0; i < num_vectors; ++i) {
      with_vector<D, S>(a, sample, i, [&](const auto* vector) {
        if constexpr (std::is_same_v<D, float>) {
          copy_values(vector, a.dim, vectors + i * stride);
        } else {
          for (int64_t d = 0; d < a.dim; ++d) vectors[i * stride + d] = rounded<D>(to_float(vector[d]));
        }
      });
      for (int64_t j = i + 1; j < num_vectors; ++j) {
        pairs[i * pairs_stride + j] = pairs[j * pairs_stride + i] = to_float(*next++);
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
        const float* sums = out + (i - first) * stride;
        if (i == 0) {
          D* target = static_cast<D*>(a.grad_dense) + sample * a.dim;
          // The dense vector is also copied to the output, so it gets that gradient as well.
          for (int64_t d = 0; d < a.dim; ++d) write(target + d, sums[d] + to_float(grad[d]));
        } else {
          copy_values(sums, a.dim, static_cast<S*>(a.grad_sparse) + (sample * a.num_sparse + i - 1) * a.dim);
        }
      }
    }
  }
}

#if defined(__AVX512F__)
// The same for bf16 with the AVX512-BF16 instruction, which adds the products of two adjacent values to a
// float: a lane holds two values from the same vector (forward), or values from two vectors (backward). GCC
// inlines the helpers only into functions with the same target.
#define MESHREC_BF16 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,f16c,bmi2")))

constexpr int kBF16Rows = 4;  // vectors per tile

typedef uint32_t LanesMemory __attribute__((vector_size(64), aligned(4), may_alias));

inline __mmask16 first_lanes(int64_t n) { return n >= kLanes ? 0xffff : n <= 0 ? 0 : (1u << n) - 1; }

// Loads up to 16 bf16 values; lanes from n on are 0.
MESHREC_BF16 inline HalfBits load_bf16(const BFloat16* p, int64_t n) {
  return (HalfBits)_mm256_maskz_loadu_epi16(first_lanes(n), p);
}
MESHREC_BF16 inline HalfBits load_bf16(const float* p, int64_t n) {
  return (HalfBits)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first_lanes(n), p));
}
MESHREC_BF16 inline void store_values(BFloat16* p, Vec value, int64_t n) {
  const __m256i bits = (__m256i)_mm512_cvtneps_pbh((__m512)value);
  if (n >= kLanes) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), bits);
  } else {
    _mm256_mask_storeu_epi16(p, first_lanes(n), bits);
  }
}
MESHREC_BF16 inline void store_values(float* p, Vec value, int64_t n) {
  if (n >= kLanes) {
    store(p, value);
  } else {
    _mm512_mask_storeu_ps(p, first_lanes(n), (__m512)value);
  }
}
MESHREC_BF16 inline Vec add_products(Vec sum, Bits a, Bits b) {
  return (Vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}
inline Bits load_lanes(const uint32_t* p) { return *reinterpret_cast<const LanesMemory*>(p); }
inline void store_lanes(uint32_t* p, Bits value) { *reinterpret_cast<LanesMemory*>(p) = value; }

// Interleaves the lower or the upper halves of every 128 bits.
template <int kHalf>
inline Bits interleave32(Bits a, Bits b) {
  constexpr int k = 2 * kHalf;
  return __builtin_shufflevector(a, b, k, k + 16, k + 1, k + 17, k + 4, k + 20, k + 5, k + 21, k + 8, k + 24,
                                 k + 9, k + 25, k + 12, k + 28, k + 13, k + 29);
}
template <int kHalf>
inline Bits interleave64(Bits a, Bits b) {
  constexpr int k = 2 * kHalf;
  return __builtin_shufflevector(a, b, k, k + 1, k + 16, k + 17, k + 4, k + 5, k + 20, k + 21, k + 8, k + 9,
                                 k + 24, k + 25, k + 12, k + 13, k + 28, k + 29);
}
// Returns the even or the odd quarters of both vectors.
template <int kOdd>
inline Bits quarters(Bits a, Bits b) {
  constexpr int k = 4 * kOdd;
  return __builtin_shufflevector(a, b, k, k + 1, k + 2, k + 3, k + 8, k + 9, k + 10, k + 11, k + 16, k + 17,
                                 k + 18, k + 19, k + 24, k + 25, k + 26, k + 27);
}

// Transposes 16 rows of 16 lanes.
inline void transpose16(const uint32_t* from, int64_t from_stride, uint32_t* to, int64_t to_stride) {
  Bits row[16], part[16];
  for (int i = 0; i < 16; ++i) row[i] = load_lanes(from + i * from_stride);
  for (int i = 0; i < 16; i += 2) {
    part[i] = interleave32<0>(row[i], row[i + 1]);
    part[i + 1] = interleave32<1>(row[i], row[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    row[i] = interleave64<0>(part[i], part[i + 2]);
    row[i + 1] = interleave64<1>(part[i], part[i + 2]);
    row[i + 2] = interleave64<0>(part[i + 1], part[i + 3]);
    row[i + 3] = interleave64<1>(part[i + 1], part[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const Bits even_low = quarters<0>(row[i], row[i + 4]), even_high = quarters<0>(row[i + 8], row[i + 12]);
    const Bits odd_low = quarters<1>(row[i], row[i + 4]), odd_high = quarters<1>(row[i + 8], row[i + 12]);
    store_lanes(to + i * to_stride, quarters<0>(even_low, even_high));
    store_lanes(to + (i + 4) * to_stride, quarters<0>(odd_low, odd_high));
    store_lanes(to + (i + 8) * to_stride, quarters<1>(even_low, even_high));
    store_lanes(to + (i + 12) * to_stride, quarters<1>(odd_low, odd_high));
  }
}

// Like product_tile, for N * kLanes columns; `steps` is half the width.
template <int N>
MESHREC_BF16 inline void bf16_product_tile(const uint32_t* columns, int64_t stride, int64_t steps,
                                           int64_t first, int64_t column, float* out) {
  Vec sum[kBF16Rows][N] = {};
  for (int64_t d = 0; d < steps; ++d, columns += stride) {
    Bits right[N];
    for (int k = 0; k < N; ++k) right[k] = load_lanes(columns + column + k * kLanes);
    for (int r = 0; r < kBF16Rows; ++r) {
      const Bits left = columns[first + r] + Bits{};
      for (int k = 0; k < N; ++k) sum[r][k] = add_products(sum[r][k], left, right[k]);
    }
  }
  for (int r = 0; r < kBF16Rows; ++r) {
    for (int k = 0; k < N; ++k) store(out + r * stride + column + k * kLanes, sum[r][k]);
  }
}

// Without a cast to fp32 and back: on Zen 4, 2.1 instead of 6.0 ms of the dense part of a DLRM.
template <typename S>
MESHREC_BF16 void interact_bf16(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = interaction_stride(num_vectors);
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2, out_dim = a.dim + num_pairs;
  const int64_t width = (a.dim + 31) / 32 * 32, steps = (a.dim + 1) / 2;  // in bf16 numbers; in lanes
  // Lanes [steps, width / 2) in the columns are 0 and not read.
  auto* columns = reinterpret_cast<uint32_t*>(a.scratch);
  float* products = a.scratch + width / 2 * stride;
  auto* rows = reinterpret_cast<BFloat16*>(products + kBF16Rows * stride);
  auto* sample_out = rows + stride * width;  // a row may be written past the end
  // Rows past the last vector and columns past the width stay 0.
  std::memset(rows, 0, stride * width * sizeof(BFloat16));
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    for (int64_t i = 0; i < num_vectors; ++i) {
      with_vector<BFloat16, S>(a, sample, i, [&](const auto* vector) MESHREC_BF16 {
        for (int64_t d = 0; d < a.dim; d += kLanes) {
          *reinterpret_cast<HalfBitsMemory*>(rows + i * width + d) = load_bf16(vector + d, a.dim - d);
        }
      });
    }
    for (int64_t i = 0; i < num_vectors; i += kLanes) {
      for (int64_t d = 0; d < width / 2; d += kLanes) {
        transpose16(reinterpret_cast<const uint32_t*>(rows + i * width) + d, width / 2,
                    columns + d * stride + i, stride);
      }
    }
    BFloat16* out = sample_out;
    for (int64_t first = 0; first < num_vectors; first += kBF16Rows) {
      for (int64_t column = (first + 1) / (2 * kLanes) * (2 * kLanes); column < num_vectors;
           column += 2 * kLanes) {
        bf16_product_tile<2>(columns, stride, steps, first, column, products);
      }
      for (int64_t i = first; i < num_vectors && i < first + kBF16Rows; ++i) {
        const float* row = products + (i - first) * stride;
        // Whole vectors: the next row overwrites values past the end of this row.
        for (int64_t j = i + 1; j < num_vectors; j += kLanes) {
          store_values(out + j - i - 1, load(row + j), kLanes);
        }
        out += num_vectors - i - 1;
      }
    }
    auto* target = static_cast<BFloat16*>(a.out) + sample * out_dim;
    std::memcpy(target, static_cast<const BFloat16*>(a.dense) + sample * a.dim, a.dim * sizeof(BFloat16));
    std::memcpy(target + a.dim, sample_out, num_pairs * sizeof(BFloat16));
  }
}

// Like gradient_tile; `steps` is half the number of vectors.
template <int N>
MESHREC_BF16 inline void bf16_gradient_tile(const uint32_t* vectors, int64_t stride, int64_t steps,
                                            const uint32_t* pairs, int64_t pairs_stride, int64_t column,
                                            Vec (&sum)[kBF16Rows][N]) {
  for (int64_t j = 0; j < steps; ++j) {
    Bits row[N];
    for (int k = 0; k < N; ++k) row[k] = load_lanes(vectors + j * stride + column + k * kLanes);
    for (int r = 0; r < kBF16Rows; ++r) {
      const Bits left = pairs[r * pairs_stride + j] + Bits{};
      for (int k = 0; k < N; ++k) sum[r][k] = add_products(sum[r][k], left, row[k]);
    }
  }
}

template <int N, typename S>
MESHREC_BF16 inline void bf16_gradients(const InteractionArgs& a, int64_t sample, const BFloat16* grad,
                                        const uint32_t* vectors, int64_t stride, const uint32_t* pairs,
                                        int64_t pairs_stride, int64_t column) {
  const int64_t num_vectors = a.num_sparse + 1;
  for (int64_t first = 0; first < num_vectors; first += kBF16Rows) {
    Vec sum[kBF16Rows][N] = {};
    bf16_gradient_tile<N>(vectors, stride, (num_vectors + 1) / 2, pairs + first * pairs_stride, pairs_stride,
                          column, sum);
    for (int r = 0; r < kBF16Rows && first + r < num_vectors; ++r) {
      const int64_t i = first + r;
      for (int k = 0; k < N; ++k) {
        const int64_t d = column + k * kLanes, left = a.dim - d;
        if (i == 0) {
          const Bits bits = __builtin_convertvector(load_bf16(grad + d, left), Bits) << 16;
          store_values(static_cast<BFloat16*>(a.grad_dense) + sample * a.dim + d, sum[r][k] + (Vec)bits,
                       left);
        } else {
          store_values(static_cast<S*>(a.grad_sparse) + (sample * a.num_sparse + i - 1) * a.dim + d,
                       sum[r][k], left);
        }
      }
    }
  }
}

template <typename S>
MESHREC_BF16 void interact_grad_bf16(const InteractionArgs& a) {
  const int64_t num_vectors = a.num_sparse + 1, stride = padded(a.dim), num_steps = (num_vectors + 1) / 2;
  const int64_t pairs_stride = interaction_stride(num_vectors);
  const int64_t num_pairs = num_vectors * (num_vectors - 1) / 2;
  auto* vectors = reinterpret_cast<uint32_t*>(a.scratch);
  auto* pairs = reinterpret_cast<BFloat16*>(vectors + num_steps * stride);
  // The diagonal and the padding stay 0, because samples write only the other entries.
  std::memset(pairs, 0, (num_vectors + kBF16Rows) * pairs_stride * sizeof(BFloat16));
  const auto* pair_lanes = reinterpret_cast<const uint32_t*>(pairs);
  for (int64_t sample = a.first; sample < a.last; ++sample) {
    const BFloat16* grad = static_cast<const BFloat16*>(a.grad) + sample * (a.dim + num_pairs);
    const BFloat16* next = grad + a.dim;
    for (int64_t i = 0; i < num_vectors; ++i) {
      const int64_t count = num_vectors - i - 1;
      BFloat16* column = pairs + (i + 1) * pairs_stride + i;
      std::memcpy(pairs + i * pairs_stride + i + 1, next, count * sizeof(BFloat16));
      for (int64_t j = 0; j < count; ++j) column[j * pairs_stride] = next[j];
      next += count;
    }
    // Two vectors share the lanes, because the bf16 instruction multiplies and adds pairs.
    for (int64_t i = 0; i < num_vectors; i += 2) {
      with_vector<BFloat16, S>(a, sample, i, [&](const auto* low) MESHREC_BF16 {
        const S* high = static_cast<const S*>(a.sparse) + (sample * a.num_sparse + i) * a.dim;
        for (int64_t d = 0; d < a.dim; d += kLanes) {
          Bits lanes = __builtin_convertvector(load_bf16(low + d, a.dim - d), Bits);
          if (i + 1 < num_vectors) {
            lanes |= __builtin_convertvector(load_bf16(high + d, a.dim - d), Bits) << 16;
          }
          store_lanes(vectors + i / 2 * stride + d, lanes);
        }
      });
    }
    int64_t column = 0;
    for (; column + 4 * kLanes <= stride; column += 4 * kLanes) {
      bf16_gradients<4, S>(a, sample, grad, vectors, stride, pair_lanes, pairs_stride / 2, column);
    }
    for (; column < stride; column += kLanes) {
      bf16_gradients<1, S>(a, sample, grad, vectors, stride, pair_lanes, pairs_stride / 2, column);
    }
  }
}
#endif

using Interact = void(const InteractionArgs&);

template <typename S>
Interact* interact_of_bf16() {
#if defined(__AVX512F__)
  // A CPU with AVX-512 may lack its bf16 instructions.
  if (__builtin_cpu_supports("avx512bf16")) return interact_bf16<S>;
#endif
  return interact<BFloat16, S>;
}

template <typename S>
Interact* interact_grad_of_bf16() {
#if defined(__AVX512F__)
  if (__builtin_cpu_supports("avx512bf16")) return interact_grad_bf16<S>;
#endif
  return interact_grad<BFloat16, S>;
}

void interact_typed(const InteractionArgs& a, InteractionType type) {
  static Interact* const by_type[kNumInteractionTypes] = {interact<float, float>, interact_of_bf16<float>(),
                                                          interact_of_bf16<BFloat16>()};
  by_type[type](a);
}

void interact_grad_typed(const InteractionArgs& a, InteractionType type) {
  static Interact* const by_type[kNumInteractionTypes] = {
      interact_grad<float, float>, interact_grad_of_bf16<float>(), interact_grad_of_bf16<BFloat16>()};
  by_type[type](a);
}
