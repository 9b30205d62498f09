"""Fixed tables stream and load the memory of their parameter, by rows and columns of the whole table."""

import pytest
import torch
from torch import nn

from meshrec.optim import Adam
from meshrec.tables.dense.rows import DenseRows, QuantisedRows
from meshrec.tables.dense.table import FixedTable
from meshrec.tables.packing import Packing
from meshrec.tables.table import Rectangle, RowBlock

RECTANGLES = [Rectangle(0, 10, 14, 0, 4), Rectangle(0, 20, 23, 4, 8)]


def table_of(storage, spec=None, number=1):
    packing = Packing(RECTANGLES, storage)
    memory = storage.allocate(*packing.shape, None)
    memory.copy_(torch.arange(memory.numel()).view_as(memory) % 100)
    state = storage.new_state(spec, 3, 4, None)
    return FixedTable(nn.Parameter(memory, requires_grad=False), packing, number, state, spec)


def test_streamed_blocks_are_views_of_the_chosen_rows_and_columns():
    table = table_of(DenseRows(torch.float32), Adam(lr=0.1))
    (block,) = table.stream((5, 7), keys=(0, 22))
    assert (block.keys, block.columns) == (range(20, 22), (5, 7))
    assert torch.equal(block.parts["weight"], table.rows[:2, 1:3])
    block.parts["weight"].zero_()
    assert table.rows[:2, 1:3].count_nonzero() == 0
    assert list(table.stream(keys=(30, 40))) == []


@pytest.mark.parametrize("keys", [range(21, 23), torch.tensor([20, 22])])
def test_loading_changes_only_the_given_rows_columns_and_parts(keys):
    table = table_of(DenseRows(torch.bfloat16), Adam(lr=0.1))
    before = {name: tensor.clone() for name, tensor in table.tensors().items()}
    table.load([RowBlock(keys, (6, 8), {"weight": torch.full((2, 2), 7.0)})])
    before["weight"][[key - 20 for key in list(keys)], 2:4] = 7
    assert all(torch.equal(tensor, before[name]) for name, tensor in table.tensors().items())


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_blocks_of_quantised_rows_have_codes_scales_and_biases(bits):
    source, target = (table_of(QuantisedRows(bits)) for _ in range(2))
    target.rows.zero_()
    (block,) = source.stream()
    assert block.parts["weight"].shape == (3, 4 * bits // 8)
    target.load([block])
    for name, part in source.tensors().items():
        assert torch.equal(target.tensors()[name], part), name
