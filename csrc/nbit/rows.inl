// Quantised rows. Included by kernels.inl only, inside its unnamed namespace.
//
// A row is its fp16 scale, its fp16 bias, and a code for each number, the first in the lowest bits of a byte;
// the number is scale * code + bias. The product has at most 19 bits, so that the sum is rounded once, with
// or without a fused instruction: every instruction set, and vectors and ends of rows alike, give one result.

constexpr int64_t kParamBytes = 4;

inline Vec to_vector(float value) { return Vec{} + value; }

// The numbers of kLanes codes that begin at p.
template <int kBits>
struct Decoder;

#if defined(__AVX512F__)
inline Vec of_ints(__m512i codes) { return (Vec)_mm512_maskz_cvtepi32_ps(0xffff, codes); }

// The row's 16 (or 4) numbers are known beforehand: a code is looked up among them by its lowest four bits.
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
  // Rows begin anywhere in a line, at a multiple of 4.
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

// FBGEMM's rounding: the bias is the least number, the scale 1 / (2^b - 1) of what is above it, both in fp16,
// and 1 where that is 0; then each number goes to the nearest code, of two to the even one.
inline bool choose_params(const float* row, int64_t dim, int top, uint16_t* params) {
  float least = row[0], most = row[0];
  for (int64_t d = 0; d < dim; ++d) {
    least = row[d] < least ? row[d] : least;
    most = row[d] > most ? row[d] : most;
  }
  params[1] = nearest_half(least);
  const float range = most - to_float(Half{params[1]});
  params[0] = nearest_half(range == 0 ? 1.0f : range / float(top));
  if ((params[0] & 0x7fff) == 0) params[0] = 0x3c00;
  return (params[0] & 0x7c00) != 0x7c00 && (params[1] & 0x7c00) != 0x7c00;
}

inline bool all_finite(const float* row, int64_t dim) {
  uint32_t bad = 0;
  for (int64_t d = 0; d < dim; ++d) bad |= uint32_t((as_bits(row[d]) & 0x7f800000) == 0x7f800000);
  return bad == 0;
}

template <int kBits>
bool quantize(const QuantizeArgs& a) {
  constexpr int kTop = (1 << kBits) - 1, kPerByte = 8 / kBits;
  constexpr int64_t kBlock = 512;
  uint16_t params[2];
  if (!all_finite(a.row, a.dim)) return false;
  if (a.params != nullptr) {
    params[0] = a.params[0], params[1] = a.params[1];
  } else if (!choose_params(a.row, a.dim, kTop, params)) {
    return false;
  }
  const float scale = to_float(Half{params[0]}), bias = to_float(Half{params[1]}), inverse = 1.0f / scale;
  std::memcpy(a.out, params, kParamBytes);
  uint8_t* out = a.out + kParamBytes;
  for (int64_t first = 0; first < a.dim; first += kBlock) {
    const int64_t count = a.dim - first < kBlock ? a.dim - first : kBlock;
    const int64_t bytes = (count + kPerByte - 1) / kPerByte;
    uint8_t codes[kBlock] = {};
    for (int64_t d = 0; d < count; ++d) {
      const float code = (a.row[first + d] - bias) * inverse;
      const float clamped = code < 0.0f ? 0.0f : code > float(kTop) ? float(kTop) : code;
      // Numbers this small are rounded to whole ones, halves to even, when 2^23 is added.
      codes[d] = uint8_t(as_bits(clamped + 8388608.0f));
    }
    for (int64_t byte = 0; byte < bytes; ++byte) {
      uint8_t packed = 0;
      for (int k = 0; k < kPerByte; ++k) packed |= uint8_t(codes[byte * kPerByte + k] << (k * kBits));
      out[byte] = packed;
    }
    out += bytes;
  }
  std::memset(out, 0, a.out + a.row_bytes - out);
  return true;
}
