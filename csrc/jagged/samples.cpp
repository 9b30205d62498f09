// Samples on their way into a batch: put in order, and concatenated. src/meshrec/ops/jagged/naive.py is the
// reference, and documents arguments and results. Both ops run on the calling thread: readers call them from
// a background thread while the model uses torch's threads.
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "stable_abi.h"

namespace meshrec {

namespace {

template <class T>
const T* vector_data(const Tensor& tensor, const char* op, const char* name) {
  constexpr ScalarType type = std::is_same_v<T, float>     ? ScalarType::Float
                              : std::is_same_v<T, int32_t> ? ScalarType::Int
                                                           : ScalarType::Long;
  if (!tensor.is_cpu() || tensor.dim() != 1 || tensor.scalar_type() != type || !tensor.is_contiguous())
    fail(op, ": ", name,
         " must be contiguous vectors on the CPU, int64 (weights float32, values of permute_samples also "
         "int32)");
  return tensor.const_data_ptr<T>();
}

Tensor new_tensor(const Tensor& like, std::vector<int64_t> sizes, ScalarType type) {
  return torch::stable::new_empty(like, torch::headeronly::IntHeaderOnlyArrayRef(sizes.data(), sizes.size()),
                                  type);
}

// Bytes of a field per sample.
int64_t row_bytes(const Tensor& field, int64_t num_samples, const char* op) {
  if (!field.is_cpu() || !field.is_contiguous() || field.dim() < 1 || field.size(0) != num_samples)
    fail(op, ": a field must be contiguous on the CPU, with a row for each of ", num_samples, " samples");
  int64_t bytes = static_cast<int64_t>(field.element_size());
  for (int64_t dim = 1; dim < field.dim(); ++dim) bytes *= field.size(dim);
  return bytes;
}

Tensor new_field(const Tensor& like, int64_t num_samples) {
  std::vector<int64_t> sizes(like.sizes().begin(), like.sizes().end());
  sizes[0] = num_samples;
  return new_tensor(like, sizes, like.scalar_type());
}

// Samples are read in random order, so most reads would wait for memory. Reading all of them in sequence
// first, while they fit the second-level cache, takes less time.
template <class T>
void load_into_cache(const T* data, int64_t count) {
  constexpr int64_t kPerLine = 64 / sizeof(T), kMost = (1 << 20) / sizeof(T);
  for (int64_t i = 0; i < std::min(count, kMost); i += kPerLine) __builtin_prefetch(data + i);
}

template <int64_t kBytes>
void copy_rows(const char* from, const int64_t* order, int64_t count, char* to) {
  for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * kBytes, from + order[i] * kBytes, kBytes);
}

Tensor permuted_field(const Tensor& field, const int64_t* order, int64_t count, int64_t num_samples) {
  const int64_t bytes = row_bytes(field, num_samples, "permute_samples");
  Tensor output = new_field(field, count);
  const auto* const from = static_cast<const char*>(field.const_data_ptr());
  auto* const to = static_cast<char*>(output.mutable_data_ptr());
  if (bytes == 4) {
    copy_rows<4>(from, order, count, to);
  } else if (bytes == 8) {
    copy_rows<8>(from, order, count, to);
  } else if (bytes > 0) {
    for (int64_t i = 0; i < count; ++i) std::memcpy(to + i * bytes, from + order[i] * bytes, bytes);
  }
  return output;
}

// Whether every sample has a single value, as is most common. Then copies need no offsets.
bool has_single_values(const int64_t* offsets, int64_t num_samples) {
  bool all = true;  // without a branch per sample
  for (int64_t i = 0; i < num_samples; ++i) all &= offsets[i + 1] - offsets[i] == 1;
  return all;
}

// Copies the values of bags in order, converted by map(value), and returns the end of the copies.
template <class From, class To, class Map>
To* copy_bags(const From* from, const int64_t* offsets, int64_t num_samples, const int64_t* order,
              int64_t count, To* to, const Map& map) {
  if (has_single_values(offsets, num_samples)) {
    for (int64_t i = 0; i < count; ++i) to[i] = map(from[offsets[0] + order[i]]);
    return to + count;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int64_t at = offsets[order[i]], end = offsets[order[i] + 1]; at < end; ++at) *to++ = map(from[at]);
  return to;
}

// Copies the IDs of a key in order. `table`: ID per code, starting with `first`; empty: codes are IDs.
template <class Code>
int64_t* copy_ids(const Code* codes, const Tensor& table, int64_t first, const int64_t* offsets,
                  int64_t num_samples, const int64_t* order, int64_t count, int64_t* to) {
  load_into_cache(codes + offsets[0], offsets[num_samples] - offsets[0]);
  if (table.numel() == 0)
    return copy_bags(codes, offsets, num_samples, order, count, to, [](Code code) { return int64_t(code); });
  const auto* const ids = vector_data<int64_t>(table, "permute_samples", "tables");
  const auto last = uint64_t(table.numel() - 1);
  // As an unsigned integer, a code below the first is large.
  return copy_bags(codes, offsets, num_samples, order, count, to,
                   [&](Code code) { return ids[std::min(uint64_t(int64_t(code)) - uint64_t(first), last)]; });
}

std::tuple<Tensor, Tensor, Tensor, std::vector<Tensor>> permute_samples(
    const Tensor& order, std::vector<Tensor> fields, std::vector<Tensor> values, std::vector<Tensor> offsets,
    std::vector<Tensor> weights, std::vector<Tensor> tables, std::vector<int64_t> firsts) {
  const char* const op = "permute_samples";
  const auto* const rows = vector_data<int64_t>(order, op, "order");
  const int64_t count = order.numel(), num_keys = static_cast<int64_t>(values.size());
  const auto is_wrong = [&](size_t size) { return size != values.size(); };
  if (fields.empty() || fields[0].dim() < 1 || is_wrong(offsets.size()) || is_wrong(tables.size()) ||
      is_wrong(firsts.size()) || (!weights.empty() && is_wrong(weights.size())))
    fail(op, ": needs a field or more, and as many offsets, tables, firsts (and weights, if any) as values; ",
         "got ", fields.size(), " fields, ", values.size(), " values, ", offsets.size(), " offsets, ",
         tables.size(), " tables, ", firsts.size(), " firsts and ", weights.size(), " weights");
  const int64_t num_samples = fields[0].size(0);
  for (int64_t i = 0; i < count; ++i)
    if (rows[i] < 0 || rows[i] >= num_samples)
      fail(op, ": order has the index ", rows[i], ", and there are ", num_samples, " samples");
  const Tensor all_offsets = new_tensor(order, {num_keys * count + 1}, ScalarType::Long);
  auto* offset = all_offsets.mutable_data_ptr<int64_t>();
  int64_t total = *offset = 0;
  for (int64_t key = 0; key < num_keys; ++key) {
    const auto* const starts = vector_data<int64_t>(offsets[key], op, "offsets");
    const int64_t num_values = values[key].numel();
    if (offsets[key].numel() != num_samples + 1 || (!weights.empty() && weights[key].numel() != num_values))
      fail(op, ": key ", key, " has ", offsets[key].numel(), " offsets for ", num_samples,
           " samples, or other numbers of weights and values");
    if (has_single_values(starts, num_samples) && starts[0] >= 0 && starts[num_samples] <= num_values) {
      for (int64_t i = 0; i < count; ++i) *++offset = ++total;
      continue;
    }
    for (int64_t i = 0; i < count; ++i) {
      const int64_t start = starts[rows[i]], end = starts[rows[i] + 1];
      if (start < 0 || start > end || end > num_values)
        fail(op, ": sample ", rows[i], " has the values ", start, " to ", end, " of ", num_values);
      *++offset = total += end - start;
    }
  }
  const Tensor all_values = new_tensor(order, {total}, ScalarType::Long);
  const Tensor all_weights = new_tensor(order, {weights.empty() ? 0 : total}, ScalarType::Float);
  auto* value = all_values.mutable_data_ptr<int64_t>();
  auto* weight = all_weights.mutable_data_ptr<float>();
  for (int64_t key = 0; key < num_keys; ++key) {
    const auto* const starts = offsets[key].const_data_ptr<int64_t>();
    if (values[key].scalar_type() == ScalarType::Int)
      value = copy_ids(vector_data<int32_t>(values[key], op, "values"), tables[key], firsts[key], starts,
                       num_samples, rows, count, value);
    else
      value = copy_ids(vector_data<int64_t>(values[key], op, "values"), tables[key], firsts[key], starts,
                       num_samples, rows, count, value);
    if (!weights.empty())
      weight = copy_bags(vector_data<float>(weights[key], op, "weights"), starts, num_samples, rows, count,
                         weight, [](float value) { return value; });
  }
  std::vector<Tensor> permuted;
  for (const Tensor& field : fields) permuted.push_back(permuted_field(field, rows, count, num_samples));
  return {all_values, all_offsets, all_weights, permuted};
}

// Samples of a piece that go into a batch.
struct Piece {
  int64_t start, stop, num_samples;
  const int64_t *values, *offsets;
  const float* weights;
};

std::vector<Piece> checked_pieces(const std::vector<int64_t>& starts, const std::vector<int64_t>& stops,
                                  int64_t num_keys, const std::vector<Tensor>& values,
                                  const std::vector<Tensor>& offsets, const std::vector<Tensor>& weights) {
  const char* const op = "concat_samples";
  const size_t num = starts.size();
  if (num == 0 || num_keys < 1 || stops.size() != num || values.size() != num || offsets.size() != num ||
      (!weights.empty() && weights.size() != num))
    fail(op, ": needs a key and a piece or more, and for each piece a stop, values and offsets; got ",
         num_keys, " keys, ", num, " starts, ", stops.size(), " stops, ", values.size(), " values, ",
         offsets.size(), " offsets and ", weights.size(), " weights");
  std::vector<Piece> pieces(num);
  for (size_t p = 0; p < num; ++p) {
    const int64_t num_bags = offsets[p].numel() - 1, num_values = values[p].numel();
    pieces[p] = {starts[p],
                 stops[p],
                 num_bags / num_keys,
                 vector_data<int64_t>(values[p], op, "values"),
                 vector_data<int64_t>(offsets[p], op, "offsets"),
                 weights.empty() ? nullptr : vector_data<float>(weights[p], op, "weights")};
    if (num_bags < 0 || num_bags % num_keys || (!weights.empty() && weights[p].numel() != num_values))
      fail(op, ": piece ", p, " has ", num_bags + 1, " offsets for ", num_keys,
           " keys, or other numbers of weights and values");
    if (starts[p] < 0 || starts[p] > stops[p] || stops[p] > pieces[p].num_samples)
      fail(op, ": piece ", p, " has ", pieces[p].num_samples, " samples, and not ", starts[p], " to ",
           stops[p]);
    for (int64_t key = 0; key < num_keys; ++key) {
      const int64_t* const bags = pieces[p].offsets + key * pieces[p].num_samples;
      if (bags[starts[p]] < 0 || bags[starts[p]] > bags[stops[p]] || bags[stops[p]] > num_values)
        fail(op, ": key ", key, " of piece ", p, " has the values ", bags[starts[p]], " to ", bags[stops[p]],
             " of ", num_values);
    }
  }
  return pieces;
}

Tensor concat_field(const std::vector<Piece>& pieces, const Tensor* tables, int64_t num_samples) {
  const char* const op = "concat_samples";
  const int64_t bytes = row_bytes(tables[0], pieces[0].num_samples, op);
  Tensor output = new_field(tables[0], num_samples);
  auto* to = static_cast<char*>(output.mutable_data_ptr());
  for (size_t p = 0; p < pieces.size(); ++p) {
    const Piece& piece = pieces[p];
    if (tables[p].scalar_type() != tables[0].scalar_type() ||
        row_bytes(tables[p], piece.num_samples, op) != bytes)
      fail(op, ": a field must have the same type and width in all pieces");
    const int64_t size = (piece.stop - piece.start) * bytes;
    if (size > 0)
      std::memcpy(to, static_cast<const char*>(tables[p].const_data_ptr()) + piece.start * bytes, size);
    to += size;
  }
  return output;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, std::vector<Tensor>> concat_samples(
    std::vector<int64_t> starts, std::vector<int64_t> stops, int64_t num_keys, std::vector<Tensor> fields,
    std::vector<Tensor> values, std::vector<Tensor> offsets, std::vector<Tensor> weights) {
  const std::vector<Piece> pieces = checked_pieces(starts, stops, num_keys, values, offsets, weights);
  if (fields.size() % pieces.size())
    fail("concat_samples: ", fields.size(), " fields do not divide evenly among ", pieces.size(), " pieces");
  int64_t num_samples = 0, num_values = 0;
  for (const Piece& piece : pieces) num_samples += piece.stop - piece.start;
  const Tensor totals = new_tensor(values[0], {num_keys}, ScalarType::Long);
  for (int64_t key = 0; key < num_keys; ++key) {
    int64_t total = 0;
    for (const Piece& piece : pieces) {
      const int64_t* const bags = piece.offsets + key * piece.num_samples;
      total += bags[piece.stop] - bags[piece.start];
    }
    totals.mutable_data_ptr<int64_t>()[key] = total, num_values += total;
  }
  const Tensor lengths = new_tensor(values[0], {num_keys * num_samples}, ScalarType::Long);
  const Tensor all_values = new_tensor(values[0], {num_values}, ScalarType::Long);
  const Tensor all_weights = new_tensor(values[0], {weights.empty() ? 0 : num_values}, ScalarType::Float);
  auto* length = lengths.mutable_data_ptr<int64_t>();
  auto* value = all_values.mutable_data_ptr<int64_t>();
  auto* weight = all_weights.mutable_data_ptr<float>();
  for (int64_t key = 0; key < num_keys; ++key) {
    for (const Piece& piece : pieces) {
      const int64_t* const bags = piece.offsets + key * piece.num_samples;
      for (int64_t i = piece.start; i < piece.stop; ++i) *length++ = bags[i + 1] - bags[i];
      value = std::copy(piece.values + bags[piece.start], piece.values + bags[piece.stop], value);
      if (piece.weights != nullptr)
        weight = std::copy(piece.weights + bags[piece.start], piece.weights + bags[piece.stop], weight);
    }
  }
  std::vector<Tensor> gathered;
  for (size_t field = 0; field < fields.size(); field += pieces.size())
    gathered.push_back(concat_field(pieces, fields.data() + field, num_samples));
  return {all_values, lengths, all_weights, totals, gathered};
}

}  // namespace

}  // namespace meshrec

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("permute_samples", TORCH_BOX(&meshrec::permute_samples));
  m.impl("concat_samples", TORCH_BOX(&meshrec::concat_samples));
}
