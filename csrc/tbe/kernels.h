// The arguments of the inner loops of lookups and updates (kernels.inl). See isa/kernels.h for the rules.
#pragma once

#include <cstdint>

namespace meshrec {

// The types that can be trained; after them come the types that can only be looked up: codes of 8, 4 or 2
// bits.
enum WeightType : int { kFloat = 0, kHalf = 1, kBFloat16 = 2, kNumWeightTypes = 3 };
enum RowType : int { kCodes8 = kNumWeightTypes, kCodes4, kCodes2, kNumRowTypes };

// The optimizers' codes; formulas.inc is generated from ops/tbe/formulas.py.
enum Optimizer : int {
#define FORMULA(name, ...) k##name,
#include "formulas.inc"
#undef FORMULA
  kNumOptimizers
};

struct StateShape {
  int num_slots;
  bool per_row[2];
};
constexpr StateShape kStateShapes[] = {
#define FORMULA(name, num_slots, per_row0, per_row1) {num_slots, {per_row0, per_row1}},
#include "formulas.inc"
#undef FORMULA
};

enum WeightDecay : int { kNoDecay, kL2, kDecoupled };

// Pools the bags [0, num_bags) of one table: bag b holds ids[offsets[b] .. offsets[b + 1]).
struct PoolArgs {
  const void* weight;  // [num_rows, row_bytes]
  int64_t row_bytes;
  int64_t dim;
  const void* ids;
  const int64_t* offsets;       // absolute positions in ids
  const float* sample_weights;  // by position in ids, or null
  int64_t num_bags;
  int64_t end;  // of the table's ids: those after the bags' own are looked up soon
  bool mean;
  float* out;
  int64_t out_stride;
  bool past_caches;  // the output is too large to be still in a cache when it is read
  bool to_l1;        // prefetch rows to L1; otherwise to L2
};

// Copies one row per id: row i of `out` is row ids[i] of the table.
struct GatherArgs {
  const void* weight;
  int64_t row_bytes;
  int64_t dim;
  const void* ids;
  int64_t num_ids;
  float* out;  // [num_ids, dim]
};

// d(out) / d(sample weight): for each id, the dot product of its row and its bag's gradient.
struct DotArgs {
  const void* weight;
  int64_t dim;
  const void* ids;
  const int64_t* offsets;
  int64_t num_bags;
  bool mean;
  const float* grad;
  int64_t grad_stride;
  float* out;  // by position in ids
};

struct Pair {
  uint32_t row;
  uint32_t slot;  // which gradient row
};

struct Hyper {
#define HYPER(type, name) type name;
#include "formulas.inc"
#undef HYPER
  float fresh1, fresh2;            // 1 - beta, rounded once: 1 - 0.999f is off by 1e-5 of it
  float correction1, correction2;  // 1 - beta^step
};

// Pairs sorted by row; a run of equal rows is one update.
struct RunArgs {
  const Pair* pairs;
  int64_t num_pairs;  // a whole number of runs
  const Pair* next;   // the pairs that come after these, in any order
  int64_t num_next;
  const float* const* grads;  // by slot
  const float* scales;        // by slot, or null for 1
  int64_t dim;
  bool from_memory;  // more rows than the caches hold
  bool to_l1;        // see prefetch_to_l1
  float* scratch;    // kScratchRows * padded(dim) floats
};

struct UpdateArgs {
  RunArgs runs;
  void* weight;
  float* state0;
  float* state1;
  const float* const* row_stats;  // by slot, or null: [sum g^2, sum w^2, sum r^2] of the whole row
  const float* mean_squares;      // by run, or null: the mean of g^2 over the whole row
  Hyper hyper;
  int64_t first_row, first_column;  // of the weight in its whole table, for the noise of stochastic rounding
};

// Writes the row number and the summed gradient of each run.
struct SumArgs {
  RunArgs runs;
  int64_t* rows;  // may be null
  float* sums;    // [num_runs, dim], or with dense = true [num_rows, dim], indexed by row
  bool dense;
};

// Writes, for each run, the sum of squares of its summed gradient. Returns the number of runs.
struct SquareArgs {
  RunArgs runs;
  const float* by_slot;  // those of single gradient rows, or null
  float* squares;
};

constexpr int64_t kScratchRows = 3;
inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

}  // namespace meshrec
