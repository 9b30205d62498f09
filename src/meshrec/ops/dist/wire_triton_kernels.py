"""Triton kernels for ``wire_triton.py``. Messages are bytes, because rows may start at any byte."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

next_power_of_2 = triton.next_power_of_2


@triton.jit
def _store_word(message, at, word):
    """Store a 32-bit word at any byte position, lowest byte first."""
    # Byte by byte, because the position may be unaligned.
    for k in tl.static_range(4):
        tl.store(message + at + k, ((word >> (8 * k)) & 255).to(tl.uint8))


@triton.jit
def _load_word(message, at):
    """Load a 32-bit word from any byte position, lowest byte first."""
    word = tl.load(message + at).to(tl.int32)
    for k in tl.static_range(1, 4):
        word = word | (tl.load(message + at + k).to(tl.int32) << (8 * k))
    return word


@triton.jit
def _row_bits(start, key, column):
    """Return 32 pseudo-random bits per row, as ``wire_naive.Noise._row_bits`` does.

    Products wrap as uint64 would.
    """
    x = key * -7046029254386353131 + column * -4417276706812531889 + start
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFFFFFF


@triton.jit
def _noise(low, high, columns):
    """Return 16 pseudo-random bits per value of a row, as ``wire_naive.Noise.bits`` does.

    Args:
        low: result of ``_row_bits`` for the scale.
        high: result of ``_row_bits`` for the midpoint.
    """
    x = (columns * 0x9E3779B9 + low) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15) ^ high
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def _round_to_even(x):
    """Round to the nearest integer, ties to even."""
    below = tl.floor(x)
    over = x - below
    is_odd = (below.to(tl.int32) & 1) == 1
    return below + ((over > 0.5) | ((over == 0.5) & is_odd)).to(tl.float32)


@triton.jit
def encode_rows(
    values,
    message,
    report,
    keys,
    first_element,
    row_elements,
    first_byte,
    row_bytes,
    dim,
    start,
    first_key,
    origin,
    FORMAT: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Encode a row in a column.

    Args:
        report: output, int64 [2]: number of rows with non-finite values, and position of the first such row.
        keys: row key per row, int64, or None.
        first_element: position in ``values`` at which the column starts.
        first_byte: position in ``message`` at which the column starts.
        first_key: key of row 0, without ``keys``.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    element = first_element + row * row_elements
    at = first_byte + row * row_bytes
    x = tl.load(values + element + lanes, inside, 0.0)
    if FORMAT <= 2:
        if FORMAT == 0:
            word = x.to(tl.int32, bitcast=True)
            for k in tl.static_range(4):
                tl.store(message + at + lanes * 4 + k, ((word >> (8 * k)) & 255).to(tl.uint8), inside)
        else:
            raw = x.to(tl.int32, bitcast=True)
            if FORMAT == 1:
                half = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
                nan = ((raw >> 16) & 0x8000) | 0x7E00 | ((raw >> 13) & 0x3FF)
            else:
                # To nearest, ties to even.
                half = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
                nan = (raw >> 16) | 0x40
            # The NaN bits do not depend on the device, see wire_naive.
            half = tl.where(x != x, nan, half)
            for k in tl.static_range(2):
                tl.store(message + at + lanes * 2 + k, ((half >> (8 * k)) & 255).to(tl.uint8), inside)
    else:
        TOP: tl.constexpr = 127 if FORMAT == 3 else 7
        limit = 3.4028234663852886e38
        finite = (tl.abs(x) <= limit) & inside
        # 0 if the row has no finite value; its range is then 0.
        some = tl.max(finite.to(tl.int32), 0)
        minimum = tl.where(some > 0, tl.min(tl.where(finite, x, limit), 0), 0.0)
        maximum = tl.where(some > 0, tl.max(tl.where(finite, x, -limit), 0), 0.0)
        span = maximum - minimum
        fits = span <= limit
        scale = tl.where(
            fits, tl.div_rn(span, 2.0 * TOP), tl.div_rn(maximum, 2.0 * TOP) - tl.div_rn(minimum, 2.0 * TOP)
        )
        # 2^-110, see wire_naive.MIN_SCALE.
        scale = tl.maximum(scale, 7.703719777548943e-34)
        # Round up to 16 significant bits, so that scale * code is exact.
        scale = ((scale.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
        midpoint = tl.where(fits, minimum + span * 0.5, minimum * 0.5 + maximum * 0.5)
        midpoint = tl.where(tl.abs(midpoint) < 7.703719777548943e-34, 0.0, midpoint)
        y = (tl.where(finite, x, midpoint) - midpoint) * (
            tl.div_rn(1.0, scale) * (65536.0 if STOCHASTIC else 1.0)
        )
        # With STOCHASTIC, codes have 16 fractional bits here, to which random bits are added below.
        codes = _round_to_even(y).to(tl.int32)
        scale_bits = scale.to(tl.int32, bitcast=True)
        midpoint_bits = midpoint.to(tl.int32, bitcast=True)
        if STOCHASTIC:
            # Row keys are the same on every rank, so a shard rounds like the whole table.
            key = first_key + row
            if keys is not None:
                key = tl.load(keys + row)
            low = _row_bits(start.to(tl.int64), key, scale_bits.to(tl.int64) & 0xFFFFFFFF)
            high = _row_bits(start.to(tl.int64), key, (midpoint_bits.to(tl.int64) & 0xFFFFFFFF) + 4294967296)
            codes = (codes + _noise(low, high, (origin + lanes).to(tl.int64))) >> 16
        # Rounding may exceed the range by 1.
        codes = tl.minimum(tl.maximum(codes, -TOP), TOP)
        codes = tl.where(finite | (lanes >= dim), codes, -TOP - 1)
        up = tl.max(((x == float("inf")) & inside).to(tl.int32), 0)
        down = tl.max(((x == float("-inf")) & inside).to(tl.int32), 0)
        nan = tl.max(((x != x) & inside).to(tl.int32), 0)
        # 1 infinity, 2 minus infinity, 3 NaN or several kinds.
        kind = tl.where((nan > 0) | (up + down > 1), 3, up + 2 * down)
        _store_word(message, at, scale_bits | kind)
        _store_word(message, at + 4, midpoint_bits)
        if FORMAT == 3:
            tl.store(message + at + 8 + lanes, (codes & 255).to(tl.uint8), inside)
        else:
            half = tl.where(inside, codes + 8, 0)
            # A single value cannot be reshaped into pairs.
            if BLOCK == 1:
                tl.store(message + at + 8 + lanes, half.to(tl.uint8))
            else:
                pairs = tl.reshape(half, [BLOCK // 2, 2])
                # 1 and 16: the second code of a pair goes to the upper half of the byte.
                weights = 1 + 15 * tl.arange(0, 2)
                packed = tl.sum(pairs * weights[None, :], 1)
                byte = tl.arange(0, BLOCK // 2)
                tl.store(message + at + 8 + byte, packed.to(tl.uint8), byte < (dim + 1) // 2)
        if kind > 0:
            # Integers, so the order of programs does not matter.
            tl.atomic_add(report, 1)
            tl.atomic_min(report + 1, element)


@triton.jit
def decode_rows(
    message,
    values,
    first_byte,
    row_bytes,
    first_element,
    row_elements,
    dim,
    FORMAT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Decode a row in a column.

    Args:
        first_byte: position in ``message`` at which the column starts.
        first_element: position in ``values`` at which the column starts.
    """
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    at = first_byte + row * row_bytes
    if FORMAT == 0:
        # Byte by byte, because rows may start at any byte.
        word = tl.load(message + at + lanes * 4, inside, 0).to(tl.int32)
        for k in tl.static_range(1, 4):
            word = word | (tl.load(message + at + lanes * 4 + k, inside, 0).to(tl.int32) << (8 * k))
        x = word.to(tl.float32, bitcast=True)
    elif FORMAT <= 2:
        half = tl.load(message + at + lanes * 2, inside, 0).to(tl.int32)
        half = half | (tl.load(message + at + lanes * 2 + 1, inside, 0).to(tl.int32) << 8)
        if FORMAT == 1:
            x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            # As in wire_naive: the NaN bits do not depend on the device.
            nan = ((half & 0x8000) << 16) | 0x7FC00000 | ((half & 0x3FF) << 13)
            x = tl.where((half & 0x7FFF) > 0x7C00, nan, x.to(tl.int32, bitcast=True)).to(
                tl.float32, bitcast=True
            )
        else:
            x = (half << 16).to(tl.float32, bitcast=True)
    else:
        TOP: tl.constexpr = 127 if FORMAT == 3 else 7
        scale_bits = _load_word(message, at)
        midpoint = _load_word(message, at + 4).to(tl.float32, bitcast=True)
        # The two lowest bits of the scale are flags, see wire_naive.
        kind = scale_bits & 3
        scale = (scale_bits & -4).to(tl.float32, bitcast=True)
        if FORMAT == 3:
            codes = tl.load(message + at + 8 + lanes, inside, 0).to(tl.int8, bitcast=True).to(tl.int32)
        else:
            packed = tl.load(message + at + 8 + lanes // 2, inside, 0).to(tl.int32)
            codes = ((packed >> (4 * (lanes % 2))) & 15) - 8
        x = codes.to(tl.float32) * scale + midpoint
        other = tl.where(kind == 1, float("inf"), tl.where(kind == 2, float("-inf"), float("nan")))
        x = tl.where((kind > 0) & (codes == -TOP - 1), other, x)
    tl.store(values + first_element + row * row_elements + lanes, x, inside)
