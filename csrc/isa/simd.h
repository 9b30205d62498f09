// Vectors with the largest width that the translation unit is compiled for. Included only by isa/kernels.inl,
// inside an unnamed namespace.

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;  // SSE2, NEON
#endif

typedef float Vec __attribute__((vector_size(4 * kLanes)));
typedef float VecMemory __attribute__((vector_size(4 * kLanes), aligned(4), may_alias));
typedef uint32_t Bits __attribute__((vector_size(4 * kLanes)));
typedef uint16_t HalfBits __attribute__((vector_size(2 * kLanes)));
typedef uint16_t HalfBitsMemory __attribute__((vector_size(2 * kLanes), aligned(2), may_alias));

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

inline float as_float(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t as_bits(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float to_float(float value) { return value; }
inline float to_float(BFloat16 value) { return as_float(uint32_t(value.bits) << 16); }
inline float to_float(Half value) {
#if defined(__F16C__)
  return _cvtsh_ss(value.bits);
#else
  // Shifts the exponent into place. Multiplying by 2^112 corrects the bias and normalizes subnormals.
  // Infinity and NaN keep an exponent with all bits set, and NaN becomes quiet, as with the F16C instruction.
  const uint32_t magnitude = uint32_t(value.bits & 0x7fff) << 13;
  float result = as_float(magnitude) * as_float(0x77800000);
  if (magnitude >= 0x0f800000)
    result = as_float(magnitude | (magnitude > 0x0f800000 ? 0x7fc00000 : 0x7f800000));
  return as_float(as_bits(result) | uint32_t(value.bits & 0x8000) << 16);
#endif
}

inline Vec load(const float* p) { return *reinterpret_cast<const VecMemory*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<VecMemory*>(p) = v; }
// Stores without filling the caches, which keeps data there that is read again. For whole cache lines only;
// call finish_stores() before another thread reads.
inline void store_past_caches(float* p, Vec v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v);
#elif defined(__AVX2__)
  _mm256_stream_ps(p, (__m256)v);
#elif defined(__x86_64__)
  _mm_stream_ps(p, (__m128)v);
#else
  store(p, v);
#endif
}
inline void finish_stores() {
#if defined(__x86_64__)
  // Streaming stores are not ordered before later stores, as normal stores are.
  _mm_sfence();
#endif
}
inline Vec load(const BFloat16* p) {
  const HalfBits bits = *reinterpret_cast<const HalfBitsMemory*>(p);
  return (Vec)(__builtin_convertvector(bits, Bits) << 16);
}
inline Vec load(const Half* p) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__) && defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  Vec v;
  for (int j = 0; j < kLanes; ++j) v[j] = to_float(p[j]);
  return v;
#endif
}

constexpr std::integral_constant<int, 3> kToL1;
constexpr std::integral_constant<int, 2> kToL2;
constexpr std::integral_constant<int, 0> kToL1Once;  // evicted first, to keep data that is used more often

// Prefetches to the L2 cache, which can have far more misses in flight than L1. Always inlined, as are the
// lambdas that end in it: GCC treats a call to a function that only prefetches as having no effect, and
// removes it. Unrolled: with a loop of a few iterations per row, a lookup takes 50 % longer.
template <int kBytes, int kLocality = kToL2()>
__attribute__((always_inline)) inline void prefetch(const void* p) {
#pragma GCC unroll 16
  for (int byte = 0; byte < kBytes; byte += 64)
    __builtin_prefetch(static_cast<const char*>(p) + byte, 0, kLocality);
}

template <int kLocality = kToL2(), typename T>
__attribute__((always_inline)) inline void prefetch_row(const T* row, int64_t dim) {
  const char* p = reinterpret_cast<const char*>(row);
  const int64_t bytes = dim * int64_t(sizeof(T));
  int64_t byte = 0;
  for (; byte + 256 <= bytes; byte += 256) prefetch<256, kLocality>(p + byte);
  for (; byte < bytes; byte += 64) prefetch<64, kLocality>(p + byte);
}

// Returns the sum over 16 lanes, held in 16 / kLanes vectors: adds halves until a single value is left.
inline float lanes_total(const Vec* part) {
  typedef float Vec8 __attribute__((vector_size(32), unused));
  typedef float Vec4 __attribute__((vector_size(16)));
  Vec4 low, high;  // lanes j and j + 8 added, for j in [0, 4) and [4, 8)
#if defined(__AVX512F__)
  const Vec8 sum = __builtin_shufflevector(part[0], part[0], 0, 1, 2, 3, 4, 5, 6, 7) +
                   __builtin_shufflevector(part[0], part[0], 8, 9, 10, 11, 12, 13, 14, 15);
  low = __builtin_shufflevector(sum, sum, 0, 1, 2, 3);
  high = __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
#elif defined(__AVX2__)
  const Vec8 sum = part[0] + part[1];
  low = __builtin_shufflevector(sum, sum, 0, 1, 2, 3);
  high = __builtin_shufflevector(sum, sum, 4, 5, 6, 7);
#else
  low = part[0] + part[2];
  high = part[1] + part[3];
#endif
  const Vec4 four = low + high;
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// splitmix64's finalizer over a counter: the bits depend only on (seed, step, row, column), not on the
// thread.
inline uint32_t random_bits(uint64_t seed, uint64_t step, uint64_t row, uint64_t column) {
  uint64_t x = row * 0x9E3779B97F4A7C15u + column * 0xC2B2AE3D27D4EB4Fu + seed * 0x165667B19E3779F9u +
               step * 0x27D4EB2F165667C5u;
  x ^= x >> 30;
  x *= 0xBF58476D1CE4E5B9u;
  x ^= x >> 27;
  x *= 0x94D049BB133111EBu;
  x ^= x >> 31;
  return uint32_t(x);
}

inline BFloat16 round_to(BFloat16*, float value, uint32_t noise, bool stochastic) {
  const uint32_t bits = as_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t(bits >> 16 | 0x40)};  // NaN stays NaN
  if ((bits & 0x7f800000) == 0x7f800000) return {uint16_t(bits >> 16)};
  // Truncation after adding uniform noise rounds up with a probability equal to the discarded fraction.
  const uint32_t add = stochastic ? (noise & 0xffff) : 0x7fff + (bits >> 16 & 1);
  return {uint16_t((bits + add) >> 16)};
}

inline uint16_t nearest_half(float value) {
#if defined(__F16C__)
  return _cvtss_sh(value, 0);
#else
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffff, sign = bits >> 16 & 0x8000;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);  // as F16C's instruction
  if (magnitude >= 0x477ff000) return sign | 0x7c00;                             // rounds beyond 65504
  if (magnitude < 0x38800000) {  // subnormal: add 0.5 so that the float unit rounds
    const float shifted = as_float(magnitude) + 0.5f;
    return sign | (as_bits(shifted) - 0x3f000000);
  }
  return sign | ((magnitude + 0xc8000fff + (magnitude >> 13 & 1)) >> 13);
#endif
}

inline Half round_to(Half*, float value, uint32_t noise, bool stochastic) {
  const uint32_t magnitude = as_bits(value) & 0x7fffffff;
  // Stochastic for normal fp16 numbers; to nearest for subnormals, the largest values, infinity and NaN.
  if (!stochastic || magnitude < 0x38800000 || magnitude >= 0x477fe000) return {nearest_half(value)};
  return {nearest_half(as_float((as_bits(value) + (noise & 0x1fff)) & ~0x1fffu))};
}
