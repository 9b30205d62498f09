import pytest
import torch

from meshrec.models import PLE, MMoE, MultiTask, SharedBottom
from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.sparse import KeyedJaggedTensor


def test_a_task_of_mmoe_mixes_the_experts_as_its_gate_says():
    torch.manual_seed(0)
    mixture, x = MMoE(5, [4, 3], 2, num_experts=3), torch.randn(7, 5)
    found = mixture(x)
    experts = torch.stack([expert(x) for expert in mixture.experts])
    for task in range(2):
        gates = torch.softmax(mixture.gates[task](x), 1)
        torch.testing.assert_close(found[task], torch.einsum("be,ebh->bh", gates, experts))


def test_ple_of_one_layer_is_its_formula_and_tasks_do_not_see_each_others_experts():
    torch.manual_seed(0)
    mixture, x = PLE(5, [3], 2, num_shared=1, num_own=2, num_layers=1), torch.randn(7, 5)
    found = mixture(x)
    layer = mixture.layers[0]
    experts = torch.stack([*(each(x) for each in layer.own[1]), layer.shared[0](x)])
    gates = torch.softmax(layer.gates[1](x), 1)
    torch.testing.assert_close(found[1], torch.einsum("be,ebh->bh", gates, experts))
    found[1].sum().backward()
    assert all(each.grad is None for each in layer.own[0].parameters())


@pytest.mark.parametrize(
    "mixture",
    [SharedBottom(6, [8, 4], 3), MMoE(6, [8, 4], 3), PLE(6, [8, 4], 3, num_layers=3)],
    ids=["shared", "mmoe", "ple"],
)
def test_every_task_has_an_output_that_learns(mixture):
    tables = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
    model = MultiTask(EmbeddingBagCollection(tables=tables), mixture, [5], 3, 4)
    ids = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 2]))
    out = model(torch.randn(3, 2), ids)
    assert out.shape == (3, 3)
    out.sum().backward()
    assert all(each.grad is not None and bool(each.grad.isfinite().all()) for each in model.parameters())
