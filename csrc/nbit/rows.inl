// Quantized rows. Included only by isa/kernels.inl, inside an unnamed namespace.
//
// A row has an fp16 scale, an fp16 bias, and a code per value, the first in the lowest bits of a byte. The
// value is scale * code + bias. The product has at most 19 bits, so only the sum is rounded, with or without
// fused instructions: all instruction sets give the same result, in vectors as well as at the end of a row.

// An fp16 scale and an fp16 bias.
constexpr int64_t kParamBytes = 4;

inline Vec to_vector(float value) { return Vec{} + value; }

// Decodes the kLanes codes that start at p.
template <int kBits>
struct Decoder;

#if defined(__AVX512F__)
inline Vec of_ints(__m512i codes) { return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, codes); }

// Decodes with a table: a row has only 16 (or 4) different values, indexed by the lowest four bits of a code.
inline Vec numbers_by_code(float scale, float bias, int mask) {
  const __m512i code = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return of_ints(_mm512_and_si512(code, _mm512_set1_epi32(mask))) * scale + bias;
}

template <>
struct Decoder<8> {
  Decoder(float scale, float bias) : scale(to_vector(scale)), bias(to_vector(bias)) {}
  Vec operator()(const uint8_t* p) const {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return of_ints(_mm512_maskz_cvtepu8_epi32(0xffff, bytes)) * scale + bias;
  }
  Vec scale, bias;
};
template <>
struct Decoder<4> {
  Decoder(float scale, float bias) : numbers(numbers_by_code(scale, bias, 15)) {}
  Vec operator()(const uint8_t* p) const {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    const __m512i wide = _mm512_maskz_cvtepu8_epi64(0xff, bytes);
    const __m512i codes = _mm512_or_si512(wide, _mm512_maskz_slli_epi64(0xff, wide, 28));
    return (Vec)_mm512_maskz_permutexvar_ps(0xffff, codes, (__m512)numbers);
  }
  Vec numbers;
};
template <>
struct Decoder<2> {
  Decoder(float scale, float bias) : numbers(numbers_by_code(scale, bias, 3)) {}
  Vec operator()(const uint8_t* p) const {
    int32_t word;
    std::memcpy(&word, p, 4);
    const __m512i shifts = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i codes = _mm512_maskz_srlv_epi32(0xffff, _mm512_set1_epi32(word), shifts);
    return (Vec)_mm512_maskz_permutexvar_ps(0xffff, codes, (__m512)numbers);
  }
  Vec numbers;
};
#else
template <int kBits>
struct Decoder {
  typedef int32_t Ints __attribute__((vector_size(4 * kLanes)));

  Decoder(float scale, float bias) : scale(to_vector(scale)), bias(to_vector(bias)) {}
  Vec operator()(const uint8_t* p) const { return __builtin_convertvector(codes(p), Vec) * scale + bias; }
  static Ints codes(const uint8_t* p) {
#if defined(__AVX2__)
    if constexpr (kBits == 8) {
      return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
#endif
    uint32_t word = 0;
    std::memcpy(&word, p, kBits == 8 ? 4 : kLanes * kBits / 8);
    Bits found{};
    for (int k = 0; k < kLanes; ++k) found[k] = word;
    Bits shifts{};
    for (int k = 0; k < kLanes; ++k) shifts[k] = k * kBits % 32;
    return (Ints)(found >> shifts & ((1u << kBits) - 1));
  }
  Vec scale, bias;
};
#endif

template <int kBits>
struct QuantisedRows {
  struct Row {
    const uint8_t* codes;
    float scale, bias;
    Decoder<kBits> decode;
    Vec vector(int k) const { return decode(codes + k * (kLanes * kBits / 8)); }
    float number(int64_t d) const {
      const int code = codes[d * kBits / 8] >> (d * kBits % 8) & ((1 << kBits) - 1);
      return scale * float(code) + bias;
    }
  };

  QuantisedRows(const void* memory, int64_t bytes, int64_t column)
      : first(static_cast<const uint8_t*>(memory)),
        row_bytes(bytes),
        begin(kParamBytes + column * kBits / 8),
        from(column == 0 ? 0 : begin) {}

  Row row(int64_t id) const {
    const uint8_t* p = first + id * row_bytes;
    Half params[2];
    std::memcpy(params, p, kParamBytes);
    const float scale = to_float(params[0]), bias = to_float(params[1]);
    return {p + begin, scale, bias, {scale, bias}};
  }
  // A row can start at any multiple of 4 bytes in a cache line.
  template <int kColumns, int kLocality>
  __attribute__((always_inline)) void announce(int64_t id) const {
    constexpr int kLast = kParamBytes + kColumns * kBits / 8 - 1;
    const char* p = to_prefetch(first, id, row_bytes) + from;
    prefetch<(kLast & ~3) == 0 ? 1 : (kLast & ~3), kLocality>(p);
    prefetch<1, kLocality>(p + kLast);
  }

  const uint8_t* first;
  int64_t row_bytes, begin, from;
};

template <int kDistance, size_t... kLane>
inline Vec exchanged(Vec v, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(v, v, (int(kLane) ^ kDistance)...);
}

// Returns half of the lanes in each vector, starting at lane kFrom.
template <int kFrom, size_t... kLane>
inline Vec halves(Vec a, Vec b, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(a, b, (int(kLane) + kFrom + (kLane < kLanes / 2 ? 0 : kLanes / 2))...);
}

// Reduces the lanes in each of two vectors to a value; pick(a, b) selects or adds.
template <typename Pick>
inline std::pair<float, float> folded(Vec a, Vec b, const Pick& pick) {
  constexpr std::make_index_sequence<kLanes> kAll;
  Vec v = pick(halves<0>(a, b, kAll), halves<kLanes / 2>(a, b, kAll));
  if constexpr (kLanes > 8) v = pick(v, exchanged<4>(v, kAll));
  if constexpr (kLanes > 4) v = pick(v, exchanged<2>(v, kAll));
  v = pick(v, exchanged<1>(v, kAll));
  return {v[0], v[kLanes / 2]};
}

struct Extremes {
  float least, most;
  bool finite;  // whether all values are finite
};

inline Extremes extremes(const float* row, int64_t dim) {
  const auto lesser = [](auto a, auto b) { return a < b ? a : b; };
  const auto greater = [](auto a, auto b) { return a > b ? a : b; };
  Vec least = to_vector(row[0]), most = least, nothing{};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) {
    const Vec v = load(row + d);
    least = lesser(v, least), most = greater(v, most);
    nothing += v * 0.0f;  // NaN if v is not finite
  }
  const auto [below, above] = folded(-least, most, greater);
  Extremes found{-below, above, false};
  float rest = folded(nothing, Vec{}, [](Vec a, Vec b) { return a + b; }).first;
  for (; d < dim; ++d) {
    found.least = lesser(row[d], found.least), found.most = greater(row[d], found.most);
    rest += row[d] * 0.0f;
  }
  found.finite = rest == 0.0f;
  if (found.finite && found.least == 0.0f) {  // as in FBGEMM, the first zero determines the sign
    const float* zero = row;
    while (*zero != 0.0f) ++zero;
    found.least = *zero;
  }
  return found;
}

inline bool is_finite(uint16_t half) { return (half & 0x7c00) != 0x7c00; }
inline bool is_zero(uint16_t half) { return (half & 0x7fff) == 0; }

// Rounds as FBGEMM does. The bias is the row minimum in fp16. The scale is the distance from the bias to the
// maximum, divided by 2^b - 1, in fp16, or 1 if that is 0. Every value then gets the nearest code, ties to
// even.
inline void choose_params(const Extremes& row, int top, uint16_t* params) {
  params[1] = nearest_half(row.least);
  const float range = row.most - to_float(Half{params[1]});
  params[0] = nearest_half(range == 0 ? 1.0f : range / float(top));
  if (is_zero(params[0])) params[0] = 0x3c00;
}

constexpr int kGroup = 16;  // values packed at once

// Writes the codes for kGroup values as 2 * kBits bytes.
template <int kBits>
inline void pack(const float* numbers, Vec bias, Vec inverse, uint8_t* out) {
  typedef uint8_t LaneBytes __attribute__((vector_size(kLanes)));
  constexpr float kTop = (1 << kBits) - 1;
  const Vec zero{}, top = to_vector(kTop);
  uint8_t codes[kGroup];
  for (int k = 0; k < kGroup; k += kLanes) {
    const Vec code = (load(numbers + k) - bias) * inverse;
    // Given parameters need not cover the row, and the fp16 scale is rounded, so codes can exceed the range.
    const Vec above = code < zero ? zero : code, clamped = above > top ? top : above;
    // Adding 2^23 rounds values this small to integers, ties to even.
    const Bits whole = (Bits)(clamped + 8388608.0f) & 255;
    const LaneBytes bytes = __builtin_convertvector(whole, LaneBytes);
    std::memcpy(codes + k, &bytes, kLanes);
  }
  // Codes that share a byte are in adjacent bytes of a wider integer; shifts bring them together.
  if constexpr (kBits == 8) {
    std::memcpy(out, codes, kGroup);
  } else if constexpr (kBits == 4) {
    typedef uint16_t Pairs __attribute__((vector_size(kGroup)));
    typedef uint8_t Packed __attribute__((vector_size(kGroup / 2)));
    Pairs pairs;
    std::memcpy(&pairs, codes, kGroup);
    const Packed packed = __builtin_convertvector((pairs | pairs >> 4) & 255, Packed);
    std::memcpy(out, &packed, sizeof(packed));
  } else {
    typedef uint32_t Fours __attribute__((vector_size(kGroup)));
    typedef uint8_t Packed __attribute__((vector_size(kGroup / 4)));
    Fours fours;
    std::memcpy(&fours, codes, kGroup);
    fours = (fours | fours >> 6 | fours >> 12 | fours >> 18) & 255;
    const Packed packed = __builtin_convertvector(fours, Packed);
    std::memcpy(out, &packed, sizeof(packed));
  }
}

// First the parameters for all rows, then their codes. Computing the scale from minimum and maximum is a long
// dependency chain; the chains for several rows overlap.
template <int kBits>
int64_t quantize(const QuantizeArgs a) {
  Vec bias[kQuantizeRows], inverse[kQuantizeRows];
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const Extremes found = extremes(a.rows + row * a.dim, a.dim);
    uint16_t params[2];
    if (a.params != nullptr) {
      params[0] = a.params[2 * row], params[1] = a.params[2 * row + 1];
    } else {
      choose_params(found, (1 << kBits) - 1, params);
    }
    // A finite fp32 row may have a scale or bias beyond fp16's range.
    if (!found.finite || !is_finite(params[0]) || is_zero(params[0]) || !is_finite(params[1])) return row;
    std::memcpy(a.out + row * a.row_bytes, params, kParamBytes);
    bias[row] = to_vector(to_float(Half{params[1]}));
    inverse[row] = to_vector(1.0f / to_float(Half{params[0]}));
  }
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const float* numbers = a.rows + row * a.dim;
    uint8_t* out = a.out + row * a.row_bytes + kParamBytes;
    int64_t d = 0;
    for (; d + kGroup <= a.dim; d += kGroup, out += 2 * kBits)
      pack<kBits>(numbers + d, bias[row], inverse[row], out);
    if (d < a.dim) {
      float rest[kGroup];
      for (int k = 0; k < kGroup; ++k) rest[k] = d + k < a.dim ? numbers[d + k] : bias[row][0];  // code 0
      uint8_t packed[kGroup];
      pack<kBits>(rest, bias[row], inverse[row], packed);
      std::memcpy(out, packed, a.out + (row + 1) * a.row_bytes - out);
    }
  }
  return a.num_rows;
}
