// All inner loops, for a single instruction set. Every kernels_<isa>.cpp defines MESHREC_NAME and
// MESHREC_KERNELS (the name for its table) and includes this file.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "index/mix.h"
#include "isa/kernels.h"

namespace meshrec {
namespace {

#include "isa/simd.h"

// simd.h comes first, and rows.inl needs the vectors and pool.inl's interface.
#include "attention/algebra.inl"
#include "attention/attention.inl"
#include "interaction/interaction.inl"
#include "scores/scores.inl"
#include "tbe/kernels.inl"

// Quantized rows, with the same interface as the rows in pool.inl.
#include "nbit/rows.inl"

// Rows between ranks; uses the vectors from simd.h.
#include "dist/wire.inl"
#include "index/draw.inl"
#include "index/find.inl"
#include "index/keyed.inl"
#include "index/scan.inl"

#define MESHREC_BY_ID(function, ...) {function<__VA_ARGS__, int32_t>, function<__VA_ARGS__, int64_t>}
#define MESHREC_BY_ROWS(function)                                                           \
  {MESHREC_BY_ID(function, DenseRows<float>),    MESHREC_BY_ID(function, DenseRows<Half>),  \
   MESHREC_BY_ID(function, DenseRows<BFloat16>), MESHREC_BY_ID(function, QuantisedRows<8>), \
   MESHREC_BY_ID(function, QuantisedRows<4>),    MESHREC_BY_ID(function, QuantisedRows<2>)}
#define MESHREC_BY_WEIGHT(function) \
  {MESHREC_BY_ID(function, float), MESHREC_BY_ID(function, Half), MESHREC_BY_ID(function, BFloat16)}

const Kernels kTable = {MESHREC_NAME,
                        MESHREC_BY_ROWS(pool),
                        MESHREC_BY_ROWS(gather),
                        MESHREC_BY_WEIGHT(dot),
                        {
#define FORMULA(name, ...) {update<k##name, float>, update<k##name, Half>, update<k##name, BFloat16>},
#include "formulas.inc"
#undef FORMULA
                        },
                        sum,
                        square,
                        square_row,
                        all_below<int32_t>,
                        all_below<int64_t>,
                        interact_typed,
                        interact_grad_typed,
                        attend,
                        attend_grad,
                        {quantize<8>, quantize<4>, quantize<2>},
                        encode_wire,
                        decode_wire,
                        find,
                        find_rows,
                        scan,
                        draw,
                        rank,
                        find_larger};

}  // namespace

const Kernels* MESHREC_KERNELS() { return &kTable; }

}  // namespace meshrec
