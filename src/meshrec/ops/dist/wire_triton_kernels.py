"""The kernels of ``wire_triton.py``. Messages are bytes, because rows may begin anywhere in them."""

# mypy: disable-error-code="no-untyped-def, misc, untyped-decorator, no-untyped-call, operator, assignment"

import triton
import triton.language as tl

next_power_of_2 = triton.next_power_of_2


@triton.jit
def _store_word(message, at, word):
    for k in tl.static_range(4):
        tl.store(message + at + k, ((word >> (8 * k)) & 255).to(tl.uint8))


@triton.jit
def _load_word(message, at):
    word = tl.load(message + at).to(tl.int32)
    for k in tl.static_range(1, 4):
        word = word | (tl.load(message + at + k).to(tl.int32) << (8 * k))
    return word


@triton.jit
def _row_bits(start, key, column):
    """Return 32 random bits of a row; products wrap like those of uint64."""
    x = key * -7046029254386353131 + column * -4417276706812531889 + start
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)) & 0xFFFFFFFF


@triton.jit
def _noise(low, high, columns):
    """Return 16 random bits for every column, see ``wire_naive.Noise``."""
    x = (columns * 0x9E3779B9 + low) & 0xFFFFFFFF
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & 0xFFFFFFFF
    x = x ^ (x >> 15) ^ high
    x = (x * 0x846CA68B) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) & 0xFFFF).to(tl.int32)


@triton.jit
def _nearest(x):
    """Round to integers, halves to even."""
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
    """Encode one row of a column."""
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
            if FORMAT == 1:
                half = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
            else:
                raw = x.to(tl.int32, bitcast=True)
                half = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
                half = tl.where(x != x, (raw >> 16) | 0x40, half)
            for k in tl.static_range(2):
                tl.store(message + at + lanes * 2 + k, ((half >> (8 * k)) & 255).to(tl.uint8), inside)
    else:
        TOP: tl.constexpr = 127 if FORMAT == 3 else 7
        limit = 3.4028234663852886e38
        finite = (tl.abs(x) <= limit) & inside
        some = tl.max(finite.to(tl.int32), 0)
        least = tl.where(some > 0, tl.min(tl.where(finite, x, limit), 0), 0.0)
        most = tl.where(some > 0, tl.max(tl.where(finite, x, -limit), 0), 0.0)
        span = most - least
        fits = span <= limit
        scale = tl.where(fits, tl.div_rn(span, 2.0 * TOP), tl.div_rn(most, 2.0 * TOP) - tl.div_rn(least, 2.0 * TOP))
        scale = tl.maximum(scale, 7.703719777548943e-34)
        scale = ((scale.to(tl.int32, bitcast=True) + 0xFF) & -256).to(tl.float32, bitcast=True)
        middle = tl.where(fits, least + span * 0.5, least * 0.5 + most * 0.5)
        middle = tl.where(tl.abs(middle) < 7.703719777548943e-34, 0.0, middle)
        y = (tl.where(finite, x, middle) - middle) * (tl.div_rn(1.0, scale) * (65536.0 if STOCHASTIC else 1.0))
        codes = _nearest(y).to(tl.int32)
        scale_bits = scale.to(tl.int32, bitcast=True)
        middle_bits = middle.to(tl.int32, bitcast=True)
        if STOCHASTIC:
            key = first_key + row
            if keys is not None:
                key = tl.load(keys + row)
            low = _row_bits(start.to(tl.int64), key, scale_bits.to(tl.int64) & 0xFFFFFFFF)
            high = _row_bits(start.to(tl.int64), key, (middle_bits.to(tl.int64) & 0xFFFFFFFF) + 4294967296)
            codes = (codes + _noise(low, high, (origin + lanes).to(tl.int64))) >> 16
        codes = tl.minimum(tl.maximum(codes, -TOP), TOP)
        codes = tl.where(finite | (lanes >= dim), codes, -TOP - 1)
        up = tl.max(((x == float("inf")) & inside).to(tl.int32), 0)
        down = tl.max(((x == float("-inf")) & inside).to(tl.int32), 0)
        nan = tl.max(((x != x) & inside).to(tl.int32), 0)
        kind = tl.where((nan > 0) | (up + down > 1), 3, up + 2 * down)
        _store_word(message, at, scale_bits | kind)
        _store_word(message, at + 4, middle_bits)
        if FORMAT == 3:
            tl.store(message + at + 8 + lanes, (codes & 255).to(tl.uint8), inside)
        else:
            half = tl.where(inside, codes + 8, 0)
            if BLOCK == 1:
                tl.store(message + at + 8 + lanes, half.to(tl.uint8))
            else:
                pairs = tl.reshape(half, [BLOCK // 2, 2])
                weights = 1 + 15 * tl.arange(0, 2)
                both = tl.sum(pairs * weights[None, :], 1)
                place = tl.arange(0, BLOCK // 2)
                tl.store(message + at + 8 + place, both.to(tl.uint8), place < (dim + 1) // 2)
        if kind > 0:
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
    """Decode one row of a column."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < dim
    at = first_byte + row * row_bytes
    if FORMAT == 0:
        word = tl.load(message + at + lanes * 4, inside, 0).to(tl.int32)
        for k in tl.static_range(1, 4):
            word = word | (tl.load(message + at + lanes * 4 + k, inside, 0).to(tl.int32) << (8 * k))
        x = word.to(tl.float32, bitcast=True)
    elif FORMAT <= 2:
        half = tl.load(message + at + lanes * 2, inside, 0).to(tl.int32)
        half = half | (tl.load(message + at + lanes * 2 + 1, inside, 0).to(tl.int32) << 8)
        if FORMAT == 1:
            x = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            x = (half << 16).to(tl.float32, bitcast=True)
    else:
        TOP: tl.constexpr = 127 if FORMAT == 3 else 7
        scale_bits = _load_word(message, at)
        middle = _load_word(message, at + 4).to(tl.float32, bitcast=True)
        kind = scale_bits & 3
        scale = (scale_bits & -4).to(tl.float32, bitcast=True)
        if FORMAT == 3:
            codes = tl.load(message + at + 8 + lanes, inside, 0).to(tl.int8, bitcast=True).to(tl.int32)
        else:
            both = tl.load(message + at + 8 + lanes // 2, inside, 0).to(tl.int32)
            codes = ((both >> (4 * (lanes % 2))) & 15) - 8
        x = codes.to(tl.float32) * scale + middle
        other = tl.where(kind == 1, float("inf"), tl.where(kind == 2, float("-inf"), float("nan")))
        x = tl.where((kind > 0) & (codes == -TOP - 1), other, x)
    tl.store(values + first_element + row * row_elements + lanes, x, inside)
