import torch

from meshrec.ops import nbit
from meshrec.quant.search import search_params


def error(weight, rows, bits):
    return (nbit.dequantize(rows, bits, weight.shape[1]) - weight).square().sum(1)


def test_every_row_is_as_good_or_better():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(200, 24, generator=generator)
    weight[3], weight[4], weight[5] = 0.3, torch.arange(24) * 1e-9, 0.0
    for bits in (4, 2):
        rows = nbit.quantize(weight, bits)
        better = nbit.quantize(weight, bits, search_params(weight, rows, bits))
        before, after = error(weight, rows, bits), error(weight, better, bits)
        assert (after <= before * (1 + 1e-5) + 1e-12).all()
        assert after.sum() < 0.9 * before.sum()


def test_rows_on_a_grid_stay_exact():
    weight = torch.arange(16.0).repeat(3, 2)
    params = search_params(weight, nbit.quantize(weight, 4), 4)
    assert torch.equal(nbit.dequantize(nbit.quantize(weight, 4, params), 4, 32), weight)
