// Vector functions and small matrix products for attention (attention.inl). Included only by isa/kernels.inl,
// inside an unnamed namespace.

#if defined(__AVX512F__)
constexpr int kMaxVectors = 4;
#else
constexpr int kMaxVectors = 2;
#endif

typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

inline Vec splat(float value) { return value - Vec{}; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// Returns e^x with an error of about 1 ulp; 0 below -87.3. NaN stays NaN.
inline Vec exponential(Vec x) {
  // Coefficients as in Cephes' expf. Below `low`, e^x is subnormal. Above `high`, the result stays at e^high,
  // about 2.4e38: 2^n would otherwise overflow the exponent.
  const Vec low = splat(-87.33654f), high = splat(88.37626f);
  const Ints is_zero = x < low;
  x = x < low ? low : x;
  x = x > high ? high : x;
  const Vec magic = splat(12582912.f);  // rounds to the nearest integer, in the low bits of the sum
  const Vec sum = x * 1.44269504f + magic, n = sum - magic;
  // ln 2 in two parts. The first has few bits, so its product with n is exact.
  const Vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vec poly = splat(1.9875691500e-4f);
  for (float c : {1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f})
    poly = poly * r + c;
  poly = poly * r * r + r + 1.f;
  // The low bits of `sum` hold n; adding them to the exponent multiplies by 2^n.
  const Vec found = (Vec)((Ints)poly + ((Ints)sum << 23));
  return is_zero ? Vec{} : found;
}

inline Vec sigmoid(Vec x) { return 1.f / (1.f + exponential(-x)); }

inline float dot_product(const float* a, const float* b, int64_t width) {
  constexpr int kVectors = 16 / kLanes;
  Vec sum[kVectors] = {};
  int64_t d = 0;
  for (; d + 16 <= width; d += 16) {
    for (int v = 0; v < kVectors; ++v) sum[v] += load(a + d + v * kLanes) * load(b + d + v * kLanes);
  }
  float total = lanes_total(sum);
  for (; d < width; ++d) total += a[d] * b[d];
  return total;
}

// Computes c [M, N vectors] = a [M, depth] b [depth, N vectors], or adds the product to c. Neighboring
// elements in a are a_row apart by row and a_depth by column.
template <int M, int N>
inline void product_block(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_stride,
                          float* c, int64_t c_stride, int64_t depth, bool add) {
  Vec sum[M][N] = {};
  for (int64_t d = 0; d < depth; ++d, a += a_depth, b += b_stride) {
    Vec right[N];
    for (int n = 0; n < N; ++n) right[n] = load(b + n * kLanes);
    for (int m = 0; m < M; ++m) {
      const float left = a[m * a_row];
      for (int n = 0; n < N; ++n) sum[m][n] += right[n] * left;
    }
  }
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      float* target = c + m * c_stride + n * kLanes;
      store(target, add ? load(target) + sum[m][n] : sum[m][n]);
    }
  }
}

struct Left {
  const float* data;
  int64_t row, depth;
};

struct Right {
  const float* data;
  int64_t stride;
};

template <int M, int N>
void product_rows(Left a, Right b, float* c, int64_t c_stride, int64_t rows, int64_t depth, bool add) {
  int64_t m = 0;
  for (; m + M <= rows; m += M) {
    product_block<M, N>(a.data + m * a.row, a.row, a.depth, b.data, b.stride, c + m * c_stride, c_stride,
                        depth, add);
  }
  if constexpr (M > 1) {
    const Left left{a.data + m * a.row, a.row, a.depth};
    if (m < rows) product_rows<M / 2, N>(left, b, c + m * c_stride, c_stride, rows - m, depth, add);
  }
}

// Computes c [rows, columns] = a b, or adds the product to c. `columns` must be a multiple of the vector
// length.
inline void product(Left a, Right b, float* c, int64_t c_stride, int64_t rows, int64_t columns, int64_t depth,
                    bool add) {
  // A tile has up to 16 accumulators with AVX-512, which has 32 vector registers, and 8 otherwise. Larger
  // tiles would spill to memory.
  constexpr int kAtTwo = kMaxVectors == 4 ? 8 : 4;
  while (columns > 0) {
    const int64_t num = columns / kLanes;
    int64_t done = 1;
    if (num >= 4 && kMaxVectors == 4) {
      done = 4, product_rows<4, kMaxVectors>(a, b, c, c_stride, rows, depth, add);
    } else if (num >= 2) {
      done = 2, product_rows<kAtTwo, 2>(a, b, c, c_stride, rows, depth, add);
    } else {
      product_rows<8, 1>(a, b, c, c_stride, rows, depth, add);
    }
    columns -= done * kLanes, b.data += done * kLanes, c += done * kLanes;
  }
}
