// Encoded rows for transfer between ranks. Included only by kernels.inl, inside an unnamed namespace.
//
// An encoded row has an fp32 scale, an fp32 midpoint, and a signed code per value: 8 bits in two's
// complement, or 4 bits as code + 8, with the first in the lower half of a byte. The value is scale * code +
// midpoint. The scale has 16 significant bits, so the product is exact, and only the sum is rounded: all
// instruction sets give the same result. No finite value has the code -128 (4 bits: -8). The two lowest scale
// bits say what this code means in the row: nothing, infinity, minus infinity, NaN.

typedef int32_t WireInts __attribute__((vector_size(4 * kLanes)));
typedef int8_t WireBytes __attribute__((vector_size(kLanes)));

inline WireInts rounded_to_ints(Vec v) {
#if defined(__AVX512F__)
  return (WireInts)_mm512_maskz_cvtps_epi32(0xffff, (__m512)v);
#elif defined(__AVX2__)
  return (WireInts)_mm256_cvtps_epi32((__m256)v);
#elif defined(__x86_64__)
  return (WireInts)_mm_cvtps_epi32((__m128)v);
#else
  WireInts ints;
  for (int j = 0; j < kLanes; ++j) ints[j] = int32_t(std::nearbyintf(v[j]));
  return ints;
#endif
}

// Loads kLanes signed bytes, and stores lanes that fit into a byte. With intrinsics: the compiler's code for
// these takes as long as everything else together.
// Without them, rows in the caches were decoded at 16 GB/s instead of 52.
inline WireInts load_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (WireInts)_mm512_maskz_cvtepi8_epi32(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (WireInts)_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  WireBytes bytes;
  std::memcpy(&bytes, p, kLanes);
  return __builtin_convertvector(bytes, WireInts);
#endif
}

inline void store_bytes(WireInts ints, uint8_t* p) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)ints));
#elif defined(__AVX2__)
  const __m128i low = _mm256_castsi256_si128((__m256i)ints);
  const __m128i halves = _mm_packs_epi32(low, _mm256_extracti128_si256((__m256i)ints, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(halves, halves));
#else
  const WireBytes bytes = __builtin_convertvector(ints, WireBytes);
  std::memcpy(p, &bytes, kLanes);
#endif
}

template <int kBits>
struct WireCodes {
  static constexpr int kTop = (1 << (kBits - 1)) - 1, kMark = -kTop - 1;
};

struct WireParams {
  float scale, middle;
};

inline bool any_lane(WireInts mask) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) != 0;
#else
  int32_t any = 0;
  for (int j = 0; j < kLanes; ++j) any |= mask[j];
  return any != 0;
#endif
}

// Parameters for kLanes rows at once: row by row, the divisions would take as long as everything else
// together.
struct WireParamsOfRows {
  float scale[kLanes], middle[kLanes], inverse[kLanes];

  void set(const float* least_of_rows, const float* most_of_rows, int top) {
    const Vec least = load(least_of_rows), most = load(most_of_rows), range = most - least;
    const Bits magnitude = (Bits)range & 0x7fffffff;
    const Vec steps = to_vector(float(2 * top)), at_least = to_vector(kWireLeastScale);
    const auto fits = magnitude < Bits{} + 0x7f800000;
    Vec scales = range / steps;
    // The range of a finite row can overflow fp32, up to twice the largest value. Then both ends are divided
    // first.
    if (any_lane((WireInts)~fits)) scales = fits ? scales : most / steps - least / steps;
    scales = scales > at_least ? scales : at_least;
    // Rounded up to 16 significant bits: rounded down, the largest codes would not reach the ends of the
    // row's range.
    scales = (Vec)(((Bits)scales + 0xff) & ~0xffu);
    const Vec middles = fits ? least + range * 0.5f : least * 0.5f + most * 0.5f;
    // Halving a subnormal number is inexact, with or without fused instructions.
    const Bits far = (Bits)middles & 0x7fffffff;
    store(scale, scales);
    store(middle, far < (Bits)at_least ? Vec{} : middles);
    store(inverse, 1.0f / scales);
  }
};

// Computes the codes for kLanes values.
template <bool kStochastic>
struct WireRounding {
  Vec middle, inverse;
  WireInts top;
  uint32_t low = 0, high = 0;  // random bits for the row

  WireRounding(float row_middle, float row_inverse, int top_code)
      : middle(to_vector(row_middle)),
        inverse(to_vector(row_inverse * (kStochastic ? 65536.0f : 1.0f))),
        top(WireInts{} + top_code) {}

  WireInts operator()(Vec numbers, int64_t column) const {
    const WireInts codes = unclamped(numbers, column), below = codes > top ? top : codes;
    return below < -top ? -top : below;
  }

  // Rounding may exceed the range by 1. Infinities and NaN give arbitrary codes.
  WireInts unclamped(Vec numbers, int64_t column) const {
    WireInts codes = rounded_to_ints((numbers - middle) * inverse);
    if constexpr (kStochastic) {
      constexpr uint32_t kColumn = 0x9E3779B9u;
      Bits x;
      for (int j = 0; j < kLanes; ++j) x[j] = uint32_t(j) * kColumn;
      x += uint32_t(column) * kColumn + low;
      x ^= x >> 16;
      x *= 0x7feb352du;
      x ^= x >> 15;
      x ^= high;
      x *= 0x846ca68bu;
      x ^= x >> 16;
      codes = (codes + (WireInts)(x & 0xffff)) >> 16;
    }
    return codes;
  }
};

// Minimum and maximum over the finite values in a row, and the kind of non-finite values: 0 none, 1 infinity,
// 2 minus infinity, 3 NaN or several kinds.
struct WireRange {
  float least, most;
  int others;
};

inline WireRange wire_range_slowly(const float* row, int64_t dim) {
  WireRange found{0.0f, 0.0f, 0};
  bool any = false;
  for (int64_t d = 0; d < dim; ++d) {
    const uint32_t magnitude = as_bits(row[d]) & 0x7fffffff;
    if (magnitude < 0x7f800000) {
      found.least = any && found.least < row[d] ? found.least : row[d];
      found.most = any && found.most > row[d] ? found.most : row[d];
      any = true;
    } else {
      const int kind = magnitude > 0x7f800000 ? 3 : row[d] > 0 ? 1 : 2;
      found.others = found.others == 0 || found.others == kind ? kind : 3;
    }
  }
  return found;
}

inline Vec lesser(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_min_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_min_ps((__m128)a, (__m128)b);
#else
  return a < b ? a : b;
#endif
}
inline Vec greater(Vec a, Vec b) {
#if defined(__AVX512F__)
  return (Vec)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec)_mm256_max_ps((__m256)a, (__m256)b);
#elif defined(__x86_64__)
  return (Vec)_mm_max_ps((__m128)a, (__m128)b);
#else
  return a > b ? a : b;
#endif
}

// In each group of kWidth lanes, the lower half of the result comes from a, and the upper half from b. kFrom
// selects which half is taken from both: 0 or kWidth / 2.
template <int kWidth, int kFrom, size_t... kLane>
inline Vec halves_of(Vec a, Vec b, std::index_sequence<kLane...>) {
  constexpr int kHalf = kWidth / 2;
  return __builtin_shufflevector(a, b,
                                 (int(kLane) / kWidth * kWidth + int(kLane) % kHalf + kFrom +
                                  (int(kLane) % kWidth < kHalf ? 0 : kLanes))...);
}

// Reduces the lanes for kLanes rows to a value per row: lane i in the result is for rows[i].
template <int kWidth = kLanes, typename Pick>
inline Vec reduced(Vec* rows, const Pick& pick) {
  constexpr int kHalf = kWidth / 2;
  constexpr std::make_index_sequence<kLanes> kAll;
#pragma GCC unroll 16
  for (int i = 0; i < kHalf; ++i)
    rows[i] = pick(halves_of<kWidth, 0>(rows[i], rows[i + kHalf], kAll),
                   halves_of<kWidth, kHalf>(rows[i], rows[i + kHalf], kAll));
  if constexpr (kHalf > 1) return reduced<kHalf>(rows, pick);
  return rows[0];
}

// Computes minimum and maximum for up to kLanes rows. Returns false if a value is not finite. Requires dim >=
// kLanes.
inline bool wire_ranges(const WireRowsArgs& a, int64_t first, int64_t ahead, float* least, float* most) {
  // Several accumulators: a single one would be a dependency chain of additions.
  Vec below[kLanes], above[kLanes], checks[4] = {};
  for (int64_t i = 0; i < kLanes; ++i) {
    const float* row = a.rows + std::min(first + i, a.num_rows - 1) * a.row_stride;
    if (a.to_l1) {
      prefetch_row<kToL1()>(row + ahead, a.dim);
    } else {
      prefetch_row(row + ahead, a.dim);
    }
    below[i] = above[i] = load(row);
    const auto add = [&](const float* p, Vec& check) {
      const Vec v = load(p);
      below[i] = lesser(v, below[i]), above[i] = greater(v, above[i]);
      check += v * Vec{};  // becomes NaN at the first non-finite value
    };
    int64_t d = 0;
    for (; d + 4 * kLanes <= a.dim; d += 4 * kLanes) {
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) add(row + d + k * kLanes, checks[k]);
    }
    for (; d + kLanes <= a.dim; d += kLanes) add(row + d, checks[0]);
    // The last vector overlaps the one before: minimum and maximum do not change if a value is read twice.
    if (a.dim % kLanes) add(row + a.dim - kLanes, checks[1]);
  }
  store(least, reduced(below, lesser)), store(most, reduced(above, greater));
  const Vec check = checks[0] + checks[1] + (checks[2] + checks[3]);
  return !any_lane(check != check);
}

// Stores the codes for kLanes values; 4-bit codes as code + 8.
template <int kBits>
inline void store_codes(WireInts codes, uint8_t* out) {
  if constexpr (kBits == 8) {
    store_bytes(codes, out);
  } else {
    typedef uint64_t Pairs __attribute__((vector_size(4 * kLanes)));
    // The code in the upper half of a pair moves next to the other, to bits 4 to 7.
    const Pairs pairs = (Pairs)(codes + 8), bytes = (pairs | pairs >> 28) & 0xff;
#if defined(__AVX512F__)
    _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm512_maskz_cvtepi64_epi8(0xff, (__m512i)bytes));
#else
    for (int j = 0; j < kLanes / 2; ++j) out[j] = uint8_t(bytes[j]);
#endif
  }
}

// Stores 8-bit codes for 4 * kLanes values. The pack instructions clamp them from above.
inline void store_four(WireInts a, WireInts b, WireInts c, WireInts d, uint8_t* out) {
  constexpr int kMinCode = -WireCodes<8>::kTop;
#if defined(__AVX512F__)
  const __m512i least = _mm512_set1_epi16(kMinCode);
  const __m512i ab = _mm512_max_epi16(_mm512_packs_epi32((__m512i)a, (__m512i)b), least);
  const __m512i cd = _mm512_max_epi16(_mm512_packs_epi32((__m512i)c, (__m512i)d), least);
  // The pack instructions work within 128-bit lanes, so the words are out of order.
  const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm512_storeu_si512(out, _mm512_maskz_permutexvar_epi32(0xffff, order, _mm512_packs_epi16(ab, cd)));
#elif defined(__AVX2__)
  const __m256i least = _mm256_set1_epi16(kMinCode);
  const __m256i ab = _mm256_max_epi16(_mm256_packs_epi32((__m256i)a, (__m256i)b), least);
  const __m256i cd = _mm256_max_epi16(_mm256_packs_epi32((__m256i)c, (__m256i)d), least);
  // The pack instructions work within 128-bit lanes, so the words are out of order.
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(ab, cd), order);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), bytes);
#elif defined(__x86_64__)
  const __m128i least = _mm_set1_epi16(kMinCode);
  const __m128i ab = _mm_max_epi16(_mm_packs_epi32((__m128i)a, (__m128i)b), least);
  const __m128i cd = _mm_max_epi16(_mm_packs_epi32((__m128i)c, (__m128i)d), least);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm_packs_epi16(ab, cd));
#else
  for (WireInts codes : {a, b, c, d}) {
    codes = codes > -kMinCode ? WireInts{} - kMinCode : codes;
    store_bytes(codes < kMinCode ? WireInts{} + kMinCode : codes, out);
    out += kLanes;
  }
#endif
}

template <int kBits, bool kStochastic>
void encode_row(const WireRowsArgs& a, const float* row, const WireRounding<kStochastic>& round,
                uint32_t others, uint8_t* out) {
  using Codes = WireCodes<kBits>;
  uint8_t* codes = out + kWireParamBytes;
  int64_t d = 0;
  if constexpr (kBits == 8) {
    const auto at = [&](int64_t e) { return round.unclamped(load(row + e), a.first_column + e); };
    for (; d + 4 * kLanes <= a.dim; d += 4 * kLanes)
      store_four(at(d), at(d + kLanes), at(d + 2 * kLanes), at(d + 3 * kLanes), codes + d);
  }
  for (; d + kLanes <= a.dim; d += kLanes)
    store_codes<kBits>(round(load(row + d), a.first_column + d), codes + d * kBits / 8);
  if (d < a.dim) {
    float rest[kLanes] = {};
    std::memcpy(rest, row + d, (a.dim - d) * sizeof(float));
    uint8_t bytes[kLanes];
    WireInts last = round(load(rest), a.first_column + d);
    for (int64_t j = a.dim - d; j < kLanes; ++j) last[j] = kBits == 4 ? -8 : 0;  // past the end: zero bits
    store_codes<kBits>(last, bytes);
    std::memcpy(codes + d * kBits / 8, bytes, ((a.dim - d) * kBits + 7) / 8);
  }
  if (others == 0) return;
  for (d = 0; d < a.dim; ++d) {
    if ((as_bits(row[d]) & 0x7fffffff) < 0x7f800000) continue;
    if constexpr (kBits == 8) {
      codes[d] = uint8_t(Codes::kMark);
    } else {
      codes[d / 2] &= d % 2 ? 0x0f : 0xf0;  // kMark + 8 is 0
    }
  }
}

// Encodes some rows at a time, in three passes: minimum and maximum (while the rows are loaded into the
// cache), parameters, codes. A pass waits for the results of the previous one, so process more rows than
// lanes, as many as stay in the L1 cache.
template <int kBits, bool kStochastic>
int64_t encode_rows(const WireRowsArgs& args) {
  constexpr int64_t kBytes = 8192, kMaxAtOnce = 32;
  // a copy, so the compiler knows that stores to the message do not change it
  const WireRowsArgs a = args;
  const int64_t in_cache = kBytes / (a.dim * int64_t(sizeof(float)));
  const int64_t at_once = in_cache < kMaxAtOnce ? kLanes : kMaxAtOnce;
  const int64_t ahead = std::max(at_once, in_cache) * a.row_stride;
  float least[kMaxAtOnce] = {}, most[kMaxAtOnce] = {};
  WireParamsOfRows params[kMaxAtOnce / kLanes];
  int64_t num_bad = 0;
  for (int64_t first = 0; first < a.num_rows; first += at_once) {
    const int64_t n = std::min(a.num_rows - first, at_once);
    uint32_t others[kMaxAtOnce] = {};
    for (int64_t i = 0; i < n; i += kLanes) {
      if (a.dim < kLanes || !wire_ranges(a, first + i, ahead, least + i, most + i)) {
        for (int64_t j = i; j < std::min<int64_t>(n, i + kLanes); ++j) {
          const WireRange range = wire_range_slowly(a.rows + (first + j) * a.row_stride, a.dim);
          least[j] = range.least, most[j] = range.most, others[j] = range.others;
        }
      }
    }
    for (int64_t i = 0; i < n; i += kLanes)
      params[i / kLanes].set(least + i, most + i, WireCodes<kBits>::kTop);
    for (int64_t i = 0; i < n; ++i) {
      const WireParamsOfRows& of = params[i / kLanes];
      const float scale = of.scale[i % kLanes], middle = of.middle[i % kLanes];
      WireRounding<kStochastic> round(middle, of.inverse[i % kLanes], WireCodes<kBits>::kTop);
      if constexpr (kStochastic) {
        const uint64_t key =
            a.keys != nullptr ? uint64_t(a.keys[first + i]) : a.first_key + uint64_t(first + i);
        // Random bits depend on the row's key and parameters, not on its position in the message: any
        // division of the work gives the same codes.
        round.low = random_bits(a.seed, a.step, key, as_bits(scale));
        round.high = random_bits(a.seed, a.step, key, as_bits(middle) + (uint64_t(1) << 32));
      }
      uint8_t* out = a.message + (first + i) * a.message_stride;
      // The low 8 bits of the scale are 0, so two of them can hold the kind of non-finite values.
      const WireParams told{as_float(as_bits(scale) | others[i]), middle};
      std::memcpy(out, &told, sizeof(told));
      encode_row<kBits>(a, a.rows + (first + i) * a.row_stride, round, others[i], out);
      if (others[i] != 0 && num_bad++ == 0) *a.first_bad = first + i;
    }
  }
  return num_bad;
}

template <int kBits>
void decode_row(const uint8_t* in, int64_t dim, float* row, uint8_t* scratch) {
  using Codes = WireCodes<kBits>;
  WireParams params;
  std::memcpy(&params, in, sizeof(params));
  const uint32_t others = as_bits(params.scale) & 3;
  const float scale = as_float(as_bits(params.scale) & ~3u);
  const Vec scales = to_vector(scale), middle = to_vector(params.middle);
  const uint8_t* codes = in + kWireParamBytes;
  if constexpr (kBits == 4) {
    for (int64_t j = 0; j < (dim + 1) / 2; ++j)
      scratch[2 * j] = (codes[j] & 15) - 8, scratch[2 * j + 1] = (codes[j] >> 4) - 8;
    codes = scratch;
  }
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    store(row + d, __builtin_convertvector(load_bytes(codes + d), Vec) * scales + middle);
  }
  for (; d < dim; ++d) row[d] = float(int8_t(codes[d])) * scale + params.middle;
  if (others == 0) return;
  const uint32_t marked[] = {0, 0x7f800000, 0xff800000, 0x7fc00000};
  for (d = 0; d < dim; ++d)
    if (int8_t(codes[d]) == Codes::kMark) row[d] = as_float(marked[others]);
}

inline void store_nearest(Vec v, Half* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, (__m512)v, 0));
#elif defined(__F16C__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph((__m256)v, 0));
#else
  for (int j = 0; j < kLanes; ++j) to[j] = {nearest_half(v[j])};
#endif
}
inline void store_nearest(Vec v, BFloat16* to) {
  const Bits bits = (Bits)v, even = bits >> 16 & 1, is_nan = (Bits)(v != v);
  // A NaN is not rounded, because a carry could turn it into infinity or zero.
  const Bits rounded = (is_nan & (bits >> 16 | 0x40)) | (~is_nan & (bits + 0x7fff + even) >> 16);
  *reinterpret_cast<HalfBitsMemory*>(to) = __builtin_convertvector(rounded, HalfBits);
}

template <typename Rounded>
void cast_row(const float* row, int64_t dim, uint8_t* out) {
  int64_t d = 0;
  Rounded values[kLanes];
  for (; d + kLanes <= dim; d += kLanes) {
    store_nearest(load(row + d), values);
    std::memcpy(out + d * sizeof(Rounded), values, sizeof(values));
  }
  for (; d < dim; ++d) {
    values[0] = round_to(values, row[d], 0, false);
    std::memcpy(out + d * sizeof(Rounded), values, sizeof(Rounded));
  }
}

template <typename Rounded>
void uncast_row(const uint8_t* in, int64_t dim, float* row) {
  int64_t d = 0;
  Rounded values[kLanes];
  for (; d + kLanes <= dim; d += kLanes) {
    std::memcpy(values, in + d * sizeof(Rounded), sizeof(values));
    store(row + d, load(values));
  }
  for (; d < dim; ++d) {
    std::memcpy(values, in + d * sizeof(Rounded), sizeof(Rounded));
    row[d] = to_float(values[0]);
  }
}

int64_t encode_wire(const WireRowsArgs& a) {
  if (a.format == kWireInt8) return a.stochastic ? encode_rows<8, true>(a) : encode_rows<8, false>(a);
  if (a.format == kWireInt4) return a.stochastic ? encode_rows<4, true>(a) : encode_rows<4, false>(a);
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const float* row = a.rows + i * a.row_stride;
    uint8_t* out = a.message + i * a.message_stride;
    if (a.format == kWireHalf) {
      cast_row<Half>(row, a.dim, out);
    } else if (a.format == kWireBFloat16) {
      cast_row<BFloat16>(row, a.dim, out);
    } else {
      std::memcpy(out, row, a.dim * sizeof(float));
    }
  }
  return 0;
}

void decode_wire(const WireRowsArgs& a) {
  for (int64_t i = 0; i < a.num_rows; ++i) {
    float* row = a.decoded + i * a.row_stride;
    const uint8_t* in = a.message + i * a.message_stride;
    switch (a.format) {
      case kWireFloat:
        std::memcpy(row, in, a.dim * sizeof(float));
        break;
      case kWireHalf:
        uncast_row<Half>(in, a.dim, row);
        break;
      case kWireBFloat16:
        uncast_row<BFloat16>(in, a.dim, row);
        break;
      case kWireInt8:
        decode_row<8>(in, a.dim, row, a.scratch);
        break;
      default:
        decode_row<4>(in, a.dim, row, a.scratch);
    }
  }
}
