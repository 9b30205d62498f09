"""What the rows are: FBGEMM's rounding by its formula, the layout, and the refusals."""

import pytest
import torch

from meshrec.ops import nbit, operators
from meshrec.ops.nbit import naive

OPS = operators
ALL = pytest.mark.parametrize("ops", [OPS, naive], ids=["kernels", "naive"])
BITS = pytest.mark.parametrize("bits", [8, 4, 2])


@ALL
def test_rounding_by_hand(ops):
    rows = ops.nbit_quantize(torch.tensor([[1.0, 2.5, 3.0, 4.0, 4.0]]), 2, None)
    # bias 1, scale 1, codes 0, 1.5 -> 2, 2, 3 in one byte and 3 in the next, up to 8 bytes
    assert rows.tolist() == [[0x00, 0x3C, 0x00, 0x3C, 0b11_10_10_00, 0b11, 0, 0]]
    assert ops.nbit_dequantize(rows, 2, 5).tolist() == [[1.0, 3.0, 3.0, 4.0, 4.0]]


@ALL
@BITS
def test_halves_go_to_the_even_code(ops, bits):
    top = 2**bits - 1
    row = torch.tensor([[0.0, 0.5, 1.5, 2.5, float(top)]])
    assert ops.nbit_dequantize(ops.nbit_quantize(row, bits, None), bits, 5).tolist() == [[0, 0, 2, 2, top]]


@ALL
@BITS
def test_corner_rows(ops, bits):
    equal = ops.nbit_quantize(torch.full((1, 3), 0.25), bits, None)
    assert equal[0, :4].view(torch.float16).tolist() == [1.0, 0.25]
    tiny = torch.tensor([[0.0, 1e-9, 2e-9]])  # the scale is 0 in fp16
    assert ops.nbit_quantize(tiny, bits, None)[0, :4].view(torch.float16)[0] == 1
    # fp16 of the least number is above all of them: the scale is negative
    above = torch.full((1, 4), 0.3)
    assert ops.nbit_quantize(above, bits, None)[0, :4].view(torch.float16)[0] < 0
    back = ops.nbit_dequantize(ops.nbit_quantize(above, bits, None), bits, 4)
    assert torch.allclose(back, above, atol=1e-6)


@BITS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [1, 2, 3, 7, 16, 64, 515, 1030])
def test_kernels_quantise_like_naive(bits, dtype, dim):
    weight = torch.randn(40, dim, generator=torch.Generator().manual_seed(dim)).to(dtype)
    weight[3] = 0.3
    weight[4] *= 1e-7
    rows = OPS.nbit_quantize(weight, bits, None)
    assert torch.equal(rows, naive.nbit_quantize(weight, bits, None))
    assert rows.shape[1] == nbit.row_bytes(dim, bits)
    assert torch.equal(OPS.nbit_dequantize(rows, bits, dim), naive.nbit_dequantize(rows, bits, dim))
    params = rows[:, :4].contiguous().view(torch.float16)
    assert torch.equal(OPS.nbit_quantize(weight, bits, params), rows)
    other = params * torch.tensor([0.5, 0.25], dtype=torch.float16)
    other[other[:, 0] == 0, 0] = 1
    assert torch.equal(OPS.nbit_quantize(weight, bits, other), naive.nbit_quantize(weight, bits, other))


@ALL
@BITS
def test_no_rows(ops, bits):
    rows = ops.nbit_quantize(torch.empty(0, 5), bits, None)
    assert rows.shape == (0, nbit.row_bytes(5, bits))
    assert ops.nbit_dequantize(rows, bits, 5).shape == (0, 5)


@BITS
@pytest.mark.parametrize("dim", [1, 3, 8, 64, 65])
def test_fbgemm_bytes_there_and_back(bits, dim):
    rows = nbit.quantize(torch.randn(9, dim), bits)
    fused = nbit.to_fbgemm_bytes(rows, bits, dim)
    assert fused.shape == (9, nbit.code_bytes(dim, bits) + 4)
    assert torch.equal(nbit.from_fbgemm_bytes(fused, bits, dim), rows)
    with pytest.raises(ValueError, match="FBGEMM"):
        nbit.from_fbgemm_bytes(rows.float(), bits, dim)
    with pytest.raises(ValueError, match=r"^rows of .* are .* Give the width"):
        nbit.to_fbgemm_bytes(rows, bits, dim + 64)


@ALL
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e6, -1e6])
def test_bad_numbers_are_named_by_row(ops, bad):
    weight = torch.randn(50, 70)
    weight[31, 64] = weight[40, 3] = bad
    with pytest.raises(ValueError, match=r"row 31.*NaN.*fp16"):
        ops.nbit_quantize(weight, 4, None)


@ALL
def test_refusals(ops):
    weight = torch.randn(4, 6)
    with pytest.raises(ValueError, match=r"8.*4.*2 bits.*3"):
        ops.nbit_quantize(weight, 3, None)
    with pytest.raises(ValueError, match=r"fp16.*4 rows"):
        ops.nbit_quantize(weight, 4, torch.ones(4, 2))
    for bad in ([0.0, 1.0], [float("nan"), 0.0], [1.0, float("inf")]):
        params = torch.tensor([[1.0, 0.0]] * 2 + [bad] + [[1.0, 0.0]], dtype=torch.float16)
        with pytest.raises(ValueError, match=r"row 2.*0"):
            ops.nbit_quantize(weight, 4, params)
    with pytest.raises(ValueError, match="column"):
        ops.nbit_quantize(weight[:, :0], 4, None)
    with pytest.raises(ValueError, match=r"rows of 8 (bytes|uint8)"):
        ops.nbit_dequantize(torch.zeros(4, 12, dtype=torch.uint8), 4, 6)
    for dim in (0, -1):
        with pytest.raises(ValueError, match=f"{dim}"):
            ops.nbit_dequantize(torch.zeros(4, 4, dtype=torch.uint8), 8, dim)


def test_ops_pass_opcheck(make_case):
    weight = torch.randn(5, 7)
    rows = nbit.quantize(weight, 4)
    torch.library.opcheck(torch.ops.meshrec.nbit_quantize, (weight, 4, None))
    torch.library.opcheck(torch.ops.meshrec.nbit_dequantize, (rows, 4, 7))
    for options in ({}, {"flat": True}):
        case = make_case(**options)
        bits = [8, 0, 2]
        tables = [w if b == 0 else nbit.quantize(w, b) for w, b in zip(case.weights, bits, strict=True)]
        args = (tables, bits, *case.lookups, case.dims, case.out_size, torch.float32, True)
        torch.library.opcheck(torch.ops.meshrec.nbit_forward, (*args, torch.empty(0, dtype=torch.uint8)))
