// A planning problem as the annealing loop reads it (src/meshrec/ops/planning.py documents the tensors), and
// a plan that changes: the position of every piece, the load on every rank, and the smooth objective. Every
// move updates these.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "stable_abi.h"

namespace meshrec::planning {

constexpr int kPhases = 8;  // phases, padded with zeros

enum Scope { kRanks, kNodes, kOneNode, kEverywhere };

// xoshiro256**: gives the same sequence on every machine.
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
  // Needs count <= 2^32.
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

// A piece. It occupies `span` ranks from place * span on, with an amount for each.
struct Unit {
  int32_t table, group, place, span;
  int32_t on_rank;  // position in the list for the first rank
  int32_t amounts;  // index of the first of `span` entries in Placed::amounts
};

struct Placed {
  int64_t candidate;
  std::vector<Unit> units;
  std::vector<double> amounts;
};

using Load = std::array<double, kPhases>;

class PlanState {
 public:
  PlanState(const Problem& problem, int64_t num_ranks, int64_t node_size)
      : p_(problem), num_ranks_(num_ranks), node_size_(node_size) {
    holds_.assign(tables_.size() * num_ranks, 0);
    for (int64_t group = 0; group < p_.count.tensor.numel(); ++group) {
      Load whole{}, still{};
      for (int64_t k = 0; k < p_.num_phases; ++k) {
        whole[k] = p_.load[group * p_.num_phases + k];
        still[k] = p_.fixed[group * p_.num_phases + k];
      }
      group_load_.push_back(whole);
      group_fixed_.push_back(still);
    }
  }

  void set(int64_t table, int64_t candidate, const int64_t* groups, const int64_t* ranks,
           const double* amounts, int64_t count) {
    Placed placed{candidate, {}, {}};
    const int32_t span = p_.scope[candidate] == kNodes ? node_size_ : 1;
    for (int64_t i = 0; i < count; i += span) {
      placed.units.push_back({static_cast<int32_t>(table), static_cast<int32_t>(groups[i]),
                              static_cast<int32_t>(ranks[i] / span), span, 0, static_cast<int32_t>(i)});
      // A piece on a whole node takes the ranks of the node in order.
      for (int32_t j = 0; j < span; ++j) placed.amounts.push_back(amounts[i + j]);
    }
    tables_[table] = std::move(placed);
    change(table, 1.0);
    track(table, true);
  }

 protected:
  double exact() const {
    double total = common_;
    for (int k = 0; k < p_.num_phases; ++k) {
      double most = 0;
      for (const auto& load : load_) most = std::max(most, load[k]);
      total += most;
    }
    return total;
  }

  double smooth() const {
    double total = common_;
    for (double norm : norms(sum_)) total += norm;
    return total;
  }

  void set_exponent(int exponent) {
    exponent_ = exponent;
    for (int k = 0; k < kPhases; ++k) {
      double most = 0, largest = 0;
      for (const auto& load : load_) most = std::max(most, load[k]);
      for (const auto& load : group_load_) largest = std::max(largest, load[k]);
      // Loads are divided by the largest one, so their powers do not overflow.
      // The lower bound avoids a division by 0 in a phase without load.
      size_[k] = std::max(most, 1e-3 * largest + 1e-30);
      scale_[k] = 1 / size_[k];
    }
    refresh();
  }

  // Computes all loads again, which removes accumulated rounding errors.
  void rebuild() {
    std::fill(load_.begin(), load_.end(), Load{});
    std::fill(bytes_.begin(), bytes_.end(), 0.0);
    common_ = common_bytes_ = 0;
    for (size_t table = 0; table < tables_.size(); ++table) change(table, 1.0);
    refresh();
  }

  void refresh() {
    sum_ = {};
    for (int64_t rank = 0; rank < num_ranks_; ++rank) {
      power_[rank] = raised(load_[rank]);
      for (int k = 0; k < kPhases; ++k) sum_[k] += power_[rank][k];
    }
    update_weights();
  }

  void update_weights() {
    norm_ = norms(sum_);
    // The derivative of a norm by its sum of powers. shifted() and cost_at() use it for a first-order change
    // of the objective.
    for (int k = 0; k < kPhases; ++k) weight_[k] = norm_[k] / (std::max(sum_[k], 1e-9) * exponent_);
  }

  // The exponent is a power of two, so the root is a few square roots.
  // And exact on every machine, which pow need not be.
  Load norms(const Load& sum) const {
    Load value;
    for (int k = 0; k < kPhases; ++k) value[k] = std::max(sum[k], 0.0) / num_ranks_;
    for (int doubled = 1; doubled < exponent_; doubled *= 2)
      for (int k = 0; k < kPhases; ++k) value[k] = std::sqrt(value[k]);
    for (int k = 0; k < kPhases; ++k) value[k] *= size_[k];
    return value;
  }

  Load raised(const Load& load) const {
    Load value;
    for (int k = 0; k < kPhases; ++k) value[k] = load[k] * scale_[k];
    for (int doubled = 1; doubled < exponent_; doubled *= 2)
      for (int k = 0; k < kPhases; ++k) value[k] *= value[k];
    return value;
  }

  Load load_of(int64_t group, double amount) const {
    Load value;
    for (int k = 0; k < kPhases; ++k)
      value[k] = group_fixed_[group][k] + amount * (group_load_[group][k] - group_fixed_[group][k]);
    return value;
  }

  double bytes_of(int64_t group, double amount) const {
    return p_.fixed_bytes[group] + amount * (p_.bytes[group] - p_.fixed_bytes[group]);
  }

  // Adds (or subtracts) the loads of a table. The caller updates the powers.
  void change(int64_t table, double sign) {
    const Placed& placed = tables_[table];
    common_ += sign * p_.common[placed.candidate];
    common_bytes_ += sign * p_.common_bytes[placed.candidate];
    for (const Unit& unit : placed.units)
      for (int32_t i = 0; i < unit.span; ++i) {
        const int64_t rank = static_cast<int64_t>(unit.place) * unit.span + i;
        const double amount = placed.amounts[unit.amounts + i];
        const Load load = load_of(unit.group, amount);
        for (int k = 0; k < kPhases; ++k) load_[rank][k] += sign * load[k];
        bytes_[rank] += sign * bytes_of(unit.group, amount);
      }
  }

  void settle_powers_of(int64_t table) {
    for (const Unit& unit : tables_[table].units)
      for (int32_t i = 0; i < unit.span; ++i) settle_powers(static_cast<int64_t>(unit.place) * unit.span + i);
  }

  void settle_powers(int64_t rank) {
    const Load value = raised(load_[rank]);
    // Rounding errors must not make the sum negative.
    for (int k = 0; k < kPhases; ++k) sum_[k] = std::max(sum_[k] + value[k] - power_[rank][k], 0.0);
    power_[rank] = value;
  }

  struct Shifted {
    Load load, power;
  };

  double shifted(int64_t rank, const Load& gain, double sign, Shifted& result) const {
    for (int k = 0; k < kPhases; ++k) result.load[k] = load_[rank][k] + sign * gain[k];
    result.power = raised(result.load);
    double change = 0;
    for (int k = 0; k < kPhases; ++k) change += weight_[k] * (result.power[k] - power_[rank][k]);
    return change;
  }

  void adopt(int64_t rank, const Shifted& shifted, double bytes) {
    for (int k = 0; k < kPhases; ++k) sum_[k] = std::max(sum_[k] + shifted.power[k] - power_[rank][k], 0.0);
    load_[rank] = shifted.load;
    power_[rank] = shifted.power;
    bytes_[rank] += bytes;
  }

  // Adds the pieces of a table to the lists by rank, or removes them.
  void track(int64_t table, bool enter) {
    auto& units = tables_[table].units;
    for (size_t index = 0; index < units.size(); ++index) {
      Unit& unit = units[index];
      if (enter)
        list(unit, index);
      else
        unlist(unit);
      for (int32_t i = 0; i < unit.span; ++i)
        holds_[table * num_ranks_ + static_cast<int64_t>(unit.place) * unit.span + i] = enter;
    }
  }

  double* amounts(const Unit& unit) { return tables_[unit.table].amounts.data() + unit.amounts; }

  bool may_use(int64_t table, int64_t place, int32_t span) const {
    const int64_t masks = p_.allowed.tensor.numel();
    for (int32_t i = 0; i < span; ++i) {
      const int64_t rank = place * span + i;
      if (holds_[table * num_ranks_ + rank]) return false;
      if (masks && !p_.allowed[p_.type[table] * num_ranks_ + rank]) return false;
    }
    return true;
  }

  void relocate(Unit& unit, int64_t place) {
    const size_t index = &unit - tables_[unit.table].units.data();
    unlist(unit);
    uint8_t* const holds = holds_.data() + unit.table * num_ranks_;
    for (int32_t i = 0; i < unit.span; ++i) holds[static_cast<int64_t>(unit.place) * unit.span + i] = 0;
    unit.place = static_cast<int32_t>(place);
    for (int32_t i = 0; i < unit.span; ++i) holds[place * unit.span + i] = 1;
    list(unit, index);
  }

  using Entry = std::pair<int32_t, int32_t>;  // table, index of the unit

  void list(Unit& unit, size_t index) {
    auto& entries = on_rank_[static_cast<int64_t>(unit.place) * unit.span];
    unit.on_rank = static_cast<int32_t>(entries.size());
    entries.push_back({unit.table, static_cast<int32_t>(index)});
  }

  void unlist(const Unit& unit) {
    auto& entries = on_rank_[static_cast<int64_t>(unit.place) * unit.span];
    // Moves the last entry to the gap, and tells its unit the new position: constant time.
    const Entry last = entries.back();
    entries[unit.on_rank] = last;
    tables_[last.first].units[last.second].on_rank = unit.on_rank;
    entries.pop_back();
  }

  const Problem& p_;
  const int64_t num_ranks_, node_size_;
  // By rank. power_: `raised` loads as of the last settle; sum_: their sum over ranks.
  std::vector<Load> load_ = std::vector<Load>(num_ranks_, Load{}), power_ = load_;
  std::vector<double> bytes_ = std::vector<double>(num_ranks_, 0.0);
  std::vector<std::vector<Entry>> on_rank_ = std::vector<std::vector<Entry>>(num_ranks_);
  std::vector<Placed> tables_ = std::vector<Placed>(p_.type.tensor.numel());
  // [tables, ranks]: whether a rank has a piece of the table.
  std::vector<uint8_t> holds_;
  std::vector<Load> group_load_, group_fixed_;
  // size_: load that counts as 1; scale_: its inverse. Both change only in set_exponent.
  Load scale_{}, size_{}, sum_{}, norm_{}, weight_{};
  double common_ = 0, common_bytes_ = 0;
  int exponent_ = 1;
};

}  // namespace meshrec::planning
