import itertools

import pytest
import torch

from meshrec.modules import DeepFM, FactorizationMachine


@pytest.fixture
def embeddings():
    torch.manual_seed(0)
    return [torch.randn(3, 2, 4), torch.randn(3, 5), torch.randn(3, 1, 2)]


def test_the_deep_half_sees_everything_side_by_side(embeddings):
    dense = torch.nn.Linear(15, 2)
    expected = dense(torch.cat([e.reshape(3, -1) for e in embeddings], 1))
    torch.testing.assert_close(DeepFM(dense)(embeddings), expected)


def test_the_second_order_half_adds_all_products_of_pairs(embeddings):
    elements = torch.cat([e.reshape(3, -1) for e in embeddings], 1)
    pairs = itertools.combinations(range(elements.size(1)), 2)
    expected = sum(elements[:, i] * elements[:, j] for i, j in pairs).unsqueeze(1)
    torch.testing.assert_close(FactorizationMachine()(embeddings), expected)


@pytest.mark.parametrize("make", [FactorizationMachine, lambda: DeepFM(torch.nn.Linear(15, 2))])
def test_compiles_without_a_break(make, embeddings):
    module = make()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(embeddings), module(embeddings))


def test_embeddings_must_be_there_and_of_one_batch():
    with pytest.raises(ValueError, match="embedding"):
        FactorizationMachine()([])
    with pytest.raises(ValueError, match=r"batch.*\[2, 3\]"):
        DeepFM(torch.nn.Identity())([torch.ones(2, 1), torch.ones(3, 1)])
