"""Rows as they travel between ranks, in plain torch: the reference for every kernel, and the fallback.

A message is a sequence of blocks. A block has rows; a row has columns, one after the other; a column is some
numbers in one format. ``rows`` [B] has the number of rows of each block, ``begins`` [B + 1] the first of its
columns, ``widths`` and ``formats`` [C] the columns. Formats are numbered as in ``FORMAT_BYTES``; ``STOCHASTIC``
is added for stochastic rounding.

A column of int8 or int4 is its scale and its middle, fp32, and a signed code for each number. The number is
``scale * code + middle``; a middle below 2^-110 is 0. Codes have a sign and 7 bits, or 3 bits; two codes of 4 bits share a byte, the first
in the lower half, as code + 8. The scale is the range of the column over 254 (or 14), at least 2^-110, rounded
up to 16 significant bits. So the product is exact and the sum is rounded once, on every machine.

Numbers that are not finite do not stop a message, because gradient scalers look for them. They take no part in
the range and travel as the lowest code. The two lowest bits of the scale say what that code means in this row:
1 infinity, 2 minus infinity, 3 NaN (or several kinds, which all arrive as NaN).
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.tbe.naive_update import shifted, signed

# N rows, D numbers of a column, B blocks, C columns

FLOAT, HALF, BFLOAT16, INT8, INT4 = range(5)
STOCHASTIC = 8
PARAM_BYTES = 8
LEAST_SCALE = 2.0**-110
_CASTS = {FLOAT: torch.float32, HALF: torch.float16, BFLOAT16: torch.bfloat16}


def column_bytes(format: int, dim: int) -> int:
    """Return the bytes of one row of a column of ``dim`` numbers.

    Raises:
        ValueError: no format has this number.
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
    """One column of one block."""

    number: int
    block: int
    elements: slice
    """Its place in a row, in numbers."""
    bytes: slice
    """Its place in a row of the message."""


class _BlockPlaces(NamedTuple):
    rows: slice
    """The places of its rows among those of all blocks."""
    element: int
    """Its first number."""
    row_elements: int
    byte: int
    row_bytes: int
    columns: list[_Column]

    def of(self, flat: Tensor, row_size: int, begin: int) -> Tensor:
        """Return its part of a flat tensor, [N, ``row_size``]."""
        num_rows = self.rows.stop - self.rows.start
        return flat[begin : begin + num_rows * row_size].view(num_rows, row_size)


def blocks_of(
    rows: Sequence[int], begins: Sequence[int], widths: Sequence[int], formats: Sequence[int]
) -> Iterator[_BlockPlaces]:
    if len(begins) != len(rows) + 1 or begins[0] != 0 or begins[-1] != len(widths) != len(formats):
        raise ValueError(
            f"begins must have the first column of each of the {len(rows)} blocks and the number of columns, "
            f"{len(widths)}; formats one entry for each column."
        )
    first_row = element = byte = 0
    for b, num_rows in enumerate(rows):
        columns, at, at_byte = [], 0, 0
        for c in range(begins[b], begins[b + 1]):
            size = column_bytes(formats[c], widths[c])
            columns.append(
                _Column(c, b, slice(at, at + widths[c]), slice(at_byte, at_byte + size))
            )
            at, at_byte = at + widths[c], at_byte + size
        yield _BlockPlaces(slice(first_row, first_row + num_rows), element, at, byte, at_byte, columns)
        first_row, element, byte = first_row + num_rows, element + num_rows * at, byte + num_rows * at_byte


def wire_encode(
    values: Tensor,
    rows: list[int],
    begins: list[int],
    widths: list[int],
    formats: list[int],
    seeds: list[int],
    origins: list[int],
    first_keys: list[int],
    keys: Tensor | None,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Encode the rows of consecutive blocks.

    Args:
        values: fp32, flat, block by block.
        rows: see the module.
        begins: see the module.
        widths: see the module.
        formats: see the module.
        seeds: [C]; stochastic rounding draws from (seed, step, key of the row, number's column).
        origins: [C]; the column's place in its whole table.
        first_keys: [B]; row i of a block has the key ``first_keys[block] + i``.
        keys: int64, a key for each row instead; or None.
        step: see ``seeds``.

    Returns:
        The message, uint8, flat; and int64 [2], the number of rows in columns of codes with numbers that are
            not finite, and the place in ``values`` of the first of them (-1 if there is none).
    """
    values = values.reshape(-1)
    blocks = list(blocks_of(rows, begins, widths, formats))
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
        numbers = block.of(values, block.row_elements, block.element)
        coded = block.of(message, block.row_bytes, block.byte)
        number = torch.arange(len(numbers), device=values.device)
        for column in block.columns:
            own = numbers[:, column.elements].contiguous()
            noise = None
            if formats[column.number] & STOCHASTIC:
                own_keys = number + first_keys[column.block] if keys is None else keys[block.rows]
                noise = Noise(seeds[column.number], step, own_keys, origins[column.number])
            coded[:, column.bytes] = encode_column(own, formats[column.number], noise)
            if formats[column.number] & ~STOCHASTIC not in _CASTS:
                bad = ~own.isfinite().all(1)
                count += bad.sum()
                places = block.element + number * block.row_elements + column.elements.start
                first = torch.minimum(first, torch.where(bad, places, none).amin() if len(bad) else first)
    return message, torch.stack([count, torch.where(first == none, -1, first)])


def wire_decode(
    message: Tensor, rows: list[int], begins: list[int], widths: list[int], formats: list[int]
) -> Tensor:
    """Decode what ``wire_encode`` encoded: fp32, flat."""
    blocks = list(blocks_of(rows, begins, widths, formats))
    size = sum((b.rows.stop - b.rows.start) * b.row_bytes for b in blocks)
    if message.dtype != torch.uint8 or message.numel() != size:
        raise ValueError(f"the message must be {size} bytes, got {message.numel()} {message.dtype}.")
    values = message.new_empty(
        sum((b.rows.stop - b.rows.start) * b.row_elements for b in blocks), dtype=torch.float32
    )
    for block in blocks:
        numbers = block.of(values, block.row_elements, block.element)
        coded = block.of(message.reshape(-1), block.row_bytes, block.byte)
        for column in block.columns:
            dim = column.elements.stop - column.elements.start
            numbers[:, column.elements] = decode_column(coded[:, column.bytes], formats[column.number], dim)
    return values


def noise_start(seed: int, step: int) -> int:
    """Return what a column and a step add to the counters of their noise, as int64."""
    return signed(seed * 0x165667B19E3779F9 + step * 0x27D4EB2F165667C5)


class Noise(NamedTuple):
    """The seeds of the stochastic rounding of N rows of a column."""

    seed: int
    step: int
    keys: Tensor
    origin: int

    def bits(self, scale: Tensor, middle: Tensor, dim: int) -> Tensor:
        """Return 16 random bits for each number, int64 [N, dim].

        The scale and the middle are drawn from too: tables without a step draw afresh when rows change.
        """
        low = self._row_bits(_bits_of(scale))
        high = self._row_bits(_bits_of(middle) + (1 << 32))
        columns = torch.arange(self.origin, self.origin + dim, device=self.keys.device)
        x = (columns * 0x9E3779B9 + low[:, None]) & _MASK
        x = x ^ (x >> 16)
        x = x * 0x7FEB352D & _MASK
        x = x ^ (x >> 15) ^ high[:, None]
        x = x * 0x846CA68B & _MASK
        return (x ^ (x >> 16)) & 0xFFFF

    def _row_bits(self, column: Tensor) -> Tensor:
        x = self.keys * signed(0x9E3779B97F4A7C15) + column * signed(0xC2B2AE3D27D4EB4F)
        x = x + noise_start(self.seed, self.step)
        x = (x ^ shifted(x, 30)) * signed(0xBF58476D1CE4E5B9)
        x = (x ^ shifted(x, 27)) * signed(0x94D049BB133111EB)
        return (x ^ shifted(x, 31)) & _MASK


_MASK = 0xFFFFFFFF


def _bits_of(numbers: Tensor) -> Tensor:
    return numbers.view(torch.int32).long() & _MASK


def encode_column(numbers: Tensor, format: int, noise: Noise | None) -> Tensor:
    """Encode rows [N, D], fp32, in one format; the result is uint8 [N, bytes]."""
    kind, (num_rows, dim) = format & ~STOCHASTIC, numbers.shape
    if kind in _CASTS:
        return numbers.to(_CASTS[kind]).view(torch.uint8).view(num_rows, -1)
    coded = numbers.new_zeros(num_rows, column_bytes(kind, dim), dtype=torch.uint8)
    if not coded.numel() or dim == 0:
        return coded
    top = 127 if kind == INT8 else 7
    finite = numbers.isfinite()
    limit = torch.finfo(torch.float32).max
    empty = ~finite.any(1)
    least = torch.where(finite, numbers, limit).amin(1).masked_fill(empty, 0.0)
    most = torch.where(finite, numbers, -limit).amax(1).masked_fill(empty, 0.0)
    scale, middle = _params(least, most, top)
    inverse = (1.0 / scale) * (1.0 if noise is None else 65536.0)
    codes = (torch.where(finite, numbers, 0.0) - middle[:, None]).mul(inverse[:, None])
    codes = torch.where(finite, codes, 0.0).round().long()
    if noise is not None:
        codes = (codes + noise.bits(scale, middle, dim)) >> 16
    codes = torch.where(finite, codes.clamp(-top, top), -top - 1)
    flags = _others(numbers, finite)
    scale = (scale.view(torch.int32) | flags.int()).view(torch.float32)
    coded[:, :PARAM_BYTES] = torch.stack([scale, middle], 1).view(torch.uint8)
    if kind == INT8:
        coded[:, PARAM_BYTES:] = codes.to(torch.int8).view(torch.uint8)
    else:
        halves = torch.nn.functional.pad(codes + 8, (0, dim % 2)).to(torch.uint8)
        coded[:, PARAM_BYTES:] = halves[:, ::2] | halves[:, 1::2] << 4
    return coded


def _params(least: Tensor, most: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Return the scales and the middles of rows with these extremes, fp32 [N]."""
    span = most - least
    fits = span.isfinite()
    scale = torch.where(fits, span / (2 * top), most / (2 * top) - least / (2 * top))
    scale = ((scale.clamp(min=LEAST_SCALE).view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
    middle = torch.where(fits, least + span * 0.5, least * 0.5 + most * 0.5)
    return scale, torch.where(middle.abs() < LEAST_SCALE, 0.0, middle)


def _others(numbers: Tensor, finite: Tensor) -> Tensor:
    """Return the kind of the numbers of each row that are not finite, see the module; int64 [N]."""
    up, down, nan = (
        kind.any(1) for kind in (numbers == torch.inf, numbers == -torch.inf, numbers.isnan())
    )
    several = nan | (up & down)
    return torch.where(several, 3, up.long() + 2 * down.long())


def decode_column(coded: Tensor, format: int, dim: int) -> Tensor:
    """Decode rows [N, bytes], uint8; the result is fp32 [N, D]."""
    kind = format & ~STOCHASTIC
    if kind in _CASTS:
        return coded.contiguous().view(_CASTS[kind]).view(len(coded), dim).float()
    params = coded[:, :PARAM_BYTES].contiguous().view(torch.float32).view(-1, 2)
    raw = params[:, 0].contiguous().view(torch.int32)
    scale, flags = (raw & ~3).view(torch.float32), raw & 3
    codes, top = coded[:, PARAM_BYTES:].contiguous(), 127
    if kind == INT4:
        codes, top = torch.stack([codes & 15, codes >> 4], 2).view(len(coded), -1)[:, :dim], 7
        signed = codes.long() - 8
    else:
        signed = codes.view(torch.int8).long()
    values = signed.float() * scale[:, None] + params[:, 1:]
    kinds = torch.tensor([0.0, torch.inf, -torch.inf, torch.nan], device=coded.device)[flags.long()]
    marked = (signed == -top - 1) & (flags != 0)[:, None]
    return torch.where(marked, kinds[:, None], values)


implement([wire_encode, wire_decode])
