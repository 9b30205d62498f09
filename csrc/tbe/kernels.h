// Arguments for the inner loops of lookups and updates (kernels.inl). See isa/kernels.h for the rules.
#pragma once

#include <cstdint>

namespace meshrec {

// Trainable types, followed by types that can only be looked up: codes with 8, 4 or 2 bits.
enum WeightType : int { kFloat = 0, kHalf = 1, kBFloat16 = 2, kNumWeightTypes = 3 };
enum RowType : int { kCodes8 = kNumWeightTypes, kCodes4, kCodes2, kNumRowTypes };

// Optimizer codes; formulas.inc is generated from ops/tbe/formulas.py.
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

// Pools bags [0, num_bags) from a table: bag b holds ids[offsets[b] .. offsets[b + 1]).
struct PoolArgs {
  const void* weight;  // [num_rows, row_bytes]
  int64_t row_bytes;
  int64_t dim;
  const void* ids;
  const int64_t* offsets;       // absolute positions in ids
  const float* sample_weights;  // by position in ids, or null
  int64_t num_bags;
  int64_t end;  // end of the IDs for the table: those after these bags are looked up soon
  bool mean;
  float* out;
  int64_t out_stride;
  bool past_caches;  // the output is too large to stay in a cache until it is read
  bool to_l1;        // prefetch rows to L1; otherwise to L2
};

// Copies a row per ID: row i in `out` is row ids[i] in the table.
struct GatherArgs {
  const void* weight;
  int64_t row_bytes;
  int64_t dim;
  const void* ids;
  int64_t num_ids;
  float* out;  // [num_ids, dim]
};

// d(out) / d(sample weight): for each ID, the dot product of the row and the bag gradient.
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
  uint32_t slot;  // gradient row
};

struct Hyper {
#define HYPER(type, name) type name;
#include "formulas.inc"
#undef HYPER
  float fresh1, fresh2;            // 1 - beta, rounded once: 1 - 0.999f has a relative error of 1e-5
  float correction1, correction2;  // 1 - beta^step
};

// Pairs sorted by row. A run of pairs with equal rows is a single update.
struct RunArgs {
  const Pair* pairs;
  int64_t num_pairs;  // covers whole runs
  const Pair* next;   // pairs that come after these, in any order
  int64_t num_next;
  const float* const* grads;  // by slot
  const float* scales;        // by slot; null: 1
  int64_t dim;
  bool from_memory;  // the rows exceed the caches
  bool to_l1;        // see prefetch_to_l1
  float* scratch;    // kScratchRows * padded(dim) floats
};

struct UpdateArgs {
  RunArgs runs;
  void* weight;
  float* state0;
  float* state1;
  const float* const* row_stats;  // by slot, or null: [sum g^2, sum w^2, sum r^2] over the whole row
  const float* mean_squares;      // by run, or null: mean of g^2 over the whole row
  Hyper hyper;
  // For the random bits in stochastic rounding, positions in the whole table: row numbers, or null if rows
  // are consecutive; first row and column.
  const int64_t* row_keys;
  int64_t first_row, first_column;
};

// Writes the row number and the gradient sum for every run.
struct SumArgs {
  RunArgs runs;
  int64_t* rows;  // may be null
  float* sums;    // [num_runs, dim], or with dense = true [num_rows, dim], indexed by row
  bool dense;
};

// Writes the sum of squares of the gradient sum for every run. Returns the number of runs.
struct SquareArgs {
  RunArgs runs;
  const float* by_slot;  // for single gradient rows, or null
  float* squares;
};

// The gradient sum, work memory for the formula, and the fp32 copy of a 16-bit row.
constexpr int64_t kScratchRows = 3;
inline int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

}  // namespace meshrec
