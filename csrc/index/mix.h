// A bijective hash for 64-bit IDs, the same as in src/meshrec/ops/index/naive.py.
//
// Static: translation units with different machine flags include it (see isa/kernels.h).
#pragma once

#include <cstdint>

namespace meshrec {

constexpr uint64_t kMixStep = 0x9E3779B97F4A7C15, kMixFirst = 0xBF58476D1CE4E5B9,
                   kMixSecond = 0x94D049BB133111EB;

static constexpr uint64_t inverse_of(uint64_t odd) {  // modulo 2^64, by Newton's method
  uint64_t inverse = odd;
  // At first, the inverse is right in 3 bits, and every turn doubles their number.
  for (int turn = 0; turn < 6; ++turn) inverse *= 2 - odd * inverse;
  return inverse;
}

// splitmix64's finalizer; different seeds give different permutations. Word: uint64_t, or a vector of them.
template <typename Word>
static inline Word mix(Word id, uint64_t seed) {
  Word x = id + kMixStep * (seed + 1);
  x = (x ^ x >> 30) * kMixFirst;
  x = (x ^ x >> 27) * kMixSecond;
  return x ^ x >> 31;
}

template <typename Word>
static inline Word unmix(Word key, uint64_t seed) {
  constexpr uint64_t kFirst = inverse_of(kMixFirst), kSecond = inverse_of(kMixSecond);
  Word x = (key ^ key >> 31 ^ key >> 62) * kSecond;
  x = (x ^ x >> 27 ^ x >> 54) * kFirst;
  return (x ^ x >> 30 ^ x >> 60) - kMixStep * (seed + 1);
}

}  // namespace meshrec
