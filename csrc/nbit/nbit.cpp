// Quantized rows: quantization, dequantization, and lookups together with floating-point tables.
#include <numeric>

#include "host/memory.h"
#include "tbe/batch.h"

namespace meshrec {

namespace {

// Minimum number of values per thread: with fewer, another thread costs more than it saves.
constexpr int64_t kMinNumbers = 1 << 15;

int64_t rows_per_thread(int64_t dim) { return std::max<int64_t>(1, kMinNumbers / dim); }

}  // namespace

Tensor nbit_quantize(Tensor weight, int64_t bits, std::optional<Tensor> params) {
  const int type = codes_of(bits);
  Weights source;
  source.add(weight, false);
  const int64_t num_rows = source.num_rows[0], dim = source.dims[0], bytes = quantised_bytes(dim, bits);
  if (dim == 0) fail("rows without numbers cannot be quantised. Give a weight of at least one column.");
  const uint16_t* given = nullptr;
  // Keeps the memory alive to which `given` points.
  Tensor params_kept;
  if (params.has_value()) {
    params_kept = as_contiguous(*params);
    if (params_kept.scalar_type() != ScalarType::Half || params_kept.dim() != 2 || params_kept.size(1) != 2 ||
        params_kept.size(0) != num_rows)
      fail("params must hold an fp16 scale and an fp16 bias for each of the ", num_rows, " rows.");
    given = static_cast<const uint16_t*>(params_kept.const_data_ptr());
  }
  Tensor result = empty_buffer({num_rows, bytes}, ScalarType::Byte);
  auto* out = static_cast<uint8_t*>(result.mutable_data_ptr());
  std::atomic<int64_t> bad_row{num_rows};
  const auto quantize = kernels().quantize[type - kCodes8];
  parallel_for(num_rows, rows_per_thread(dim), [&](int64_t begin, int64_t end) {
    const bool is_float = source.types[0] == kFloat;
    std::vector<float> numbers(is_float ? 0 : kQuantizeRows * dim);
    std::vector<int64_t> ids(is_float ? 0 : kQuantizeRows);
    for (int64_t first = begin; first < end; first += kQuantizeRows) {
      const int64_t count = std::min(kQuantizeRows, end - first);
      const float* rows = static_cast<const float*>(source.data[0]) + first * dim;
      // fp16 and bf16 rows are converted to fp32 first, a few rows at a time.
      if (!is_float) {
        std::iota(ids.begin(), ids.end(), first);
        kernels().gather[source.types[0]][1](
            {source.data[0], source.row_bytes[0], dim, ids.data(), count, numbers.data()});
        rows = numbers.data();
      }
      const int64_t done = quantize(
          {rows, count, dim, given == nullptr ? nullptr : given + 2 * first, out + first * bytes, bytes});
      // The minimum over threads: the error names the first such row.
      if (done < count) return atomic_min(bad_row, first + done);
    }
  });
  if (bad_row < num_rows)
    fail("row ", bad_row,
         " has a number that is NaN, infinite, or outside fp16's range (65504), in which its ",
         "scale and bias are kept, or was given a scale of 0. Repair the row, or keep the table in fp32.");
  return result;
}

Weights mixed_weights(const std::vector<Tensor>& tensors, const std::vector<int64_t>& bits,
                      const std::vector<int64_t>& tables, const std::vector<int64_t>& dims) {
  if (bits.size() != tensors.size())
    fail("bits must have a number for each of the ", tensors.size(), " weights, got ", bits.size(), ".");
  if (dims.size() != tables.size())
    fail("dims and tables must have one entry per feature, got ", dims.size(), " and ", tables.size(), ".");
  std::vector<int64_t> widths(bits.size(), 0);
  for (size_t feature = 0; feature < tables.size(); ++feature) {
    if (tables[feature] < 0 || tables[feature] >= int64_t(bits.size()))
      fail("a feature reads table ", tables[feature], " of ", bits.size(), ".");
    // All features of a table have its width, which `check_dims` verifies.
    widths[tables[feature]] = dims[feature];
  }
  Weights weights;
  for (size_t t = 0; t < bits.size(); ++t) {
    if (bits[t] == 0) {
      weights.add(tensors[t], false);
    } else {
      weights.add_quantised(tensors[t], bits[t], widths[t]);
    }
  }
  return weights;
}

namespace {

Tensor nbit_dequantize(Tensor rows, int64_t bits, int64_t dim) {
  if (dim < 1) fail("rows have at least one number, got dim ", dim, ". Give the width they were made with.");
  Weights source;
  source.add_quantised(rows, bits, dim);
  const int64_t num_rows = source.num_rows[0];
  Tensor result = empty_buffer({num_rows, dim}, ScalarType::Float);
  auto* out = static_cast<float*>(result.mutable_data_ptr());
  parallel_for(num_rows, rows_per_thread(dim), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      kernels().gather[source.types[0]][1](
          {source.data[0], source.row_bytes[0], dim, &row, 1, out + row * dim});
  });
  return result;
}

Tensor nbit_forward(std::vector<Tensor> weight_list, std::vector<int64_t> bits, Tensor values, Tensor offsets,
                    std::optional<Tensor> sample_weights, std::optional<Tensor> segments, int64_t num_keys,
                    std::vector<int64_t> keys, std::vector<int64_t> tables, std::vector<int64_t> pooling,
                    bool flat, std::vector<int64_t> dims, int64_t out_size, ScalarType out_dtype,
                    bool check_ids, Tensor names) {
  const Weights weights = mixed_weights(weight_list, bits, tables, dims);
  const Batch batch =
      make_batch(values, offsets, sample_weights, {segments, num_keys, keys, tables, pooling, flat}, dims);
  check_dims(batch, weights);
  return look_up_all(batch, weights, flat, out_size, out_dtype, check_ids, names);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("nbit_quantize", TORCH_BOX(&nbit_quantize));
  m.impl("nbit_dequantize", TORCH_BOX(&nbit_dequantize));
  m.impl("nbit_forward", TORCH_BOX(&nbit_forward));
}

}  // namespace meshrec
