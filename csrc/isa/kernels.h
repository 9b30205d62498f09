// Selection of the instruction set: the inner loops are compiled once for each (kernels_*.cpp include
// kernels.inl), and choose.cpp selects the best that the machine supports.
//
// This header and its includes contain only plain pointers. Translation units with different machine flags
// share them, so they must not pull in inline functions that a linker could take from the wrong unit.
#pragma once

#include <cstdint>

#include "attention/attention.h"
#include "dist/wire.h"
#include "index/draw.h"
#include "index/find.h"
#include "index/scan.h"
#include "interaction/interaction.h"
#include "nbit/rows.h"
#include "scores/scores.h"
#include "tbe/kernels.h"

namespace meshrec {

struct Kernels {
  const char* name;
  void (*pool[kNumRowTypes][2])(const PoolArgs&);  // [row type][ids are int64]
  void (*gather[kNumRowTypes][2])(const GatherArgs&);
  void (*dot[kNumWeightTypes][2])(const DotArgs&);
  void (*update[kNumOptimizers][kNumWeightTypes])(const UpdateArgs&);
  void (*sum)(const SumArgs&);
  int64_t (*square)(const SquareArgs&);
  float (*square_row)(const float* row, int64_t dim);
  bool (*all_below32)(const int32_t* ids, int64_t n, uint64_t bound);
  bool (*all_below64)(const int64_t* ids, int64_t n, uint64_t bound);
  void (*interact)(const InteractionArgs&, InteractionType);
  void (*interact_grad)(const InteractionArgs&, InteractionType);
  void (*attend)(const AttentionArgs&, const AttentionUnit&);
  void (*attend_grad)(const AttentionArgs&, const AttentionUnit&);
  // Quantizes to 8, 4 or 2 bits. Returns the first row that cannot be quantized, or num_rows.
  int64_t (*quantize[3])(QuantizeArgs);
  int64_t (*encode_wire)(const WireRowsArgs&);  // returns the number of rows with non-finite values
  void (*decode_wire)(const WireRowsArgs&);
  int64_t (*find)(const FindArgs&);  // returns how many IDs have no slot
  int64_t (*find_rows)(const FindRowsArgs&);
  int64_t (*scan)(const ScanArgs&);  // returns how many IDs are listed
  void (*draw)(const DrawArgs&, int64_t begin, int64_t end);
  void (*rank)(const RankArgs&);
  int64_t (*find_larger)(LargerArgs&);  // returns the column to continue from
};

const Kernels* kernels_baseline();
const Kernels* kernels_avx2();    // null if not compiled in
const Kernels* kernels_avx512();  // null if not compiled in

// Whether rows are prefetched to L1 or to L2: the faster option, measured on a machine of each kind. AMD Zen
// 5: L1. Zen 4 and Intel, which can have fewer L1 misses in flight: L2 (on Zen 4, 2.6 times as fast for
// quantized rows, 1.6 times for fp32). MESHREC_PREFETCH=l1|l2 overrides this.
bool prefetch_to_l1();

// Returns the kernels for the best instruction set that this machine supports;
// MESHREC_ISA=baseline|avx2|avx512 requests another.
const Kernels& kernels();

}  // namespace meshrec
