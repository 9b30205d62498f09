// Encoded rows in a message: sizes, and iteration over columns.
#pragma once

#include <vector>

#include "dist/wire.h"
#include "isa/kernels.h"
#include "stable_abi.h"

namespace meshrec {

// As STOCHASTIC in ops/dist/wire_naive.py.
constexpr int64_t kWireStochastic = 8;

inline int64_t wire_bytes(int64_t format, int64_t dim) {
  switch (format & ~kWireStochastic) {
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

// The columns in each block: block b has the columns starts[b] to starts[b + 1].
struct WireColumns {
  const std::vector<int64_t>&starts, &widths, &formats;
  std::vector<int64_t> row_elements, row_bytes;  // by block
  // Whether all columns in a block have the same width and the same non-stochastic format. Columns can then
  // be treated as separate rows, so memory is read and written in a single pass.
  // For eight columns of width 64 outside the caches, this took 0.9 times as long as a copy, and 1.8 times
  // column by column.
  std::vector<char> is_uniform;

  WireColumns(size_t num_blocks, const std::vector<int64_t>& block_starts,
              const std::vector<int64_t>& column_widths, const std::vector<int64_t>& column_formats)
      : starts(block_starts), widths(column_widths), formats(column_formats) {
    if (starts.size() != num_blocks + 1 || starts.front() != 0 || starts.back() != int64_t(widths.size()) ||
        formats.size() != widths.size())
      fail("begins must have the first column of each of the ", num_blocks,
           " blocks and the number of columns, ", widths.size(), "; formats one entry for each column.");
    for (size_t b = 0; b < num_blocks; ++b) {
      int64_t elements = 0, bytes = 0;
      bool uniform = starts[b] < starts[b + 1] && (formats[starts[b]] & kWireStochastic) == 0;
      for (int64_t c = starts[b]; c < starts[b + 1]; ++c) {
        uniform = uniform && widths[c] == widths[starts[b]] && formats[c] == formats[starts[b]];
        if (widths[c] < 0) fail("a column has ", widths[c], " numbers.");
        elements += widths[c], bytes += wire_bytes(formats[c], widths[c]);
      }
      row_elements.push_back(elements), row_bytes.push_back(bytes), is_uniform.push_back(uniform);
    }
  }

  // Calls work(column, args, first column element in the row, first byte) for every column in a non-empty
  // block; or once for all columns, if they are uniform and all are requested.
  template <typename Work>
  void for_each(int64_t block, int64_t num_rows, std::vector<uint8_t>& scratch, bool all,
                const Work& work) const {
    int64_t element = 0, byte = 0, first = starts[block], end = starts[block + 1];
    // A uniform block of n rows with m columns is n * m separate rows: parameters are per row and column
    // anyway. Stochastic columns are excluded, because their seeds and origins differ.
    const int64_t together = all && is_uniform[block] ? end - first : 1;
    for (int64_t c = first; c < end; c += together) {
      WireRowsArgs args{};
      args.row_stride = row_elements[block] / together, args.num_rows = num_rows * together;
      args.dim = widths[c];
      if (int64_t(scratch.size()) <= widths[c]) scratch.resize(widths[c] + 1);
      args.message_stride = row_bytes[block] / together, args.scratch = scratch.data();
      args.format = int(formats[c] & ~kWireStochastic), args.stochastic = (formats[c] & kWireStochastic) != 0;
      if (widths[c] > 0) work(c, args, element, byte);
      element += widths[c], byte += wire_bytes(formats[c], widths[c]);
    }
  }

  // Decodes the columns that overlap [first, end) in a row; other columns are left unchanged.
  void decode(int64_t block, int64_t num_rows, const uint8_t* message, float* rows,
              std::vector<uint8_t>& scratch, int64_t first, int64_t end) const {
    const bool all = first <= 0 && end >= row_elements[block];
    for_each(block, num_rows, scratch, all, [&](int64_t, WireRowsArgs& args, int64_t element, int64_t byte) {
      if (element + args.dim <= first || element >= end) return;
      args.decoded = rows + element, args.message = const_cast<uint8_t*>(message) + byte;
      kernels().decode_wire(args);
    });
  }
};

}  // namespace meshrec
