import functools

import pytest
import torch

from meshrec.compat.bridge import embeddings, fused_embeddings
from meshrec.compat.bridge.rowwise_adagrad import RowWiseAdagrad as Dense
from meshrec.compat.bridge.sparse import KeyedJaggedTensor

FEATURES = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 0, 1, 1]), lengths=torch.tensor([1, 2, 0, 1]))


def tables():
    return [embeddings.EmbeddingBagConfig(3, 4, name, feature_names=[name]) for name in ("a", "b")]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, Dense])
def test_the_backward_pass_is_the_optimizers_step(optimizer):
    fused = fused_embeddings.FusedEmbeddingBagCollection(tables(), optimizer, {"lr": 0.1})
    plain = embeddings.EmbeddingBagCollection(tables())
    plain.load_state_dict(fused.state_dict())
    steps = optimizer(plain.parameters(), lr=0.1)
    for _ in range(2):
        fused(FEATURES).values().sum().backward()
        steps.zero_grad()
        plain(FEATURES).values().sum().backward()
        steps.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight)
    state = fused.fused_optimizer().state_dict()
    fused.fused_optimizer.load_state_dict(state)
    assert fused.optimizer_type() is optimizer
    assert fused.optimizer_kwargs() == {"lr": 0.1}


@pytest.mark.parametrize("lengths", [[3, 1], [1, 2, 0, 1]])
def test_shared_features_and_tables_in_batches_of_one_and_two(lengths):
    batch = KeyedJaggedTensor(["a", "b"], torch.tensor([0, 0, 1, 1]), lengths=torch.tensor(lengths))
    shared = [
        embeddings.EmbeddingBagConfig(3, 4, "s", feature_names=["a"]),
        embeddings.EmbeddingBagConfig(3, 4, "t", feature_names=["a", "b"]),
    ]
    fused = fused_embeddings.FusedEmbeddingBagCollection(shared, torch.optim.SGD, {"lr": 0.1})
    plain = embeddings.EmbeddingBagCollection(shared)
    plain.load_state_dict(fused.state_dict())
    steps = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(2):
        found, expected = fused(batch), plain(batch)
        assert found.keys() == expected.keys() == ["a@s", "a@t", "b"]
        torch.testing.assert_close(found.values(), expected.values())
        steps.zero_grad()
        found.values().square().sum().backward()
        expected.values().square().sum().backward()
        steps.step()
    for name, weight in plain.state_dict().items():
        torch.testing.assert_close(fused.state_dict()[name], weight)


def test_collections_in_a_model_are_replaced_and_keep_their_weights():
    sequence = embeddings.EmbeddingCollection([embeddings.EmbeddingConfig(3, 4, "a")], need_indices=True)
    model = torch.nn.ModuleDict({"bags": embeddings.EmbeddingBagCollection(tables()), "rows": sequence})
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    fused_embeddings.fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    assert isinstance(model["bags"], fused_embeddings.FusedEmbeddingBagCollection)
    assert isinstance(model["rows"], fused_embeddings.FusedEmbeddingCollection)
    assert [name for name, _ in model.named_modules()] == names
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name])
    model["rows"](FEATURES)["a"].values().sum().backward()
    assert not torch.equal(
        model["rows"].state_dict()["embeddings.a.weight"], before["rows.embeddings.a.weight"]
    )


@pytest.mark.parametrize("place", ["MANAGED", fused_embeddings.EmbeddingLocation.MANAGED])
def test_other_places_are_refused(place):
    make = functools.partial(
        fused_embeddings.FusedEmbeddingBagCollection, tables(), torch.optim.SGD, {"lr": 0.1}
    )
    with pytest.raises(ValueError, match="MANAGED"):
        make(location=place)
    for own in (None, "HOST", fused_embeddings.EmbeddingLocation.DEVICE):
        assert make(location=own).embedding_bags
