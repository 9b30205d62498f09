// What a planning problem is to the annealing loop, and its random numbers. The tensors are documented in
// src/meshrec/ops/planning.py.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <vector>

#include "stable_abi.h"

namespace meshrec::planning {

constexpr int kPhases = 8;  // phases, padded with zeros

enum Scope { kRanks, kNodes, kOneNode, kEverywhere };

// xoshiro256**: the same numbers on every machine.
class Random {
 public:
  explicit Random(uint64_t seed) {
    for (auto& word : state_) {
      seed += 0x9e3779b97f4a7c15ULL;
      word = (seed * 0xbf58476d1ce4e5b9ULL) ^ (seed >> 31);
    }
  }
  uint64_t next() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9, shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate(state_[3], 45);
    return result;
  }
  int64_t below(int64_t count) { return static_cast<int64_t>((next() >> 32) * count >> 32); }
  double uniform() { return (next() >> 11) * 0x1.0p-53; }

 private:
  static uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
  std::array<uint64_t, 4> state_;
};

template <class T, ScalarType kType>
struct View {
  explicit View(const Tensor& any) : tensor(as_contiguous(any)) {
    if (any.scalar_type() != kType) fail("plan_anneal: a tensor has the wrong dtype");
    data = tensor.template const_data_ptr<T>();
  }
  T operator[](int64_t index) const { return data[index]; }
  Tensor tensor;
  const T* data;
};
using Ints = View<int64_t, ScalarType::Long>;
using Doubles = View<double, ScalarType::Double>;

struct Problem {
  explicit Problem(const std::vector<Tensor>& tensors) : t(tensors) {
    if (num_phases > kPhases)
      fail("plan_anneal: ", num_phases, " phases; at most ", kPhases, " are possible");
  }
  const std::vector<Tensor>& t;
  Ints type{t[0]}, choice_start{t[1]}, choices{t[2]}, scope{t[3]}, uneven{t[4]}, piece_start{t[5]};
  Ints count{t[6]};
  Doubles load{t[7]}, fixed{t[8]}, bytes{t[9]}, fixed_bytes{t[10]}, common{t[11]}, common_bytes{t[12]};
  Doubles least{t[13]};
  Ints allowed{t[14]}, shape{t[15]}, columns{t[16]};
  int64_t num_phases = t[7].size(1);
};

// A piece: `span` ranks from place * span on, each with its own amount.
struct Unit {
  int32_t table, group, place, span;
  int32_t on_rank;  // position in the list of its first rank
  int32_t amounts;  // first of `span` entries of Annealer::amount_
};

struct Placed {
  int64_t candidate;
  std::vector<Unit> units;
  std::vector<double> amounts;
};

}  // namespace meshrec::planning
