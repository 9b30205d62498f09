// Simulated annealing for sharding plans. src/meshrec/ops/planning.py documents arguments and results.
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <limits>
#include <tuple>
#include <vector>

#include "planner/plan_state.h"
#include "stable_abi.h"

namespace meshrec {

namespace {

using namespace planning;

constexpr int kLevels = 64;            // number of temperatures
constexpr int kMaxDoublings = 4;       // how often the exponent of the norm doubles
constexpr int kMaxFirstExponent = 64;  // maximum initial exponent
constexpr int kMaxExponent = 256;
constexpr int kMaxRemoved = 5;       // maximum number of tables removed and placed again together
constexpr double kSwapShare = 0.05;  // share of moves that exchange two tables
// Above -log(2^-53) = 36.7, the largest value that accepts() can draw: a worse change is rejected without a
// logarithm.
constexpr double kLargestLog = 37.0;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Annealer : public PlanState {
 public:
  Annealer(const Problem& problem, int64_t num_ranks, int64_t node_size, double memory_cap,
           double place_share, uint64_t seed)
      : PlanState(problem, num_ranks, node_size), cap_(memory_cap), random_(seed), place_share_(place_share) {
    for (int64_t candidate = 0; candidate < p_.shape.tensor.numel(); ++candidate)
      num_shapes_ = std::max(num_shapes_, p_.shape[candidate] + 1);
    const int64_t types = p_.choice_start.tensor.numel() - 1;
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

  // Anneals until max_work or the time limit is reached. Returns the work done: the number of rank loads
  // computed.
  int64_t run(int64_t max_work, double seconds, double hot, double cold, int exponent) {
    const auto start = std::chrono::steady_clock::now();
    best_ = exact();
    best_tables_ = tables_;
    const double scale = best_ / num_ranks_;
    int steps = 1;
    while (steps <= kMaxDoublings && exponent << steps <= kMaxExponent) ++steps;
    for (int level = 0; level < kLevels; ++level) {
      const double at = static_cast<double>(level) / (kLevels - 1);
      // The objective is a sum of power means over ranks, one per phase. As p rises, it approaches the exact
      // objective, the sum of the maxima.
      // The first exponents are low, because the split of tables is settled while the norm sees all ranks.
      set_exponent(exponent << (level * steps / kLevels));
      // Temperatures are relative to the initial objective, divided by the number of ranks. The last level
      // accepts only improvements.
      temperature_ = level == kLevels - 1 ? 0.0 : hot * std::pow(cold / hot, at) * scale;
      const int64_t end = max_work * (level + 1) / kLevels;
      const double late = seconds * (level + 1) / kLevels;  // if time runs short, cools down faster
      for (int64_t moves = 0; work_ < end; ++moves) {
        // Not at every move, because reading the clock takes time as well.
        if (moves % 1024 == 0 && passed(start) >= late) break;
        move();
      }
      rebuild();
      // The margin ignores differences due to rounding.
      if (const double now = exact(); now < best_ * (1 - 1e-12)) {
        best_ = now;
        best_tables_ = tables_;
      }
      if (passed(start) >= seconds) break;
    }
    return work_;
  }

  const std::vector<Placed>& best_tables() const { return best_tables_; }
  double best() const { return best_; }

 private:
  static double passed(std::chrono::steady_clock::time_point start) {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

  void move() {
    if (random_.uniform() < kSwapShare) return swap_roles();
    const int64_t kind = random_.below(16);
    // These moves look at all ranks, so with many ranks they would take nearly all of the work.
    if (kind == 0 && place_work_ < place_share_ * work_) {
      // Adds the work of this move: minus the work before, plus the work after.
      place_work_ -= work_;
      2 * few_work_ < place_share_* work_ ? reinsert_few_tables() : reinsert_table();
      place_work_ += work_;
    } else if (kind <= 3)
      transfer();
    else
      exchange(kind <= 7);
  }

  bool accepts(double change) {
    if (change < 0 || !(temperature_ > 0)) return change < 0;
    const double left = 1.0 - random_.uniform();  // at least 2^-53
    return change < kLargestLog * temperature_ && change < -temperature_ * std::log(left);
  }

  // Picks a random rank, or the slowest rank in some phase (as of a while ago).
  int64_t some_rank() {
    if (random_.below(2) == 0) return random_.below(num_ranks_);
    const int64_t phase = random_.below(p_.num_phases);
    if (hot_age_[phase]-- <= 0) {
      // Finding the slowest rank reads all ranks, so the result is used for some more draws.
      hot_age_[phase] = num_ranks_ / 64;
      int64_t hottest = 0;
      for (int64_t rank = 1; rank < num_ranks_; ++rank)
        if (load_[rank][phase] > load_[hottest][phase]) hottest = rank;
      hot_[phase] = hottest;
    }
    return hot_[phase];
  }

  Unit* some_unit(int64_t rank) {
    const auto& entries = on_rank_[rank];
    if (entries.empty()) return nullptr;
    const Entry& entry = entries[random_.below(entries.size())];
    return &tables_[entry.first].units[entry.second];
  }

  // Moves a piece to another rank or node, or exchanges it with a piece there.
  void exchange(bool alone) {
    Unit* const one = some_unit(some_rank());
    work_ += 1;
    // The pieces of such a table must stay on a single node; only the moves that place whole tables move
    // them.
    if (one == nullptr || p_.scope[tables_[one->table].candidate] == kOneNode) return;
    Unit* other = nullptr;
    int64_t target = random_.below(num_ranks_ / one->span);
    if (!alone) {
      other = some_unit(target * one->span);
      if (other != nullptr &&
          (other->span != one->span || p_.scope[tables_[other->table].candidate] == kOneNode))
        return;
    }
    const int64_t source = one->place;
    if (target == source || !may_use(one->table, target, one->span)) return;
    if (other != nullptr && !may_use(other->table, source, one->span)) return;
    const int32_t span = one->span;
    work_ += 2 * span;
    if (static_cast<int64_t>(new_.size()) < 2 * span) new_.resize(2 * span);
    const double room = cap_ - common_bytes_;
    double change = 0;
    for (int32_t i = 0; i < span; ++i) {
      const double mine = amounts(*one)[i], its = other ? amounts(*other)[i] : 0.0;
      Load gain = load_of(one->group, mine);
      double bytes = bytes_of(one->group, mine);
      if (other) {
        const Load back = load_of(other->group, its);
        for (int k = 0; k < kPhases; ++k) gain[k] -= back[k];
        bytes -= bytes_of(other->group, its);
      }
      const int64_t from = source * span + i, to = target * span + i;
      if (bytes_[to] + bytes > room && bytes > 0) return;
      // A rank may already exceed the limit: moves that do not add bytes to it are still allowed.
      if (bytes_[from] - bytes > room && bytes < 0) return;
      change += shifted(from, gain, -1.0, new_[2 * i]) + shifted(to, gain, 1.0, new_[2 * i + 1]);
    }
    if (!accepts(change)) return;
    for (int32_t i = 0; i < span; ++i) {
      const double mine = amounts(*one)[i], its = other ? amounts(*other)[i] : 0.0;
      const double bytes = bytes_of(one->group, mine) - (other ? bytes_of(other->group, its) : 0.0);
      adopt(source * span + i, new_[2 * i], -bytes);
      adopt(target * span + i, new_[2 * i + 1], bytes);
    }
    relocate(*one, target);
    if (other) relocate(*other, source);
    update_weights();
  }

  // Moves rows from a part of a table to another part.
  void transfer() {
    Unit* const one = some_unit(some_rank());
    work_ += 1;
    if (one == nullptr) return;
    Placed& placed = tables_[one->table];
    if (!p_.uneven[placed.candidate] || placed.amounts.size() < 2) return;
    const size_t from = one->amounts + random_.below(one->span), to = random_.below(placed.amounts.size());
    if (from == to) return;
    const double amount = placed.amounts[from] * random_.uniform() * (random_.below(2) ? 0.5 : 0.05);
    // Amounts are relative to an even part.
    if (placed.amounts[from] - amount < p_.least[one->group]) return;
    const Unit& other = placed.units[to / one->span];
    const int64_t source = static_cast<int64_t>(one->place) * one->span + (from - one->amounts);
    const int64_t target = static_cast<int64_t>(other.place) * other.span + (to - other.amounts);
    const double bytes = amount * (p_.bytes[one->group] - p_.fixed_bytes[one->group]);
    if (bytes_[target] + bytes > cap_ - common_bytes_) return;
    Load gain;
    for (int k = 0; k < kPhases; ++k)
      gain[k] = amount * (group_load_[one->group][k] - group_fixed_[one->group][k]);
    work_ += 2;
    Shifted less, more;
    if (!accepts(shifted(source, gain, -1.0, less) + shifted(target, gain, 1.0, more))) return;
    adopt(source, less, -bytes);
    adopt(target, more, bytes);
    placed.amounts[from] -= amount;
    placed.amounts[to] += amount;
    update_weights();
  }

  // Splits a table in another way (or the same), and puts each piece where it costs least.
  void reinsert_table() {
    int64_t table = random_.below(tables_.size());
    if (random_.below(2))
      if (const Unit* const unit = some_unit(some_rank())) table = unit->table;
    const int64_t kind = p_.type[table], first = p_.choice_start[kind];
    const int64_t choice = first + random_.below(p_.choice_start[kind + 1] - first);
    removed_.clear();
    const double before = smooth();
    remove(table);
    Trial trial = tried(table, p_.choices[choice]);
    if (trial.objective < kInfinity && accepts(trial.objective - before)) {
      insert(table, std::move(trial.placed));
      return;
    }
    restore();
  }

  // Removes a few tables, then places them again in turn, with the cheapest split and ranks.
  void reinsert_few_tables() {
    removed_.clear();
    few_work_ -= work_;
    const double before = smooth();
    for (int64_t left = 2 + random_.below(kMaxRemoved - 1); left > 0; --left) {
      int64_t table = random_.below(tables_.size());
      if (random_.below(4))
        if (const Unit* const unit = some_unit(some_rank())) table = unit->table;
      if (!is_removed(table)) remove(table);
    }
    if (!place_removed() || !accepts(smooth() - before)) restore();
    few_work_ += work_;
  }

  bool place_removed() {
    const bool all = random_.below(2);
    for (const auto& removed : removed_) {
      const int64_t table = removed.first, kind = p_.type[table];
      Trial best;
      for (int64_t choice = p_.choice_start[kind]; choice < p_.choice_start[kind + 1]; ++choice) {
        // Half of the calls try only a quarter of the candidates, to save work.
        if (!all && random_.below(4)) continue;
        Trial trial = tried(table, p_.choices[choice]);
        if (trial.objective < best.objective) best = std::move(trial);
      }
      if (!(best.objective < kInfinity)) return false;
      insert(table, std::move(best.placed));
    }
    return true;
  }

  // Exchanges the shapes and ranks of two tables with the same number of columns. When ranks are nearly full
  // in a phase, single pieces hardly move any more; this move leaves the largest loads unchanged.
  void swap_roles() {
    int64_t rank = some_rank();
    if (random_.below(2))
      rank -= rank % node_size_;  // pieces on whole nodes are listed only at the first rank
    const Unit* const unit = some_unit(rank);
    work_ += 1;
    if (unit == nullptr) return;
    const int64_t one = unit->table;
    const auto& others = of_columns_[p_.columns[p_.type[one]]];
    const int64_t other = others[random_.below(others.size())];
    const int64_t next_one = shaped(one, other), next_other = shaped(other, one);
    if (one == other || tables_[one].candidate == next_one || next_one < 0 || next_other < 0) return;
    const Placed role_of_one = tables_[one], role_of_other = tables_[other];
    removed_.clear();
    const double before = smooth();
    remove(one);
    remove(other);
    work_ += 2 * (role_of_one.amounts.size() + role_of_other.amounts.size());
    if (!take_role(one, next_one, role_of_other) || !take_role(other, next_other, role_of_one) ||
        !accepts(smooth() - before))
      restore();
  }

  // Finds the candidate for a table that has the shape of another table; -1 if there is none.
  int64_t shaped(int64_t table, int64_t other) const {
    return shaped_[p_.type[table] * num_shapes_ + p_.shape[tables_[other].candidate]];
  }

  // Puts a table where another table is; returns false if that is impossible.
  bool take_role(int64_t table, int64_t candidate, Placed role) {
    // Equal shapes have the same pieces, so their group numbers differ by a constant.
    const int64_t shift = p_.piece_start[candidate] - p_.piece_start[role.candidate];
    const double room = cap_ - common_bytes_ - p_.common_bytes[candidate];
    if (*std::max_element(bytes_.begin(), bytes_.end()) > room) return false;
    role.candidate = candidate;
    for (Unit& unit : role.units) {
      unit.table = static_cast<int32_t>(table);
      unit.group = static_cast<int32_t>(unit.group + shift);
      if (unit.group >= p_.piece_start[candidate + 1] || !may_use(table, unit.place, unit.span)) return false;
      double* const sizes = role.amounts.data() + unit.amounts;
      // The other table may have unequal parts, which this candidate does not allow.
      if (!p_.uneven[candidate]) std::fill(sizes, sizes + unit.span, 1.0);
      if (p_.uneven[candidate] && unit.span > 1) level(unit, sizes);
      for (int32_t i = 0; i < unit.span; ++i)
        if (sizes[i] < p_.least[unit.group] ||
            bytes_[static_cast<int64_t>(unit.place) * unit.span + i] + bytes_of(unit.group, sizes[i]) > room)
          return false;
    }
    insert(table, std::move(role));
    return true;
  }

  // Divides the rows in a piece among the ranks of a node, so the ranks are equally loaded in the phase
  // to which the piece adds most.
  void level(const Unit& unit, double* sizes) const {
    Load slope = load_of(unit.group, 1.0);
    for (int k = 0; k < kPhases; ++k) slope[k] -= group_fixed_[unit.group][k];
    int64_t phase = 0;
    for (int k = 1; k < kPhases; ++k)
      if (slope[k] * scale_[k] > slope[phase] * scale_[phase]) phase = k;
    if (!(slope[phase] > 0)) return;
    const double least = p_.least[unit.group];
    const Load* const below = load_.data() + static_cast<int64_t>(unit.place) * unit.span;
    // Water filling: all ranks rise to a common height, except those already above it, which get the minimum.
    // Every turn excludes more ranks and lowers the height, until none is left to exclude.
    double total = 0, height = kInfinity;
    for (int32_t i = 0; i < unit.span; ++i) total += sizes[i];
    for (bool is_settled = false; !is_settled;) {
      double sum = total;
      int32_t count = 0;
      for (int32_t i = 0; i < unit.span; ++i) {
        const double its = below[i][phase] / slope[phase];
        const bool has_more = its + least < height;
        sum += has_more ? its : -least;
        count += has_more;
      }
      is_settled = count == 0 || sum / count >= height;
      if (!is_settled) height = sum / count;
    }
    for (int32_t i = 0; i < unit.span; ++i)
      sizes[i] = std::max(least, height - below[i][phase] / slope[phase]);
  }

  bool is_removed(int64_t table) const {
    for (const auto& removed : removed_)
      if (removed.first == table) return true;
    return false;
  }

  void remove(int64_t table) {
    track(table, false);
    change(table, -1.0);
    settle_powers_of(table);
    removed_.push_back({table, std::move(tables_[table])});
    tables_[table] = Placed{-1, {}, {}};
    update_weights();
  }

  void insert(int64_t table, Placed placed) {
    tables_[table] = std::move(placed);
    change(table, 1.0);
    settle_powers_of(table);
    track(table, true);
    update_weights();
  }

  // Puts the removed tables back.
  void restore() {
    for (const auto& removed : removed_) {
      const int64_t table = removed.first;
      if (tables_[table].candidate < 0) continue;
      track(table, false);
      change(table, -1.0);
      settle_powers_of(table);
    }
    for (auto& removed : removed_) insert(removed.first, std::move(removed.second));
  }

  struct Trial {
    double objective = kInfinity;
    Placed placed;
  };

  // Places the even pieces of a table where they cost least, as a trial. Returns the positions and the
  // resulting `smooth`; infinite if the table fits nowhere.
  Trial tried(int64_t table, int64_t candidate) {
    Trial trial;
    trial.placed.candidate = candidate;
    const int64_t scope = p_.scope[candidate];
    const double room = cap_ - common_bytes_ - p_.common_bytes[candidate];
    if (*std::max_element(bytes_.begin(), bytes_.end()) > room) return trial;
    const int32_t span = scope == kNodes ? node_size_ : 1;
    int64_t begin = 0, end = num_ranks_ / span;
    if (scope == kOneNode) {
      begin = random_.below(num_ranks_ / node_size_) * node_size_;
      end = begin + node_size_;
    }
    // Two pieces of a table must not be on the same rank.
    std::fill(taken_.begin(), taken_.end(), 0);
    Load sum = sum_;
    for (int64_t group = p_.piece_start[candidate]; group < p_.piece_start[candidate + 1]; ++group) {
      work_ += (end - begin) * span;
      for (int64_t place = begin; place < end; ++place)
        cost_[place] = taken_[place] ? kInfinity : cost_at(table, group, place, span, room);
      for (int64_t piece = 0; piece < p_.count[group]; ++piece) {
        const int64_t best = std::min_element(cost_.begin() + begin, cost_.begin() + end) - cost_.begin();
        if (!(cost_[best] < kInfinity)) return trial;
        cost_[best] = kInfinity;
        taken_[best] = 1;
        for (int32_t i = 0; i < span; ++i) {
          const int64_t rank = best * span + i;
          Load load = load_[rank];
          for (int k = 0; k < kPhases; ++k) load[k] += group_load_[group][k];
          load = raised(load);
          for (int k = 0; k < kPhases; ++k) sum[k] += load[k] - power_[rank][k];
        }
        auto& amounts = trial.placed.amounts;
        trial.placed.units.push_back({static_cast<int32_t>(table), static_cast<int32_t>(group),
                                      static_cast<int32_t>(best), span, 0,
                                      static_cast<int32_t>(amounts.size())});
        amounts.insert(amounts.end(), span, 1.0);
      }
    }
    trial.objective = common_ + p_.common[candidate];
    for (double norm : norms(sum)) trial.objective += norm;
    return trial;
  }

  double cost_at(int64_t table, int64_t group, int64_t place, int32_t span, double room) const {
    const int64_t masks = p_.allowed.tensor.numel();
    double cost = 0;
    for (int32_t i = 0; i < span; ++i) {
      const int64_t rank = place * span + i;
      if (bytes_[rank] + p_.bytes[group] > room) return kInfinity;
      if (masks && !p_.allowed[p_.type[table] * num_ranks_ + rank]) return kInfinity;
      Load load;
      for (int k = 0; k < kPhases; ++k) load[k] = load_[rank][k] + group_load_[group][k];
      load = raised(load);
      for (int k = 0; k < kPhases; ++k) cost += weight_[k] * (load[k] - power_[rank][k]);
    }
    return cost;
  }

  const double cap_;
  Random random_;
  const double place_share_;
  double temperature_ = 0;
  int64_t work_ = 0, num_shapes_ = 0;
  std::vector<int64_t> shaped_;  // candidate by type and shape
  std::vector<std::vector<int64_t>> of_columns_;
  std::array<int64_t, kPhases> hot_{}, hot_age_{};
  std::vector<double> cost_ = std::vector<double>(num_ranks_, 0.0);
  std::vector<Placed> best_tables_;
  std::vector<std::pair<int64_t, Placed>> removed_;
  std::vector<uint8_t> taken_ = std::vector<uint8_t>(num_ranks_, 0);
  std::vector<Shifted> new_;
  double best_ = 0;
  int64_t few_work_ = 0, place_work_ = 0;
};

template <class T>
Tensor vector_to_tensor(const std::vector<T>& values, ScalarType type) {
  const int64_t size = static_cast<int64_t>(values.size());
  Tensor result = torch::stable::empty(torch::headeronly::IntHeaderOnlyArrayRef(&size, 1), type);
  std::copy(values.begin(), values.end(), result.mutable_data_ptr<T>());
  return result;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> plan_anneal(
    std::vector<Tensor> problem_tensors, const Tensor& candidates, const Tensor& starts, const Tensor& groups,
    const Tensor& ranks, const Tensor& amounts, int64_t num_ranks, int64_t node_size, double memory_cap,
    int64_t max_work, double seconds, double hot, double cold, double place_share, int64_t exponent,
    int64_t seed) {
  if (problem_tensors.size() != 17)
    fail("plan_anneal: the problem has 17 tensors, got ", problem_tensors.size());
  if (exponent < 1 || exponent > kMaxFirstExponent || (exponent & (exponent - 1)) != 0)
    fail("plan_anneal: the exponent is a power of two up to ", kMaxFirstExponent, ", got ", exponent);
  const Problem problem(problem_tensors);
  Annealer annealer(problem, num_ranks, node_size, memory_cap, place_share, seed);
  const Ints candidate(candidates), start(starts), group(groups), rank(ranks);
  const Doubles amount(amounts);
  for (int64_t table = 0; table < candidates.numel(); ++table) {
    const int64_t first = start[table];
    annealer.set(table, candidate[table], group.data + first, rank.data + first, amount.data + first,
                 start[table + 1] - first);
  }
  const int64_t work = annealer.run(max_work, seconds, hot, cold, static_cast<int>(exponent));
  std::vector<int64_t> new_candidates, new_starts{0}, new_groups, new_ranks;
  std::vector<double> new_amounts;
  for (const Placed& placed : annealer.best_tables()) {
    new_candidates.push_back(placed.candidate);
    for (const Unit& unit : placed.units)
      for (int32_t i = 0; i < unit.span; ++i) {
        new_groups.push_back(unit.group);
        new_ranks.push_back(static_cast<int64_t>(unit.place) * unit.span + i);
        new_amounts.push_back(placed.amounts[unit.amounts + i]);
      }
    new_starts.push_back(new_groups.size());
  }
  const std::vector<double> figures{annealer.best(), static_cast<double>(work)};
  return {vector_to_tensor(new_candidates, ScalarType::Long), vector_to_tensor(new_starts, ScalarType::Long),
          vector_to_tensor(new_groups, ScalarType::Long),     vector_to_tensor(new_ranks, ScalarType::Long),
          vector_to_tensor(new_amounts, ScalarType::Double),  vector_to_tensor(figures, ScalarType::Double)};
}

}  // namespace

}  // namespace meshrec

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) { m.impl("plan_anneal", TORCH_BOX(&meshrec::plan_anneal)); }
