"""Encoding of table rows that ranks exchange (the wire format), in plain torch.

The reference for the kernels, and the fallback without them. A message consists of blocks, end to end. A
block holds rows. A row consists of columns. A column here is a group of values with the same format: for
example, a rank sends a block per table, in which every feature has a column. ``row_counts`` [B] is the row
count of each block, and ``first_columns`` [B + 1] is the number of its first column. ``widths`` [C] and
``formats`` [C] are the number of values and the format of each column. The formats are ``FLOAT`` to ``INT4``,
plus ``STOCHASTIC`` for stochastic rounding.

An int8 or int4 column has, in each row, an fp32 scale, an fp32 midpoint, and a signed code for each value.
The value is ``scale * code + midpoint``. A midpoint below 2^-110 becomes 0. Codes have a sign and 7 or 3
bits. Two 4-bit codes share a byte, the first in the lower half, as code + 8. The scale is the range of the
values divided by 254 (or 14), at least 2^-110, and rounded up to 16 significant bits. The product is
therefore exact, and only the sum is rounded, on every machine alike.

Non-finite values must survive, because gradient scalers look for them. They do not count for the range, and
are encoded as the lowest code. The two lowest bits of the scale say what this code means in the row: 1
infinity, 2 minus infinity, 3 NaN. If a row has several kinds, all of them become the NaN 0x7fc00000.

fp16 and bf16 preserve the sign and the upper payload bits of a NaN, and set the quiet bit, as F16C and
AVX512-BF16 do. torch casts do not: their NaN depends on the device, and on the position in the tensor.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.tbe.naive_update import shift_right, to_signed

# Shape legend: N rows, D values per column, B blocks, C columns.

FLOAT, HALF, BFLOAT16, INT8, INT4 = range(5)
"""Numbers of the wire formats."""
STOCHASTIC = 8
"""Added to the number of a format for stochastic rounding."""
PARAM_BYTES = 8
"""Bytes for scale and midpoint per row of an int8 or int4 column."""
# At least 2^-110, so that scale * code stays a normal fp32 number.
MIN_SCALE = 2.0**-110
# Formats that are plain casts.
_CASTS = {FLOAT: torch.float32, HALF: torch.float16, BFLOAT16: torch.bfloat16}


def column_bytes(format: int, dim: int) -> int:
    """Return the number of bytes that a column takes per row of a message.

    A column here is a group of ``dim`` values that have the same format.

    Raises:
        ValueError: unknown format.
    """
    kind = format & ~STOCHASTIC
    if kind in _CASTS:
        return dim * _CASTS[kind].itemsize
    if kind not in (INT8, INT4):
        raise ValueError(
            f"wire formats are numbered 0 to {INT4}, and {STOCHASTIC} more if rounding is stochastic; got "
            f"{format}."
        )
    return PARAM_BYTES + (dim if kind == INT8 else (dim + 1) // 2)


class _Column(NamedTuple):
    """Position of a column within the rows of a block. All values in a column have the same format."""

    number: int
    block: int
    """Number of the block."""
    elements: slice
    """Range of the values within a row."""
    bytes: slice
    """Range of the bytes within a row of the message."""


class _BlockRanges(NamedTuple):
    """Positions of a block in the tensor of fp32 values and in the encoded message.

    A message consists of blocks. A block has rows of equal size, such as the rows of a table.
    """

    rows: slice
    """Range of the rows, counted through all blocks."""
    element: int
    """Position in the values at which the block starts."""
    row_elements: int
    """Values per row."""
    byte: int
    """Position in the message at which the block starts."""
    row_bytes: int
    """Bytes per row."""
    columns: list[_Column]

    def view_of(self, flat: Tensor, row_size: int, start: int) -> Tensor:
        """Return the part of a flat tensor that belongs to the block, [N, ``row_size``], as a view.

        Args:
            start: position at which the block starts.
        """
        num_rows = self.rows.stop - self.rows.start
        return flat[start : start + num_rows * row_size].view(num_rows, row_size)


def block_ranges(
    row_counts: Sequence[int], first_columns: Sequence[int], widths: Sequence[int], formats: Sequence[int]
) -> Iterator[_BlockRanges]:
    """Yield the row, element and byte ranges of every block, in order.

    The blocks have C columns in total, numbered across all blocks.

    Args:
        first_columns: number of every block's first column, followed by C.
        widths: number of values per row, for every column.

    Raises:
        ValueError: the lists do not fit together.
    """
    if (
        len(first_columns) != len(row_counts) + 1
        or first_columns[0] != 0
        or not first_columns[-1] == len(widths) == len(formats)
    ):
        raise ValueError(
            f"begins must have the first column of each of the {len(row_counts)} blocks and the number of "
            f"columns, {len(widths)}; formats one entry for each column."
        )
    first_row = element = byte = 0
    for b, num_rows in enumerate(row_counts):
        # Positions within a row, in elements and in bytes.
        columns, at, at_byte = [], 0, 0
        for c in range(first_columns[b], first_columns[b + 1]):
            size = column_bytes(formats[c], widths[c])
            columns.append(_Column(c, b, slice(at, at + widths[c]), slice(at_byte, at_byte + size)))
            at, at_byte = at + widths[c], at_byte + size
        yield _BlockRanges(slice(first_row, first_row + num_rows), element, at, byte, at_byte, columns)
        first_row, element, byte = first_row + num_rows, element + num_rows * at, byte + num_rows * at_byte


def wire_encode(
    values: Tensor,
    row_counts: list[int],
    first_columns: list[int],
    widths: list[int],
    formats: list[int],
    seeds: list[int],
    table_columns: list[int],
    first_keys: list[int],
    keys: Tensor | None,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Encode the rows of all blocks as a message; see the module docstring for the format.

    Args:
        row_counts: row count per block; [B].
        first_columns: first column per block, followed by C; [B + 1].
        widths: values per row and column; [C].
        formats: format number per column, plus ``STOCHASTIC`` for stochastic rounding; [C].
        seeds: seed per column; [C]. Stochastic rounding depends on (seed, step, row key, column).
        table_columns: whole-table start column, per column; [C].
        first_keys: first row key per block; [B]. Row i has the key ``first_keys[block] + i``.
        keys: row key per row, int64, instead of ``first_keys``; or None.

    Returns:
        - The message, uint8, 1-D.
        - A report on non-finite values in int8 and int4 columns, int64 [2]. The first entry is the number of
          (row, column) pairs with a non-finite value. The second is the index in ``values`` at which
          the first such pair starts, or -1.

    Raises:
        ValueError: ``values`` has another dtype or size, or the lists do not fit together.
    """
    values = values.reshape(-1)
    blocks = list(block_ranges(row_counts, first_columns, widths, formats))
    size = sum((b.rows.stop - b.rows.start) * b.row_elements for b in blocks)
    if values.dtype != torch.float32 or values.numel() != size:
        raise ValueError(f"values must be {size} fp32 numbers, got {values.numel()} {values.dtype}.")
    message = values.new_empty(
        sum((b.rows.stop - b.rows.start) * b.row_bytes for b in blocks), dtype=torch.uint8
    )
    count = torch.zeros((), dtype=torch.int64, device=values.device)
    none = torch.iinfo(torch.int64).max
    first = torch.full((), none, device=values.device)
    for block in blocks:
        values_ND = block.view_of(values, block.row_elements, block.element)
        # A view, so that writing to it fills the message.
        coded = block.view_of(message, block.row_bytes, block.byte)
        row = torch.arange(len(values_ND), device=values.device)
        for column in block.columns:
            column_values = values_ND[:, column.elements].contiguous()
            noise = None
            if formats[column.number] & STOCHASTIC:
                row_keys = row + first_keys[column.block] if keys is None else keys[block.rows]
                # By row key and whole-table column, so that shards round like the whole table.
                noise = Noise(seeds[column.number], step, row_keys, table_columns[column.number])
            coded[:, column.bytes] = encode_column(column_values, formats[column.number], noise)
            if formats[column.number] & ~STOCHASTIC not in _CASTS:
                bad = ~column_values.isfinite().all(1)
                # Stays on the device, because the report must not synchronize.
                count += bad.sum()
                positions = block.element + row * block.row_elements + column.elements.start
                first = torch.minimum(first, torch.where(bad, positions, none).amin() if len(bad) else first)
    return message, torch.stack([count, torch.where(first == none, -1, first)])


def wire_decode(
    message: Tensor, row_counts: list[int], first_columns: list[int], widths: list[int], formats: list[int]
) -> Tensor:
    """Decode a message from ``wire_encode`` into fp32 values, flat.

    Args:
        row_counts, first_columns, widths, formats: as for ``wire_encode``.
    """
    blocks = list(block_ranges(row_counts, first_columns, widths, formats))
    size = sum((b.rows.stop - b.rows.start) * b.row_bytes for b in blocks)
    if message.dtype != torch.uint8 or message.numel() != size:
        raise ValueError(f"the message must be {size} bytes, got {message.numel()} {message.dtype}.")
    values = message.new_empty(
        sum((b.rows.stop - b.rows.start) * b.row_elements for b in blocks), dtype=torch.float32
    )
    for block in blocks:
        values_ND = block.view_of(values, block.row_elements, block.element)
        coded = block.view_of(message.reshape(-1), block.row_bytes, block.byte)
        for column in block.columns:
            dim = column.elements.stop - column.elements.start
            # A view, so that writing to it fills the values.
            values_ND[:, column.elements] = decode_column(coded[:, column.bytes], formats[column.number], dim)
    return values


def noise_start(seed: int, step: int) -> int:
    """Return the part of the random number counter that depends on seed and step, as int64.

    `Noise` adds the parts that depend on the row key and on the column.
    """
    return to_signed(seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5)


class Noise(NamedTuple):
    """Seeds for the stochastic rounding of N rows in a column.

    Attributes:
        seed: seed of the column.
        step: training step.
        keys: row key per row, int64 [N]. A row has the same key on every rank.
        origin: whole-table column at which the column starts.
    """

    seed: int
    step: int
    keys: Tensor
    origin: int

    def bits(self, scale: Tensor, midpoint: Tensor, dim: int) -> Tensor:
        """Return 16 pseudo-random bits per value, int64 [N, dim].

        Scale and midpoint are part of the seed, so that the bits change with the row even if no step is
        given.

        Args:
            scale: fp32 [N].
            midpoint: fp32 [N].
        """
        # Two 64-bit hashes per row, then a 32-bit hash per value, which vectorizes better.
        low = self._row_bits(_float_bits(scale))
        # Plus 2^32, so that a scale and a midpoint with equal bits give different hashes.
        high = self._row_bits(_float_bits(midpoint) + (1 << 32))
        columns = torch.arange(self.origin, self.origin + dim, device=self.keys.device)
        x = (columns * 0x9E3779B9 + low[:, None]) & _MASK
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D & _MASK
        x = x ^ (x >> 15) ^ high[:, None]
        x = x * 0x846CA68B & _MASK
        return (x ^ (x >> 16)) & 0xFFFF

    def _row_bits(self, column: Tensor) -> Tensor:
        """Return 32 pseudo-random bits per row, int64 [N]: splitmix64 of key, ``column``, seed, step."""
        x = self.keys * to_signed(0x9E3779B97F4A7C15) + column * to_signed(0xC2B2AE3D27D4EB4F)
        x = x + noise_start(self.seed, self.step)
        x = (x ^ shift_right(x, 30)) * to_signed(0xBF58476D1CE4E5B9)
        x = (x ^ shift_right(x, 27)) * to_signed(0x94D049BB133111EB)
        return (x ^ shift_right(x, 31)) & _MASK


# For 32-bit arithmetic in int64.
_MASK = 0xFFFFFFFF


def _float_bits(values_ND: Tensor) -> Tensor:
    """Return the bits of fp32 values, as non-negative int64."""
    return values_ND.view(torch.int32).long() & _MASK


def encode_column(values_ND: Tensor, format: int, noise: Noise | None) -> Tensor:
    """Encode the rows in a column.

    Args:
        values_ND: fp32 [N, D].
        noise: seeds for stochastic rounding, or None.

    Returns:
        uint8 [N, bytes].
    """
    kind, (num_rows, dim) = format & ~STOCHASTIC, values_ND.shape
    if kind in _CASTS:
        return _cast(values_ND, _CASTS[kind]).view(torch.uint8).view(num_rows, -1)
    coded = values_ND.new_zeros(num_rows, column_bytes(kind, dim), dtype=torch.uint8)
    if not coded.numel() or dim == 0:
        return coded
    # The lowest code, -top - 1, is reserved for non-finite values.
    top = 127 if kind == INT8 else 7
    finite = values_ND.isfinite()
    limit = torch.finfo(torch.float32).max
    # Rows without a finite value have no minimum.
    empty = ~finite.any(1)
    # Over finite values only. A row without finite values gets the range 0.
    minimum = torch.where(finite, values_ND, limit).amin(1).masked_fill(empty, 0.0)
    maximum = torch.where(finite, values_ND, -limit).amax(1).masked_fill(empty, 0.0)
    scale, midpoint = _scale_and_midpoint(minimum, maximum, top)
    # With noise, codes have 16 fractional bits, to which 16 random bits are added before truncation.
    inverse = (1.0 / scale) * (1.0 if noise is None else 65536.0)
    codes = (torch.where(finite, values_ND, 0.0) - midpoint[:, None]).mul(inverse[:, None])
    codes = torch.where(finite, codes, 0.0).round().long()
    if noise is not None:
        codes = (codes + noise.bits(scale, midpoint, dim)) >> 16
    codes = torch.where(finite, codes.clamp(-top, top), -top - 1)
    # The scale has only 16 significant bits, so its lowest bits are free.
    flags = _special_kinds(values_ND, finite)
    scale = (scale.view(torch.int32) | flags.int()).view(torch.float32)
    coded[:, :PARAM_BYTES] = torch.stack([scale, midpoint], 1).view(torch.uint8)
    if kind == INT8:
        coded[:, PARAM_BYTES:] = codes.to(torch.int8).view(torch.uint8)
    else:
        # Shifted to be non-negative, so that two codes fit into a byte.
        halves = torch.nn.functional.pad(codes + 8, (0, dim % 2)).to(torch.uint8)
        coded[:, PARAM_BYTES:] = halves[:, ::2] | halves[:, 1::2] << 4
    return coded


_NAN_BITS = {torch.float16: (13, 0x7E00, 0x3FF), torch.bfloat16: (16, 0x7FC0, 0x7F)}
"""Per dtype: how many fp32 mantissa bits it lacks, the bits of a quiet NaN, and the NaN payload mask."""


def _cast(values_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 values to the nearest fp16 or bf16. A NaN keeps its sign and upper payload bits."""
    if dtype not in _NAN_BITS:
        return values_ND
    shift, quiet, payload = _NAN_BITS[dtype]
    bits = values_ND.view(torch.int32)
    # Sign, quiet bit, and the upper payload bits.
    nan = (bits >> 16 & 0x8000) | quiet | (bits >> shift & payload)
    words = values_ND.to(dtype).view(torch.int16)
    return torch.where(values_ND.isnan(), nan.to(torch.int16), words)


def _cast_to_fp32(values_ND: Tensor) -> Tensor:
    """Convert fp16 or bf16 to fp32. A NaN keeps its sign and payload; an fp16 NaN becomes quiet."""
    words = values_ND.float()
    if values_ND.dtype != torch.float16:
        return words
    bits = values_ND.view(torch.int16).int()
    nan = (bits & 0x8000) << 16 | 0x7FC00000 | (bits & 0x3FF) << 13
    return torch.where(values_ND.isnan(), nan, words.view(torch.int32)).view(torch.float32)


def _scale_and_midpoint(minimum: Tensor, maximum: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return scale and midpoint per row, fp32 [N]."""
    # May overflow to infinity, although both are finite.
    span = maximum - minimum
    fits = span.isfinite()
    # A range above the fp32 maximum is divided before it is subtracted.
    scale = torch.where(fits, span / (2 * top), maximum / (2 * top) - minimum / (2 * top))
    # Round up to 16 significant bits, so that scale * code is exact in fp32.
    scale = ((scale.clamp(min=MIN_SCALE).view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
    # The finite value range may exceed fp32. Then halve before adding.
    midpoint = torch.where(fits, minimum + span * 0.5, minimum * 0.5 + maximum * 0.5)
    return scale, torch.where(midpoint.abs() < MIN_SCALE, 0.0, midpoint)


def _special_kinds(values_ND: Tensor, finite: Tensor) -> Tensor:
    """Return which non-finite values each row has, as the numbers in the module docstring; int64 [N]."""
    up, down, nan = (
        kind.any(1) for kind in (values_ND == torch.inf, values_ND == -torch.inf, values_ND.isnan())
    )
    several = nan | (up & down)
    return torch.where(several, 3, up.long() + 2 * down.long())


def decode_column(coded: Tensor, format: int, dim: int) -> Tensor:
    """Decode the rows in a column, fp32 [N, D].

    Args:
        coded: uint8 [N, bytes].
    """
    kind = format & ~STOCHASTIC
    if kind in _CASTS:
        return _cast_to_fp32(coded.contiguous().view(_CASTS[kind])).view(len(coded), dim)
    params = coded[:, :PARAM_BYTES].contiguous().view(torch.float32).view(-1, 2)
    # The two lowest bits are the flags.
    raw = params[:, 0].contiguous().view(torch.int32)
    scale, flags = (raw & ~3).view(torch.float32), raw & 3
    codes, top = coded[:, PARAM_BYTES:].contiguous(), 127
    if kind == INT4:
        codes, top = torch.stack([codes & 15, codes >> 4], 2).view(len(coded), -1)[:, :dim], 7
        # 4-bit codes are stored as code + 8.
        signed = codes.long() - 8
    else:
        signed = codes.view(torch.int8).long()
    values = signed.float() * scale[:, None] + params[:, 1:]
    # Indexed by flag; 0.0 is never used, because a marked row has a flag.
    kinds = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=coded.device)[flags.long()]
    # The lowest code means a non-finite value only if the row has a flag.
    marked = (signed == -top - 1) & (flags != 0)[:, None]
    return torch.where(marked, kinds[:, None], values)


implement([wire_encode, wire_decode])
