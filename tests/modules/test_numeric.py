import math

import pytest
import torch

from meshrec.modules import NumberEmbedding, PeriodicEmbedding, PiecewiseLinear


def test_shares_of_bins_are_those_of_the_paper():
    encoding = PiecewiseLinear([(0.0, 1.0, 3.0), (), (-1.0, 1.0)])
    found = encoding(torch.tensor([[-5.0, 7.0, 0.0], [0.5, -7.0, 1.0], [2.0, 0.0, -3.0], [9.0, 1.0, 9.0]]))
    assert found[:, 0].tolist() == [[0.0, 0.0], [0.5, 0.0], [1.0, 0.5], [1.0, 1.0]]
    assert found[:, 1].tolist() == [[7.0, 0.0], [-7.0, 0.0], [0.0, 0.0], [1.0, 0.0]]  # no bins: as it is
    assert found[:, 2].tolist() == [[0.5, 0.0], [1.0, 0.0], [0.0, 0.0], [1.0, 0.0]]


def test_infinite_values_are_beyond_all_bins():
    encoding = PiecewiseLinear([(0.0, 1.0), (0.0, 1.0, 2.0), ()])
    found = encoding(torch.tensor([[math.inf] * 3, [-math.inf] * 3]))
    assert found[0].tolist() == [[1.0, 0.0], [1.0, 1.0], [math.inf, 0.0]]
    assert found[1].tolist() == [[0.0, 0.0], [0.0, 0.0], [-math.inf, 0.0]]
    assert encoding.widths.tolist() == [[1.0, 0.0], [1.0, 1.0], [1.0, 0.0]]


def test_edges_rise():
    with pytest.raises(ValueError, match="number 1"):
        PiecewiseLinear([(0.0, 1.0), (1.0, 1.0)])


def test_a_linear_function_of_the_shares_learns_a_curve():
    torch.manual_seed(0)
    x = torch.rand(512, 1)
    truth = torch.sin(2 * math.pi * x[:, 0])
    edges = [tuple(torch.linspace(0, 1, 17).tolist())]
    module = NumberEmbedding(edges, 1)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
    for _ in range(400):
        loss = (module(x).flatten() - truth).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert float(loss.detach()) < 1e-3


def test_no_numbers_have_no_embeddings():
    assert NumberEmbedding([], 4)(torch.zeros(3, 0)).shape == (3, 0, 4)


def test_periodic_embeddings_are_those_of_the_formula():
    torch.manual_seed(0)
    module = PeriodicEmbedding(2, 3, num_frequencies=4)
    x = torch.randn(5, 2)
    for number in range(2):
        angle = 2 * math.pi * x[:, number : number + 1] * module.frequency[number]
        waves = torch.cat([angle.sin(), angle.cos()], 1)
        expected = torch.relu(waves @ module.weight[number] + module.bias[number])
        assert torch.allclose(module(x)[:, number], expected, atol=1e-6)


def test_buffers_are_not_in_a_checkpoint():
    assert set(NumberEmbedding([(0.0, 1.0)], 2).state_dict()) == {"weight", "bias"}
