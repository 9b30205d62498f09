// Encodes rows of embeddings and gradients for their way between ranks. ops/dist/wire_naive.py documents
// arguments and results; wire.inl has the layout of a row.
#include <numeric>

#include "dist/router.h"
#include "host/memory.h"
#include "isa/kernels.h"

namespace meshrec {
namespace {

using Ints = std::vector<int64_t>;

// The least numbers per thread: with fewer, another thread does not pay.
constexpr int64_t kLeastNumbers = 1 << 15;
constexpr int64_t kStochastic = 8;

int64_t wire_bytes(int64_t format, int64_t dim) {
  switch (format & ~kStochastic) {
    case kWireFloat:
      return 4 * dim;
    case kWireHalf:
    case kWireBFloat16:
      return 2 * dim;
    case kWireInt8:
      return kWireParamBytes + dim;
    case kWireInt4:
      return kWireParamBytes + (dim + 1) / 2;
    default:
      fail("wire formats are numbered 0 to ", int(kNumWireCodes) - 1,
           ", and 8 more if rounding is stochastic; got ", format);
  }
}

// Some rows of one column of a block.
struct Piece {
  int64_t block, column, first_row, num_rows;
};

// Where the blocks of rows lie, in numbers and in bytes of the message.
struct Layout {
  const Ints &rows, &begins, &widths, &formats;
  Ints elements{0}, bytes{0}, row_elements, row_bytes, first_row{0};
  std::vector<Piece> pieces;

  Layout(const Ints& block_rows, const Ints& block_begins, const Ints& column_widths,
         const Ints& column_formats)
      : rows(block_rows), begins(block_begins), widths(column_widths), formats(column_formats) {
    if (begins.size() != rows.size() + 1 || begins.front() != 0 || begins.back() != int64_t(widths.size()) ||
        formats.size() != widths.size())
      fail("begins must have the first column of each of the ", rows.size(),
           " blocks and the number of columns, ", widths.size(), "; formats one entry for each column.");
    for (size_t b = 0; b < rows.size(); ++b) {
      int64_t dim = 0, length = 0;
      for (int64_t c = begins[b]; c < begins[b + 1]; ++c) {
        if (widths[c] < 0) fail("a column has ", widths[c], " numbers.");
        dim += widths[c], length += wire_bytes(formats[c], widths[c]);
      }
      if (rows[b] < 0) fail("a block has ", rows[b], " rows.");
      row_elements.push_back(dim), row_bytes.push_back(length);
      elements.push_back(elements.back() + rows[b] * dim);
      bytes.push_back(bytes.back() + rows[b] * length);
      first_row.push_back(first_row.back() + rows[b]);
      // All columns of a row range together, so that a row is still in the cache.
      const int64_t step = std::max<int64_t>(1, kLeastNumbers / std::max<int64_t>(dim, 1));
      for (int64_t row = 0; row < rows[b]; row += step)
        pieces.push_back({int64_t(b), 0, row, std::min(step, rows[b] - row)});
    }
  }

  // Runs work(piece, args) for every column of every piece of rows, in parallel.
  template <typename Work>
  void for_columns(const Work& work) const {
    int64_t widest = 0;
    for (int64_t width : widths) widest = std::max(widest, width);
    parallel_tasks(int64_t(pieces.size()), [&](int64_t number) {
      Piece piece = pieces[number];
      const int64_t b = piece.block;
      std::vector<uint8_t> scratch(widest + 65);
      int64_t element = elements[b] + piece.first_row * row_elements[b];
      int64_t byte = bytes[b] + piece.first_row * row_bytes[b];
      for (int64_t c = begins[b]; c < begins[b + 1]; ++c) {
        WireRowsArgs args{};
        args.row_stride = row_elements[b], args.num_rows = piece.num_rows, args.dim = widths[c];
        args.message_stride = row_bytes[b], args.scratch = scratch.data();
        args.format = int(formats[c] & ~kStochastic), args.stochastic = (formats[c] & kStochastic) != 0;
        piece.column = c;
        if (widths[c] > 0) work(piece, args, element, byte);
        element += widths[c], byte += wire_bytes(formats[c], widths[c]);
      }
    });
  }
};

std::tuple<Tensor, Tensor> wire_encode(Tensor values, Ints rows, Ints begins, Ints widths, Ints formats,
                                       Ints seeds, Ints origins, Ints first_keys, std::optional<Tensor> keys,
                                       int64_t step) {
  const Layout layout(rows, begins, widths, formats);
  const Tensor numbers = as_contiguous(values);
  if (numbers.scalar_type() != ScalarType::Float || numbers.numel() != layout.elements.back())
    fail("values must be ", layout.elements.back(), " fp32 numbers, got ", numbers.numel(), ".");
  if (seeds.size() != widths.size() || origins.size() != widths.size() || first_keys.size() != rows.size())
    fail("seeds and origins must have one entry for each column, and first_keys one for each block.");
  const int64_t* row_keys = nullptr;
  Tensor kept;
  if (keys) {
    kept = as_contiguous(*keys);
    if (kept.scalar_type() != ScalarType::Long || kept.numel() != layout.first_row.back())
      fail("keys must be int64, one for each of the ", layout.first_row.back(), " rows.");
    row_keys = kept.const_data_ptr<int64_t>();
  }
  Tensor message = empty_buffer({layout.bytes.back()}, ScalarType::Byte);
  Tensor report = empty_buffer({2}, ScalarType::Long);
  const auto* from = numbers.const_data_ptr<float>();
  auto* to = static_cast<uint8_t*>(message.mutable_data_ptr());
  std::atomic<int64_t> bad{0}, first_bad{INT64_MAX};
  layout.for_columns([&](const Piece& piece, WireRowsArgs& args, int64_t element, int64_t byte) {
    args.rows = from + element, args.message = to + byte;
    args.seed = uint64_t(seeds[piece.column]), args.step = uint64_t(step);
    args.first_column = origins[piece.column];
    args.first_key = uint64_t(first_keys[piece.block] + piece.first_row);
    args.keys = row_keys == nullptr ? nullptr : row_keys + layout.first_row[piece.block] + piece.first_row;
    int64_t first = 0;
    args.first_bad = &first;
    const int64_t found = kernels().encode_wire(args);
    if (found == 0) return;
    bad += found;
    atomic_min(first_bad, element + first * args.row_stride);
  });
  auto* told = report.mutable_data_ptr<int64_t>();
  told[0] = bad, told[1] = bad == 0 ? -1 : first_bad.load();
  return {message, report};
}

Tensor wire_decode(Tensor message, Ints rows, Ints begins, Ints widths, Ints formats) {
  const Layout layout(rows, begins, widths, formats);
  const Tensor bytes = as_contiguous(message);
  if (bytes.scalar_type() != ScalarType::Byte || bytes.numel() != layout.bytes.back())
    fail("the message must be ", layout.bytes.back(), " bytes, got ", bytes.numel(), ".");
  Tensor values = empty_buffer({layout.elements.back()}, ScalarType::Float);
  auto* from = const_cast<uint8_t*>(static_cast<const uint8_t*>(bytes.const_data_ptr()));
  auto* to = values.mutable_data_ptr<float>();
  layout.for_columns([&](const Piece&, WireRowsArgs& args, int64_t element, int64_t byte) {
    args.decoded = to + element, args.message = from + byte;
    kernels().decode_wire(args);
  });
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("wire_encode", TORCH_BOX(&wire_encode));
  m.impl("wire_decode", TORCH_BOX(&wire_decode));
}

}  // namespace meshrec
