// Moves of several pieces at once that leave the largest load of ranks as it is. Where ranks are nearly full
// in one phase, single pieces hardly move any more.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "planner/plan_state.h"

namespace meshrec::planning {

class PlanMoves : public PlanState {
 public:
  PlanMoves(const Problem& problem, int64_t num_ranks, int64_t node_size, double memory_cap, uint64_t seed)
      : PlanState(problem, num_ranks, node_size), cap_(memory_cap), random_(seed) {
    const int64_t types = p_.choice_start.tensor.numel() - 1;
    whole_.assign(num_shapes_, -1);
    for (int64_t shape = 0; shape < num_shapes_; ++shape)
      if (p_.halved[shape] >= 0) whole_[p_.halved[shape]] = shape;
    shaped_.assign(types * num_shapes_, -1);
    for (int64_t type = 0; type < types; ++type)
      for (int64_t choice = p_.choice_start[type]; choice < p_.choice_start[type + 1]; ++choice)
        shaped_[type * num_shapes_ + p_.shape[p_.choices[choice]]] = p_.choices[choice];
    for (size_t table = 0; table < tables_.size(); ++table) {
      const size_t columns = p_.columns[p_.type[table]];
      if (of_columns_.size() <= columns) of_columns_.resize(columns + 1);
      of_columns_[columns].push_back(table);
    }
  }

 protected:
  bool accepts(double change) {
    if (change < 0 || !(temperature_ > 0)) return change < 0;
    const double left = 1.0 - random_.uniform();  // 2^-53 at least
    return change < kLargestLog * temperature_ && change < -temperature_ * std::log(left);
  }

  int64_t some_rank() {
    if (random_.below(2) == 0) return random_.below(num_ranks_);
    const int64_t phase = random_.below(p_.num_phases);
    if (hot_age_[phase]-- <= 0) {
      hot_age_[phase] = num_ranks_ / 64;
      int64_t hottest = 0;
      for (int64_t rank = 1; rank < num_ranks_; ++rank)
        if (load_[rank][phase] > load_[hottest][phase]) hottest = rank;
      hot_[phase] = hottest;
    }
    return hot_[phase];
  }

  Unit* some_unit(int64_t rank) {
    auto& entries = on_rank_[rank];
    return entries.empty() ? nullptr : &unit_of(entries[random_.below(entries.size())]);
  }

  void move_several() {
    int64_t rank = some_rank();
    if (random_.below(2)) rank -= rank % node_size_;  // Pieces of whole nodes are listed there.
    Unit* const one = some_unit(rank);
    work_ += 1;
    if (one == nullptr) return;
    switch (random_.below(3)) {
      case 0:
        return swap_roles(one->table);
      case 1:
        return exchange_for_several(*one);
      default:
        return random_.below(2) ? split(*one) : join(*one);
    }
  }

 private:
  struct Change {
    int64_t rank;
    Load load;
    double bytes;
    Shifted shifted;
  };

  Unit& unit_of(const Entry& entry) { return tables_[entry.first].units[entry.second]; }

  // The type's candidate of a shape, or -1.
  int64_t shaped(int64_t table, int64_t shape) const {
    return shape < 0 ? -1 : shaped_[p_.type[table] * num_shapes_ + shape];
  }

  int64_t shape_of(int64_t table) const { return p_.shape[tables_[table].candidate]; }

  bool may_move(const Unit& unit) const { return p_.scope[tables_[unit.table].candidate] != kOneNode; }

  // Loads in the phase where they are largest.
  double largest(int64_t group) const {
    return group_load_[group][std::max_element(norm_.begin(), norm_.end()) - norm_.begin()];
  }

  static bool alike(double one, double other) {
    return std::abs(one - other) <= kTolerance * std::max(one, other);
  }

  // Two tables of as many columns take each other's shape and places.
  void swap_roles(int64_t one) {
    const auto& others = of_columns_[p_.columns[p_.type[one]]];
    const int64_t other = others[random_.below(others.size())];
    if (shape_of(one) == shape_of(other)) return;
    Placed next_one, next_other;
    if (!cast(one, tables_[other], next_one) || !cast(other, tables_[one], next_other)) return;
    note_gone(tables_[one]);
    note_gone(tables_[other]);
    note_come(next_one);
    note_come(next_other);
    if (!commit()) return;
    track(one, false);
    track(other, false);
    tables_[one] = std::move(next_one);
    tables_[other] = std::move(next_other);
    track(one, true);
    track(other, true);
  }

  // `next`: the table in another's shape and places; false where it cannot be.
  bool cast(int64_t table, const Placed& role, Placed& next) const {
    const int64_t candidate = shaped(table, p_.shape[role.candidate]);
    if (candidate < 0 || role.units.empty()) return false;
    const int64_t shift = p_.piece_start[candidate] - p_.piece_start[role.candidate];
    for (const Unit& unit : role.units) {
      const int64_t group = unit.group + shift;
      if (group >= p_.piece_start[candidate + 1] || p_.count[group] != p_.count[unit.group] ||
          !may_use(table, unit.place, unit.span))
        return false;
    }
    next = role;
    next.candidate = candidate;
    for (Unit& unit : next.units) {
      unit.table = static_cast<int32_t>(table);
      unit.group = static_cast<int32_t>(unit.group + shift);
      for (int32_t i = 0; i < unit.span; ++i) {
        double& amount = next.amounts[unit.amounts + i];
        if (!p_.uneven[candidate])
          amount = 1.0;
        else if (amount < p_.least[unit.group])
          return false;
      }
    }
    return true;
  }

  // Exchanges a piece with several of another place that have the same largest load together.
  void exchange_for_several(Unit& one) {
    const int64_t target = random_.below(num_ranks_ / one.span), source = one.place;
    if (!may_move(one) || !may_use(one.table, target, one.span)) return;
    const auto& entries = on_rank_[target * one.span];
    double left = largest(one.group);
    const double tolerance = kTolerance * left;
    picked_.clear();
    const size_t first = entries.empty() ? 0 : random_.below(entries.size());
    for (size_t i = 0; i < entries.size() && left > tolerance; ++i) {
      Unit& other = unit_of(entries[(first + i) % entries.size()]);
      const double its = largest(other.group);
      if (other.span != one.span || its > left + tolerance || !may_move(other) ||
          !may_use(other.table, source, one.span))
        continue;
      left -= its;
      picked_.push_back(&other);
    }
    if (picked_.size() < (one.span > 1 ? 1 : 2) || left > tolerance) return;
    picked_.push_back(&one);
    sizes_.clear();
    for (const Unit* unit : picked_) {
      note(*unit, amounts(*unit), unit->place, -1.0);
      sizes_.insert(sizes_.end(), amounts(*unit), amounts(*unit) + one.span);
    }
    double* sizes = sizes_.data();
    for (const Unit* unit : picked_) {
      const bool is_uneven = p_.uneven[tables_[unit->table].candidate];
      note_come(*unit, sizes, unit == &one ? target : source, is_uneven);
      sizes += one.span;
    }
    if (!commit()) return;
    sizes = sizes_.data();
    for (Unit* unit : picked_) {
      std::copy(sizes, sizes + one.span, amounts(*unit));
      sizes += one.span;
      relocate(*unit, unit == &one ? target : source);
    }
  }

  // Cuts a whole table into halves, one of them in the place of another piece, which takes the other's.
  void split(Unit& one) {
    const int64_t table = one.table, next = shaped(table, p_.halved[shape_of(table)]);
    const int64_t source = one.place, target = random_.below(num_ranks_);
    if (next < 0 || !may_use(table, target, 1)) return;
    Unit* const other = some_unit(target);
    if (other == nullptr || other->span != 1 || !may_move(*other) || !may_use(other->table, source, 1))
      return;
    const int64_t group = p_.piece_start[next];
    if (alike(largest(group), largest(other->group))) reshape(table, next, {source, target}, *other, source);
  }

  // The other way round: a table of halves becomes whole on one of its ranks.
  void join(Unit& one) {
    const int64_t table = one.table, next = shaped(table, whole_[shape_of(table)]);
    if (next < 0) return;
    const auto& units = tables_[table].units;
    const int64_t source = one.place, target = units[units[0].place == source].place;
    Unit* const other = some_unit(source);
    if (other->span != 1 || other->table == table || !may_move(*other) || !may_use(other->table, target, 1))
      return;
    if (alike(largest(one.group), largest(other->group))) reshape(table, next, {source}, *other, target);
  }

  // Another candidate for a table, with equal pieces on some ranks, while a piece of another table moves.
  void reshape(int64_t table, int64_t candidate, const std::vector<int64_t>& ranks, Unit& other, int64_t to) {
    Placed next{candidate, {}, std::vector<double>(ranks.size(), 1.0)};
    for (const int64_t rank : ranks)
      next.units.push_back({static_cast<int32_t>(table), static_cast<int32_t>(p_.piece_start[candidate]),
                            static_cast<int32_t>(rank), 1, 0, static_cast<int32_t>(next.units.size())});
    note_gone(tables_[table]);
    note_come(next);
    note(other, amounts(other), other.place, -1.0);
    note(other, amounts(other), to, 1.0);
    if (!commit()) return;
    track(table, false);
    relocate(other, to);
    tables_[table] = std::move(next);
    track(table, true);
  }

  void note_gone(const Placed& placed) {
    note_common(placed.candidate, -1.0);
    for (const Unit& unit : placed.units) note(unit, placed.amounts.data() + unit.amounts, unit.place, -1.0);
  }

  void note_come(Placed& placed) {
    note_common(placed.candidate, 1.0);
    for (const Unit& unit : placed.units)
      note_come(unit, placed.amounts.data() + unit.amounts, unit.place, p_.uneven[placed.candidate]);
  }

  void note_common(int64_t candidate, double sign) {
    more_common_ += sign * p_.common[candidate];
    more_common_bytes_ += sign * p_.common_bytes[candidate];
  }

  // Notes a piece that comes to a place. Over the ranks of a node its rows are shared out so that these come
  // out even in the phase where it weighs most.
  void note_come(const Unit& unit, double* sizes, int64_t place, bool is_uneven) {
    if (unit.span > 1 && is_uneven) level(unit, sizes, place);
    note(unit, sizes, place, 1.0);
  }

  void level(const Unit& unit, double* sizes, int64_t place) {
    Load weight;
    for (int k = 0; k < kPhases; ++k)
      weight[k] = (group_load_[unit.group][k] - group_fixed_[unit.group][k]) * scale_[k];
    const int64_t phase = std::max_element(weight.begin(), weight.end()) - weight.begin();
    const double slope = weight[phase] / scale_[phase], least = p_.least[unit.group];
    if (!(slope > 0)) return;
    double total = 0;
    below_.resize(unit.span);
    for (int32_t i = 0; i < unit.span; ++i) {
      const int64_t rank = place * unit.span + i;
      const double noted = change_of_[rank] < 0 ? 0.0 : changes_[change_of_[rank]].load[phase];
      below_[i] = (load_[rank][phase] + noted) / slope;
      total += sizes[i];
    }
    double height = kFar;
    for (bool is_settled = false; !is_settled;) {
      double sum = total;
      int32_t count = 0;
      for (const double below : below_) {
        const bool has_more = below + least < height;
        sum += has_more ? below : -least;
        count += has_more;
      }
      is_settled = count == 0 || sum / count >= height;
      if (!is_settled) height = sum / count;
    }
    for (int32_t i = 0; i < unit.span; ++i) sizes[i] = std::max(least, height - below_[i]);
  }

  void note(const Unit& unit, const double* sizes, int64_t place, double sign) {
    for (int32_t i = 0; i < unit.span; ++i) {
      const int64_t rank = place * unit.span + i;
      if (change_of_[rank] < 0) {
        change_of_[rank] = static_cast<int32_t>(changes_.size());
        changes_.push_back({rank, {}, 0.0, {}});
      }
      Change& change = changes_[change_of_[rank]];
      const Load load = load_of(unit.group, sizes[i]);
      for (int k = 0; k < kPhases; ++k) change.load[k] += sign * load[k];
      change.bytes += sign * bytes_of(unit.group, sizes[i]);
    }
  }

  // Takes on all that was noted, if it is accepted and fits.
  bool commit() {
    work_ += static_cast<int64_t>(changes_.size());
    const double room = cap_ - common_bytes_ - more_common_bytes_;
    double total = more_common_;
    bool fits = more_common_bytes_ <= 0 || *std::max_element(bytes_.begin(), bytes_.end()) <= room;
    for (Change& change : changes_) {
      change_of_[change.rank] = -1;
      fits = fits && (change.bytes <= 0 || bytes_[change.rank] + change.bytes <= room);
      total += shifted(change.rank, change.load, 1.0, change.shifted);
    }
    const bool is_taken = fits && accepts(total);
    if (is_taken) {
      for (const Change& change : changes_) adopt(change.rank, change.shifted, change.bytes);
      common_ += more_common_;
      common_bytes_ += more_common_bytes_;
      update_weights();
    }
    changes_.clear();
    more_common_ = more_common_bytes_ = 0;
    return is_taken;
  }

  static constexpr double kTolerance = 0.02, kFar = 1e300, kLargestLog = 37.0;

 protected:
  const double cap_;
  Random random_;
  double temperature_ = 0;
  int64_t work_ = 0;

 private:
  const int64_t num_shapes_ = p_.halved.tensor.numel();
  double more_common_ = 0, more_common_bytes_ = 0;
  std::vector<int64_t> whole_, shaped_;
  std::vector<std::vector<int64_t>> of_columns_;
  std::array<int64_t, kPhases> hot_{}, hot_age_{};
  std::vector<Unit*> picked_;
  std::vector<double> sizes_, below_;
  std::vector<Change> changes_;
  std::vector<int32_t> change_of_ = std::vector<int32_t>(num_ranks_, -1);
};

}  // namespace meshrec::planning
