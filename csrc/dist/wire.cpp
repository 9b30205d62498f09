// Encodes rows of embeddings and gradients for transfer between ranks. ops/dist/wire_naive.py documents
// arguments and results; wire.inl describes the row format.
#include <numeric>

#include "dist/router.h"
#include "dist/wire_rows.h"
#include "host/memory.h"

namespace meshrec {
namespace {

using Ints = std::vector<int64_t>;

// Minimum number of values per thread: with fewer, another thread costs more than it saves.
constexpr int64_t kMinNumbers = 1 << 15;
// Some rows in a block.
struct Piece {
  int64_t block, first_row, num_rows;
};

// Positions of blocks, in values and in message bytes.
struct Layout : WireColumns {
  Ints elements{0}, bytes{0}, first_row{0};
  std::vector<Piece> pieces;

  Layout(const Ints& rows, const Ints& block_starts, const Ints& column_widths, const Ints& column_formats)
      : WireColumns(rows.size(), block_starts, column_widths, column_formats) {
    for (size_t b = 0; b < rows.size(); ++b) {
      if (rows[b] < 0) fail("a block has ", rows[b], " rows.");
      elements.push_back(elements.back() + rows[b] * row_elements[b]);
      bytes.push_back(bytes.back() + rows[b] * row_bytes[b]);
      first_row.push_back(first_row.back() + rows[b]);
      // All columns for a row range together, while the rows are in the cache.
      // Stochastic rounding does not depend on this division (wire.inl), so it may follow the row width.
      const int64_t step = std::max<int64_t>(1, kMinNumbers / std::max<int64_t>(row_elements[b], 1));
      for (int64_t row = 0; row < rows[b]; row += step)
        pieces.push_back({int64_t(b), row, std::min(step, rows[b] - row)});
    }
  }

  // Runs work(piece, first element, first byte, scratch) for every piece, in parallel.
  template <typename Work>
  void for_pieces(const Work& work) const {
    parallel_tasks(int64_t(pieces.size()), [&](int64_t number) {
      thread_local std::vector<uint8_t> scratch;
      const Piece& piece = pieces[number];
      const int64_t b = piece.block;
      work(piece, elements[b] + piece.first_row * row_elements[b], bytes[b] + piece.first_row * row_bytes[b],
           scratch);
    });
  }
};

std::tuple<Tensor, Tensor> wire_encode(Tensor values, Ints rows, Ints starts, Ints widths, Ints formats,
                                       Ints seeds, Ints origins, Ints first_keys, std::optional<Tensor> keys,
                                       int64_t step) {
  const Layout layout(rows, starts, widths, formats);
  const Tensor numbers = as_contiguous(values);
  if (numbers.scalar_type() != ScalarType::Float || numbers.numel() != layout.elements.back())
    fail("values must be ", layout.elements.back(), " fp32 numbers, got ", numbers.numel(), ".");
  if (seeds.size() != widths.size() || origins.size() != widths.size() || first_keys.size() != rows.size())
    fail("seeds and origins must have one entry for each column, and first_keys one for each block.");
  const int64_t* row_keys = nullptr;
  // Keeps the memory alive to which `row_keys` points.
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
  const auto encode_piece = [&](const Piece& piece, int64_t first_element, int64_t first_byte,
                                std::vector<uint8_t>& scratch) {
    const int64_t b = piece.block;
    const auto encode = [&](int64_t column, WireRowsArgs& args, int64_t element, int64_t byte) {
      args.rows = from + first_element + element, args.message = to + first_byte + byte;
      args.seed = uint64_t(seeds[column]), args.step = uint64_t(step);
      args.first_column = origins[column], args.to_l1 = prefetch_to_l1();
      args.first_key = uint64_t(first_keys[b] + piece.first_row);
      args.keys = row_keys == nullptr ? nullptr : row_keys + layout.first_row[b] + piece.first_row;
      int64_t first = 0;
      args.first_bad = &first;
      const int64_t found = kernels().encode_wire(args);
      if (found == 0) return;
      bad += found;
      atomic_min(first_bad, first_element + element + first * args.row_stride);
    };
    layout.for_each(b, piece.num_rows, scratch, true, encode);
  };
  layout.for_pieces(encode_piece);
  auto* told = report.mutable_data_ptr<int64_t>();
  told[0] = bad, told[1] = bad == 0 ? -1 : first_bad.load();
  return {message, report};
}

Tensor wire_decode(Tensor message, Ints rows, Ints starts, Ints widths, Ints formats) {
  const Layout layout(rows, starts, widths, formats);
  const Tensor bytes = as_contiguous(message);
  if (bytes.scalar_type() != ScalarType::Byte || bytes.numel() != layout.bytes.back())
    fail("the message must be ", layout.bytes.back(), " bytes, got ", bytes.numel(), ".");
  Tensor values = empty_buffer({layout.elements.back()}, ScalarType::Float);
  const auto* from = static_cast<const uint8_t*>(bytes.const_data_ptr());
  auto* to = values.mutable_data_ptr<float>();
  layout.for_pieces([&](const Piece& piece, int64_t element, int64_t byte, std::vector<uint8_t>& scratch) {
    layout.decode(piece.block, piece.num_rows, from + byte, to + element, scratch, 0,
                  layout.row_elements[piece.block]);
  });
  return values;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(meshrec, CPU, m) {
  m.impl("wire_encode", TORCH_BOX(&wire_encode));
  m.impl("wire_decode", TORCH_BOX(&wire_decode));
}

}  // namespace meshrec
