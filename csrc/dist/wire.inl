// Rows as they travel between ranks. Included by kernels.inl only, inside its unnamed namespace.
//
// A coded row is its fp32 scale, its fp32 middle, and a signed code for each number, in two's complement of 8
// bits or, with the first in the lower half of a byte, as code + 8 in 4 bits. The number is scale * code +
// middle. The scale has 16 significant bits, so the product is exact and the sum is rounded once: all
// instruction sets give the same result. The two lowest bits of the scale say what the code that no number
// has (-128, or -8) stands for: nothing, infinity, minus infinity, NaN.

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

template <int kBits>
struct WireCodes {
  static constexpr int kTop = (1 << (kBits - 1)) - 1, kMark = -kTop - 1;
  static int64_t bytes(int64_t dim) { return kWireParamBytes + (dim * kBits + 7) / 8; }
};

struct WireParams {
  float scale, middle;
};

inline WireParams wire_params(float least, float most, int top) {
  const float range = most - least;
  const bool fits = as_bits(range) < 0x7f800000 || as_bits(range) == 0x80000000;
  const float steps = float(2 * top);
  float scale = fits ? range / steps : most / steps - least / steps;
  scale = scale > kWireLeastScale ? scale : kWireLeastScale;
  scale = as_float((as_bits(scale) + 0xff) & ~0xffu);
  const float middle = fits ? least + range * 0.5f : least * 0.5f + most * 0.5f;
  // Half of a subnormal number is not exact, with and without a fused instruction alike.
  return {scale, std::fabs(middle) < kWireLeastScale ? 0.0f : middle};
}

// The codes of kLanes numbers.
struct WireRounding {
  Vec middle, inverse;
  WireInts top;
  bool stochastic;
  uint32_t low, high;  // the row's noise

  WireRounding(WireParams params, int top_code, bool is_stochastic)
      : middle(to_vector(params.middle)),
        inverse(to_vector((1.0f / params.scale) * (is_stochastic ? 65536.0f : 1.0f))),
        top(WireInts{} + top_code),
        stochastic(is_stochastic) {}

  WireInts operator()(Vec numbers, int64_t column) const {
    WireInts codes = rounded_to_ints((numbers - middle) * inverse);
    if (stochastic) {
      Bits x;
      for (int j = 0; j < kLanes; ++j) x[j] = uint32_t(column + j) * 0x9E3779B9u;
      x += low;
      x ^= x >> 16;
      x *= 0x7feb352du;
      x ^= x >> 15;
      x ^= high;
      x *= 0x846ca68bu;
      x ^= x >> 16;
      codes = (codes + (WireInts)(x & 0xffff)) >> 16;
    }
    codes = codes > top ? top : codes;
    return codes < -top ? -top : codes;
  }
};

// The extremes of the finite numbers of a row, and the kind of the others: 0 none, 1 infinity, 2 minus
// infinity, 3 NaN or several kinds.
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

inline WireRange wire_range(const float* row, int64_t dim) {
  if (dim < kLanes) return wire_range_slowly(row, dim);
  Vec least = load(row), most = least;
  Bits largest{};
  const auto add = [&](Vec v) {
    least = v < least ? v : least, most = v > most ? v : most;
    const Bits magnitude = (Bits)v & 0x7fffffff;
    largest = magnitude > largest ? magnitude : largest;
  };
  for (int64_t d = 0; d + kLanes <= dim; d += kLanes) add(load(row + d));
  if (dim % kLanes) add(load(row + dim - kLanes));
  const Bits limit = Bits{} + 0x7f800000;
  uint32_t bad = 0;
  const WireInts over = (WireInts)(largest >= limit);
#if defined(__AVX512F__)
  bad = _mm512_movepi32_mask((__m512i)over);
#elif defined(__AVX2__)
  bad = _mm256_movemask_epi8((__m256i)over);
#else
  for (int j = 0; j < kLanes; ++j) bad |= over[j];
#endif
  if (bad) return wire_range_slowly(row, dim);
  const auto [below, above] = folded(-least, most, [](Vec a, Vec b) { return a > b ? a : b; });
  return {-below, above, 0};
}

inline void pack_nibbles(const uint8_t* codes, int64_t dim, uint8_t* out) {
  for (int64_t j = 0; j < (dim + 1) / 2; ++j) out[j] = codes[2 * j] | codes[2 * j + 1] << 4;
}

template <int kBits>
int64_t encode_row(const WireRowsArgs& a, const float* row, uint64_t key, uint8_t* out, uint8_t* scratch) {
  using Codes = WireCodes<kBits>;
  const WireRange range = wire_range(row, a.dim);
  WireParams params = wire_params(range.least, range.most, Codes::kTop);
  WireRounding round(params, Codes::kTop, a.stochastic);
  if (a.stochastic) {
    round.low = random_bits(a.seed, a.step, key, as_bits(params.scale));
    round.high = random_bits(a.seed, a.step, key, as_bits(params.middle) + (uint64_t(1) << 32));
  }
  params.scale = as_float(as_bits(params.scale) | range.others);
  std::memcpy(out, &params, sizeof(params));
  uint8_t* codes = kBits == 8 ? out + kWireParamBytes : scratch;
  constexpr int kShift = kBits == 8 ? 0 : 8;
  int64_t d = 0;
  for (; d + kLanes <= a.dim; d += kLanes) {
    const WireBytes bytes =
        __builtin_convertvector(round(load(row + d), a.first_column + d) + kShift, WireBytes);
    std::memcpy(codes + d, &bytes, kLanes);
  }
  if (d < a.dim) {
    float rest[kLanes] = {};
    std::memcpy(rest, row + d, (a.dim - d) * sizeof(float));
    const WireBytes bytes =
        __builtin_convertvector(round(load(rest), a.first_column + d) + kShift, WireBytes);
    std::memcpy(codes + d, &bytes, a.dim - d);
  }
  if (range.others != 0)
    for (d = 0; d < a.dim; ++d)
      if ((as_bits(row[d]) & 0x7fffffff) >= 0x7f800000) codes[d] = uint8_t(Codes::kMark + kShift);
  if constexpr (kBits == 4) {
    if (a.dim % 2) scratch[a.dim] = 0;
    pack_nibbles(scratch, a.dim, out + kWireParamBytes);
  }
  return range.others != 0;
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
    WireBytes bytes;
    std::memcpy(&bytes, codes + d, kLanes);
    store(row + d, __builtin_convertvector(__builtin_convertvector(bytes, WireInts), Vec) * scales + middle);
  }
  for (; d < dim; ++d) row[d] = float(int8_t(codes[d])) * scale + params.middle;
  if (others == 0) return;
  const uint32_t marked[] = {0, 0x7f800000, 0xff800000, 0x7fc00000};
  for (d = 0; d < dim; ++d)
    if (int8_t(codes[d]) == Codes::kMark) row[d] = as_float(marked[others]);
}

template <typename Rounded>
int64_t cast_row(const float* row, int64_t dim, uint8_t* out) {
  for (int64_t d = 0; d < dim; ++d) {
    const Rounded value = round_to(static_cast<Rounded*>(nullptr), row[d], 0, false);
    std::memcpy(out + d * sizeof(value), &value, sizeof(value));
  }
  return 0;
}

template <typename Rounded>
void uncast_row(const uint8_t* in, int64_t dim, float* row) {
  for (int64_t d = 0; d < dim; ++d) {
    Rounded value;
    std::memcpy(&value, in + d * sizeof(value), sizeof(value));
    row[d] = to_float(value);
  }
}

int64_t encode_wire(const WireRowsArgs& a) {
  int64_t bad = 0;
  for (int64_t i = 0; i < a.num_rows; ++i) {
    const float* row = a.rows + i * a.row_stride;
    uint8_t* out = a.message + i * a.message_stride;
    const uint64_t key = a.keys != nullptr ? uint64_t(a.keys[i]) : a.first_key + uint64_t(i);
    int64_t is_bad = 0;
    switch (a.format) {
      case kWireFloat:
        std::memcpy(out, row, a.dim * sizeof(float));
        break;
      case kWireHalf:
        cast_row<Half>(row, a.dim, out);
        break;
      case kWireBFloat16:
        cast_row<BFloat16>(row, a.dim, out);
        break;
      case kWireInt8:
        is_bad = encode_row<8>(a, row, key, out, a.scratch);
        break;
      default:
        is_bad = encode_row<4>(a, row, key, out, a.scratch);
    }
    if (is_bad && bad++ == 0) *a.first_bad = i;
  }
  return bad;
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
