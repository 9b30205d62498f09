import pytest
import torch
from torch import nn

from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.local_shards import LocalShards, parameter_shard
from meshrec.tables.packing import Packing, RowGradients
from meshrec.tables.table import Rectangle

# One rectangle; equal widths; widths with a common divisor; widths without one.
DENSE = DenseRows(torch.float32)
RECTANGLES = {
    "one": [Rectangle(0, 2, 6, 0, 3)],
    "equal": [Rectangle(0, 0, 5, 0, 3), Rectangle(0, 0, 5, 6, 9)],
    "common": [Rectangle(0, 0, 4, 0, 2), Rectangle(0, 2, 5, 4, 10)],
    "prime": [Rectangle(0, 0, 3, 0, 2), Rectangle(0, 1, 5, 3, 6), Rectangle(0, 0, 2, 8, 9)],
}


def shape(r):
    return r.r1 - r.r0, r.c1 - r.c0


def row_gradients(rectangle, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, dim = shape(rectangle)
    touched = torch.randperm(rows, generator=generator)[: rows - 1].sort().values
    return RowGradients(touched, torch.rand(rows - 1, dim, generator=generator))


def dense(rectangle, part):
    return torch.zeros(shape(rectangle)).index_copy(0, part.rows, part.grads)


@pytest.mark.parametrize("rectangles", RECTANGLES.values(), ids=RECTANGLES)
def test_views_are_the_rectangles_in_place(rectangles):
    packing = Packing(rectangles, DENSE)
    packed = torch.rand(packing.shape)
    views = packing.views(packed)
    assert [tuple(view.shape) for view in views] == [shape(r) for r in rectangles]
    assert all(view.is_contiguous() for view in views)
    assert torch.equal(packing.pack(views), packed)
    views[-1].zero_()
    assert packed.view(-1)[-views[-1].numel() :].sum() == 0


def test_the_parameter_is_as_wide_as_the_widths_allow():
    shapes = {name: Packing(rectangles, DENSE).shape for name, rectangles in RECTANGLES.items()}
    assert shapes == {"one": (4, 3), "equal": (10, 3), "common": (4 + 9, 2), "prime": (6 + 12 + 2, 1)}


@pytest.mark.parametrize("rectangles", RECTANGLES.values(), ids=RECTANGLES)
def test_sparse_gradients_come_back(rectangles):
    packing = Packing(rectangles, DENSE)
    parts = [row_gradients(r, seed) for seed, r in enumerate(rectangles)]
    gradient = packing.pack_rows(parts, torch.float32)
    expected = packing.pack([dense(r, part) for r, part in zip(rectangles, parts, strict=True)])
    assert torch.equal(gradient.to_dense(), expected)
    for found, part in zip(packing.unpack_rows(gradient), parts, strict=True):
        assert torch.equal(found.rows, part.rows)
        assert torch.equal(found.grads, part.grads)


def holdings():
    packings = [Packing(RECTANGLES["prime"], DENSE), Packing([Rectangle(1, 0, 2, 0, 2)], DENSE)]
    parameters = [nn.Parameter(torch.rand(packing.shape)) for packing in packings]
    states = [[["a"], ["b"], ["c"]], [["d"]]]
    return LocalShards(
        [parameter_shard(*each, None) for each in zip(parameters, packings, states, strict=True)]
    )


def test_collected_gradients_add_up():
    held = holdings()
    rectangles = [*RECTANGLES["prime"], Rectangle(1, 0, 2, 0, 2)]
    sums = [torch.zeros(shape(r)) for r in rectangles]
    for step in range(2):
        parts = {i: row_gradients(r, 10 * step + i) for i, r in enumerate(rectangles)}
        assert held.collect(parts)
        sums = [total + dense(r, parts[i]) for i, (total, r) in enumerate(zip(sums, rectangles, strict=True))]
    found = held.collected({0: "t0", 1: "t1"})
    for i, r in enumerate(rectangles):
        torch.testing.assert_close(dense(r, found[i]), sums[i])
    infinite = RowGradients(torch.tensor([0]), torch.full((1, 2), torch.inf))
    assert not held.collect({3: infinite})
    assert not held.collect({3: RowGradients(torch.tensor([1]), torch.zeros(1, 2))})  # what was there counts


def test_gradients_of_parameters():
    held = holdings()
    first, second = held.gradients({3: torch.ones(2, 2)})
    assert first is None
    assert second.tolist() == [[1, 1], [1, 1]]


def test_what_belongs_to_a_table():
    held = holdings()
    assert held.of_table(1).parameter is held.parameters[1]
    assert held.of_table(2) is None
    assert [table.state for table in held.of_table(0).tables] == [["a"], ["b"], ["c"]]
    held.parameters[0].requires_grad_(False)
    assert [held.is_trained(i) for i in range(4)] == [False, False, False, True]


def test_weights_follow_the_parameters_memory():
    held = holdings()
    held.parameters[0].data = torch.zeros(held.parameters[0].shape)
    assert [weight.abs().sum() > 0 for weight in held.weights] == [False, False, False, True]
