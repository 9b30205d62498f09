// The arguments shared by all tbe_* operators, checked and resolved into lookups: which bags of which key
// read which table, and where the output rows are.
#pragma once

#include <memory>

#include "isa/kernels.h"
#include "stable_abi.h"

namespace meshrec {

enum Pooling : int { kSum, kMean, kNone };

// Finds the rows for IDs, some at a time, just before they are read.
class RowFinder {
 public:
  RowFinder() = default;
  RowFinder(const RowFinder&) = delete;
  virtual ~RowFinder() = default;
  // Writes the rows for the IDs at batch positions [begin, end). The caller does not check them. They may be
  // outside the table, in memory that the last argument receives; see [Note: rows outside the table] in
  // index/keyed.cpp. Returns false if the result will not be read.
  virtual bool find(int64_t begin, int64_t end, int64_t* rows, std::unique_ptr<char[]>& beside) const = 0;
};

// The IDs for a key in a block, read by a feature.
struct Lookup {
  int64_t feature;
  int64_t table;  // -1: the feature is skipped
  Pooling pooling;
  int64_t dim = 0;
  int64_t first_bag = 0, num_bags = 0;
  int64_t first_id = 0, num_ids = 0;
  int64_t out_offset = 0,
          out_stride = 0;             // in elements; an output row is a bag, or an ID without pooling
  const RowFinder* finder = nullptr;  // null: IDs are rows
};

struct Shape {
  const std::optional<Tensor>& segments;
  int64_t num_keys;
  const std::vector<int64_t>& keys;
  const std::vector<int64_t>& tables;
  const std::vector<int64_t>& pooling;
  bool flat;
};

struct Batch {
  Tensor values, offsets;  // contiguous; offsets int64
  std::optional<Tensor> sample_weights_tensor = std::nullopt;
  const int64_t* bags = nullptr;  // offsets
  const float* sample_weights = nullptr;
  bool wide_ids = false;
  int64_t num_ids = 0, num_bags = 0;
  std::vector<Lookup> lookups = {};
  int64_t out_rows = 0, out_columns = 0;  // if not flat
  int64_t out_size = 0;                   // elements

  const void* ids(int64_t position) const;
  int64_t id(int64_t position) const;
};

// Checks the arguments. Throws ValueError for offsets that do not match the values, and for shapes that do
// not fit together.
Batch make_batch(const Tensor& values, const Tensor& offsets, const std::optional<Tensor>& sample_weights,
                 const Shape& shape, const std::vector<int64_t>& dims);

struct Weights {
  std::vector<Tensor> tensors;
  std::vector<void*> data;
  std::vector<int64_t> num_rows, dims, row_bytes;
  std::vector<int> types;  // WeightType, or RowType for quantized rows

  // Adds a table. With writable = true, the tensor must be contiguous.
  void add(Tensor tensor, bool writable);
  // Adds a quantized table with `dim` values per row (0: no feature reads it); see nbit/rows.inl.
  void add_quantised(Tensor tensor, int64_t bits, int64_t dim);
};
Weights make_weights(std::vector<Tensor> tensors, bool writable);
int codes_of(int64_t bits);                          // RowType for this number of bits
int64_t quantised_bytes(int64_t dim, int64_t bits);  // bytes per row, a multiple of 4
// Returns the tables for nbit_forward: `bits` per table (0: floating-point), and table and width per feature.
Weights mixed_weights(const std::vector<Tensor>& tensors, const std::vector<int64_t>& bits,
                      const std::vector<int64_t>& tables, const std::vector<int64_t>& dims);
// Quantizes rows; see nbit_quantize in ops/nbit/naive.py.
Tensor nbit_quantize(Tensor weight, int64_t bits, std::optional<Tensor> params);
std::vector<int64_t> feature_dims(const std::vector<int64_t>& tables, const std::vector<int64_t>& table_dims);

// Throws unless the output of every feature, except skipped ones, is as wide as the table.
void check_dims(const Batch& batch, const Weights& weights);

// The lookup; see naive.tbe_forward.
Tensor look_up_all(const Batch& batch, const Weights& weights, bool flat, int64_t out_size,
                   ScalarType out_dtype, bool check_ids, const Tensor& names);

// Returns the gradient as contiguous fp32, after checking that it has the size of the batch output.
Tensor checked_grad(const Tensor& grad, const Batch& batch);

// A part of a lookup. Pieces take about the same work, for parallel loops over bags.
struct Piece {
  int64_t lookup, first_bag, num_bags;
};
std::vector<Piece> cut(const Batch& batch);

// Returns the table and feature of a lookup for messages: by name, or by number without names. names: UTF-8
// bytes, "table\tfeature\n" per feature.
std::pair<std::string, std::string> names_of(const Lookup& lookup, const Tensor* names);
// Throws for the first ID in the lookup that is outside the table.
[[noreturn]] void fail_for_id(const Batch& batch, int64_t lookup, int64_t num_rows, const Tensor* names);

}  // namespace meshrec
