#include "tbe/batch.h"

#include <algorithm>
#include <atomic>
#include <string_view>

namespace meshrec {

namespace {

// Throws unless the offsets start at 0, never decrease, and end at num_ids.
void check_offsets(const int64_t* offsets, int64_t num_bags, int64_t num_ids) {
  bool falls = false;
  // Without an early exit, which would keep the compiler from vectorizing the loop.
  for (int64_t bag = 0; bag < num_bags; ++bag) falls |= offsets[bag + 1] < offsets[bag];
  if (offsets[0] != 0)
    fail("offsets start at ", offsets[0], ", not at 0. Pass offsets made from the lengths.");
  if (falls) {
    int64_t bag = 0;
    while (offsets[bag + 1] >= offsets[bag]) ++bag;
    fail("offsets fall from ", offsets[bag], " to ", offsets[bag + 1], " at bag ", bag,
         ". Offsets must never fall; call validate() on the input to find the key and sample.");
  }
  if (offsets[num_bags] != num_ids)
    fail("the lengths sum to ", offsets[num_bags], " but there are ", num_ids,
         " values. Call validate() on the input to find the key and sample.");
}

}  // namespace

const void* Batch::ids(int64_t position) const {
  const char* data = static_cast<const char*>(values.const_data_ptr());
  return data + position * (wide_ids ? 8 : 4);
}

int64_t Batch::id(int64_t position) const {
  const void* p = ids(position);
  return wide_ids ? *static_cast<const int64_t*>(p) : *static_cast<const int32_t*>(p);
}

Batch make_batch(const Tensor& values, const Tensor& offsets, const std::optional<Tensor>& sample_weights,
                 const Shape& shape, const std::vector<int64_t>& dims) {
  Batch batch{.values = as_contiguous(values), .offsets = as_contiguous(offsets)};
  const auto id_type = values.scalar_type();
  if (id_type != ScalarType::Long && id_type != ScalarType::Int)
    fail("ids must be int32 or int64. Convert the values with .long().");
  if (offsets.scalar_type() == ScalarType::Int) {
    // Kernels read int64 offsets only.
    batch.offsets = torch::stable::to(batch.offsets, ScalarType::Long);
  } else if (offsets.scalar_type() != ScalarType::Long) {
    fail("offsets must be int32 or int64. Convert them with .long().");
  }
  if (values.dim() != 1 || offsets.dim() != 1 || offsets.numel() == 0)
    fail("values and offsets must have one dimension, and offsets at least one entry.");
  batch.wide_ids = id_type == ScalarType::Long;
  batch.bags = static_cast<const int64_t*>(batch.offsets.const_data_ptr());
  batch.num_ids = values.numel();
  batch.num_bags = offsets.numel() - 1;
  check_offsets(batch.bags, batch.num_bags, batch.num_ids);
  if (sample_weights.has_value()) {
    if (sample_weights->numel() != batch.num_ids)
      fail("there are ", batch.num_ids, " values but ", sample_weights->numel(),
           " per-sample weights. Each id needs one weight.");
    if (sample_weights->scalar_type() != ScalarType::Float)
      fail("per-sample weights must be float32. Convert them with .float().");
    batch.sample_weights_tensor = as_contiguous(*sample_weights);
    batch.sample_weights = static_cast<const float*>(batch.sample_weights_tensor->const_data_ptr());
  }

  const int64_t num_features = shape.keys.size(), num_keys = shape.num_keys;
  if (int64_t(shape.tables.size()) != num_features || int64_t(shape.pooling.size()) != num_features ||
      int64_t(dims.size()) != num_features)
    fail("keys, tables, pooling and dims must have one entry per feature, got ", num_features, ", ",
         shape.tables.size(), ", ", shape.pooling.size(), " and ", dims.size(), ".");
  std::vector<int64_t> starts;
  if (shape.segments.has_value()) {
    const Tensor segments = as_contiguous(*shape.segments);
    if (segments.scalar_type() != ScalarType::Long || !segments.is_cpu() || segments.numel() < 1 ||
        num_keys == 0 || (segments.numel() - 1) % num_keys != 0)
      fail("segments must be an int64 CPU tensor with blocks * keys + 1 entries.");
    const auto* data = static_cast<const int64_t*>(segments.const_data_ptr());
    starts.assign(data, data + segments.numel());
    if (starts.front() != 0 || starts.back() != batch.num_bags ||
        !std::is_sorted(starts.begin(), starts.end()))
      fail("segments must rise from 0 to the number of bags (", batch.num_bags, ").");
  } else {
    if (num_keys == 0 || batch.num_bags % num_keys != 0)
      fail(batch.num_bags, " bags do not divide among ", num_keys,
           " keys. Pass the batch size of each key when they differ.");
    for (int64_t key = 0; key <= num_keys; ++key) starts.push_back(batch.num_bags / num_keys * key);
  }

  const int64_t num_blocks = num_keys == 0 ? 0 : (int64_t(starts.size()) - 1) / num_keys;
  for (int64_t feature = 0; feature < num_features; ++feature) {
    const int64_t key = shape.keys[feature];
    if (key < 0 || key >= num_keys) fail("feature ", feature, " reads key ", key, " of ", num_keys, ".");
    if (dims[feature] < 1)
      fail("feature ", feature, " is ", dims[feature], " wide; every width is at least 1.");
    batch.out_columns += dims[feature];
  }
  batch.lookups.reserve(num_blocks * num_features);
  for (int64_t block = 0; block < num_blocks; ++block) {
    // The bag count of the first key stands for the block.
    const int64_t block_rows = starts[block * num_keys + 1] - starts[block * num_keys];
    int64_t column = 0;
    for (int64_t feature = 0; feature < num_features; ++feature) {
      const int64_t key = shape.keys[feature];
      const int64_t segment = block * num_keys + key;
      Lookup lookup{
          .feature = feature, .table = shape.tables[feature], .pooling = Pooling(shape.pooling[feature])};
      lookup.dim = dims[feature];
      lookup.first_bag = starts[segment];
      lookup.num_bags = starts[segment + 1] - starts[segment];
      lookup.first_id = batch.bags[lookup.first_bag];
      lookup.num_ids = batch.bags[starts[segment + 1]] - lookup.first_id;
      if (lookup.pooling == kNone && !shape.flat) fail("lookups that are not pooled have a flat output.");
      if (lookup.pooling == kNone && batch.sample_weights != nullptr)
        fail("per-sample weights belong to pooled lookups; a sequence lookup takes none.");
      if (shape.flat) {
        lookup.out_offset = batch.out_size;
        lookup.out_stride = lookup.dim;
        batch.out_size += (lookup.pooling == kNone ? lookup.num_ids : lookup.num_bags) * lookup.dim;
      } else {
        if (lookup.num_bags != block_rows)
          fail("feature ", feature, " has ", lookup.num_bags, " samples and the first key ", block_rows,
               ". One output matrix needs one batch size; ask for a flat output otherwise.");
        lookup.out_offset = batch.out_rows * batch.out_columns + column;
        lookup.out_stride = batch.out_columns;
        column += lookup.dim;
      }
      batch.lookups.push_back(lookup);
    }
    if (!shape.flat) batch.out_rows += block_rows;
  }
  if (!shape.flat) batch.out_size = batch.out_rows * batch.out_columns;
  return batch;
}

void Weights::add(Tensor tensor, bool writable) {
  const size_t t = tensors.size();
  if (tensor.dim() != 2) fail("weight ", t, " must have two dimensions, got ", tensor.dim(), ".");
  if (!tensor.is_contiguous()) {
    if (writable) fail("weight ", t, " is not contiguous; an update in place needs it to be.");
    tensor = torch::stable::contiguous(tensor);
  }
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      types.push_back(kFloat);
      break;
    case ScalarType::Half:
      types.push_back(kHalf);
      break;
    case ScalarType::BFloat16:
      types.push_back(kBFloat16);
      break;
    default:
      fail("weight ", t, " must be float32, float16 or bfloat16. Convert it with .float().");
  }
  data.push_back(tensor.data_ptr());
  num_rows.push_back(tensor.size(0));
  dims.push_back(tensor.size(1));
  row_bytes.push_back(tensor.size(1) * (types.back() == kFloat ? 4 : 2));
  // The update stores rows as uint32 (runs.h).
  if (tensor.size(0) > int64_t(UINT32_MAX))
    fail("weight ", t, " has ", tensor.size(0),
         " rows; the kernels take at most 4294967295. Split it by rows.");
  tensors.push_back(std::move(tensor));
}

void Weights::add_quantised(Tensor tensor, int64_t bits, int64_t dim) {
  const size_t t = tensors.size();
  types.push_back(codes_of(bits));
  // Width 0: no feature reads the table, so the size of its rows cannot be checked.
  const int64_t bytes = dim == 0 && tensor.dim() == 2 ? tensor.size(1) : quantised_bytes(dim, bits);
  if (tensor.scalar_type() != ScalarType::Byte || tensor.dim() != 2 || tensor.size(1) != bytes ||
      tensor.size(0) > int64_t(UINT32_MAX))
    fail("weight ", t, " must be at most 4294967295 rows of ", bytes, " uint8, which ", dim, " numbers of ",
         bits, " bits take. Make it with meshrec.quant.");
  tensor = as_contiguous(tensor);
  data.push_back(tensor.data_ptr());
  num_rows.push_back(tensor.size(0));
  dims.push_back(dim);
  row_bytes.push_back(bytes);
  tensors.push_back(std::move(tensor));
}

Weights make_weights(std::vector<Tensor> tensors, bool writable) {
  Weights weights;
  for (Tensor& tensor : tensors) weights.add(std::move(tensor), writable);
  return weights;
}

int codes_of(int64_t bits) {
  if (bits == 8) return kCodes8;
  if (bits == 4) return kCodes4;
  if (bits == 2) return kCodes2;
  fail("rows are quantised to 8, 4 or 2 bits, got ", bits, ".");
}

// Scale and bias (two fp16), then the codes, padded to 4 bytes.
int64_t quantised_bytes(int64_t dim, int64_t bits) { return 4 + ((dim * bits + 7) / 8 + 3) / 4 * 4; }

std::vector<int64_t> feature_dims(const std::vector<int64_t>& tables,
                                  const std::vector<int64_t>& table_dims) {
  std::vector<int64_t> dims;
  for (int64_t table : tables) {
    if (table < 0 || table >= int64_t(table_dims.size()))
      fail("a feature reads table ", table, " of ", table_dims.size(), ".");
    dims.push_back(table_dims[table]);
  }
  return dims;
}

void check_dims(const Batch& batch, const Weights& weights) {
  for (const Lookup& lookup : batch.lookups)
    if (lookup.table >= 0 &&
        (lookup.table >= int64_t(weights.dims.size()) || weights.dims[lookup.table] != lookup.dim))
      fail("feature ", lookup.feature, " is ", lookup.dim, " wide but table ", lookup.table,
           " is not. Give dims as in the forward.");
}

Tensor checked_grad(const Tensor& grad, const Batch& batch) {
  if (grad.numel() != batch.out_size)
    fail("the gradient has ", grad.numel(), " elements; the forward gave ", batch.out_size, ".");
  if (grad.scalar_type() != ScalarType::Float)
    return as_contiguous(torch::stable::to(grad, ScalarType::Float));
  return as_contiguous(grad);
}

std::vector<Piece> cut(const Batch& batch) {
  constexpr int64_t kFloatsPerPiece = 1 << 17;
  std::vector<Piece> pieces;
  for (size_t l = 0; l < batch.lookups.size(); ++l) {
    const Lookup& lookup = batch.lookups[l];
    if (lookup.num_bags == 0) continue;
    // The division depends on the batch only, not on the number of threads.
    const int64_t work = (lookup.num_ids + lookup.num_bags) * lookup.dim;
    const int64_t parts = std::clamp<int64_t>(work / kFloatsPerPiece, 1, lookup.num_bags);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = lookup.num_bags * part / parts, last = lookup.num_bags * (part + 1) / parts;
      pieces.push_back({int64_t(l), lookup.first_bag + first, last - first});
    }
  }
  return pieces;
}

std::pair<std::string, std::string> names_of(const Lookup& lookup, const Tensor* names) {
  if (names == nullptr || names->numel() == 0)
    return {std::to_string(lookup.table), std::to_string(lookup.feature)};
  const Tensor bytes = as_contiguous(*names);
  std::string_view text(static_cast<const char*>(bytes.const_data_ptr()), bytes.numel());
  // A line per feature: table, tab, feature.
  for (int64_t line = 0; line < lookup.feature; ++line) text.remove_prefix(text.find('\n') + 1);
  const std::string table(text.substr(0, text.find('\t')));
  text.remove_prefix(text.find('\t') + 1);
  return {table, std::string(text.substr(0, text.find('\n')))};
}

void fail_for_id(const Batch& batch, int64_t index, int64_t num_rows, const Tensor* names) {
  const Lookup& lookup = batch.lookups[index];
  const auto [table, feature] = names_of(lookup, names);
  for (int64_t bag = lookup.first_bag; bag < lookup.first_bag + lookup.num_bags; ++bag) {
    for (int64_t i = batch.bags[bag]; i < batch.bags[bag + 1]; ++i) {
      const int64_t id = batch.id(i);
      if (id < 0 || id >= num_rows)
        fail("table '", table, "': id ", id, " of feature '", feature, "' (sample ", bag - lookup.first_bag,
             ") is outside [0, ", num_rows, "). Raise num_embeddings, or hash the ids.");
    }
  }
  fail("table '", table, "': an id of feature '", feature, "' was outside [0, ", num_rows,
       ") but changed since. Do not write to the input while it is looked up.");
}

}  // namespace meshrec
