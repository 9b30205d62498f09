import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, JaggedTensor, KeyedJaggedTensor
from meshrec.modules import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)


def features(**given):
    return KeyedJaggedTensor(
        ["f", "g", "h"],
        torch.tensor([3, 1, 2, 0, 1, 1, 2]),
        lengths=torch.tensor([2, 0, 1, 3, 0, 1]),
        **given,
    )


def collection(is_weighted=True, tables=(("t", "f"), ("u", "g"))):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=4, embedding_dim=2, feature_names=[feature])
            for name, feature in tables
        ],
        is_weighted=is_weighted,
    )


def with_weights(module):
    for index, parameter in enumerate(module.parameters()):
        torch.nn.init.constant_(parameter, 1 + index)
        with torch.no_grad():
            parameter.view(-1).mul_(torch.arange(1, 1 + parameter.numel()))
    return module


def test_weights_go_by_position():
    module = with_weights(PositionWeightedModule(3))
    found = module(JaggedTensor(torch.tensor([5, 6, 7, 8]), lengths=torch.tensor([1, 0, 3])))
    assert found.weights().tolist() == [1, 1, 2, 3]
    assert found.lengths().tolist() == [1, 0, 3]
    assert found.offsets().tolist() == [0, 1, 1, 4]
    found.weights().sum().backward()
    assert module.position_weight.grad.tolist() == [2, 1, 1]


def test_weights_go_by_feature_and_position():
    module = with_weights(PositionWeightedModuleCollection({"g": 3, "f": 2}))
    assert list(module.state_dict()) == ["position_weights.g", "position_weights.f"]
    found = module(features())
    assert found.weights().tolist() == [2, 4, 1, 1, 2, 3, 1]  # "h" has no weights to learn
    assert found.keys() == ["f", "g", "h"]
    assert found.values().tolist() == features().values().tolist()
    found.weights().sum().backward()
    assert module.position_weights["g"].grad.tolist() == [2, 1, 1]
    assert module.position_weights["f"].grad.tolist() == [1, 1]


def test_keys_may_have_batch_sizes_of_their_own():
    module = with_weights(PositionWeightedModuleCollection({"f": 2}))
    kjt = KeyedJaggedTensor(
        ["h", "f"], torch.tensor([9, 5, 6, 7]), lengths=torch.tensor([1, 2, 1]), stride_per_key=[1, 2]
    )
    found = module(kjt)
    assert found.weights().tolist() == [1, 1, 2, 1]
    assert found.stride_per_key() == [1, 2]


def test_empty_input():
    module = PositionWeightedModuleCollection({"f": 2})
    kjt = KeyedJaggedTensor(
        ["f"], torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2, dtype=torch.int32)
    )
    assert module(kjt).weights().tolist() == []
    assert PositionWeightedModule(2)(kjt["f"]).weights().tolist() == []
    found = module(KeyedJaggedTensor.empty())
    assert (found.keys(), found.weights().tolist()) == ([], [])


def test_reset_makes_all_weights_equal():
    for module in (PositionWeightedModule(3), PositionWeightedModuleCollection({"f": 2})):
        with_weights(module).reset_parameters()
        assert all(parameter.eq(1).all() for parameter in module.parameters())


@pytest.mark.parametrize("grouped", [False, True])
def test_collections_look_up_with_learned_weights(grouped):
    torch.manual_seed(0)
    lengths = {"f": 2, "g": 3}
    processors = (
        PositionWeightedModuleCollection(lengths)
        if grouped
        else {name: PositionWeightedModule(length) for name, length in lengths.items()}
    )
    module = FeatureProcessedEmbeddingBagCollection(collection(), processors)
    with_weights(module._feature_processors)
    positions = torch.tensor([1.0, 2.0])
    tables = {name: bag.weight for name, bag in module._embedding_bag_collection.embedding_bags.items()}
    found = module(features())
    torch.testing.assert_close(found["f"][0], positions @ tables["t"][[3, 1]])
    scale = 2.0  # of the second parameter
    torch.testing.assert_close(found["g"][0], scale * tables["u"][2])
    found.values().sum().backward()
    gradients = [parameter.grad for parameter in module._feature_processors.parameters()]
    torch.testing.assert_close(gradients[0], tables["t"][[3, 1]].sum(1).detach())
    assert module.is_weighted()


class Double(FeatureProcessor):
    def forward(self, features):
        weights = torch.full((features.values().numel(),), 2.0)
        return JaggedTensor(features.values(), weights, lengths=features.lengths())


def test_processors_of_users():
    ebc = collection(tables=[("t", "f")])
    found = FeatureProcessedEmbeddingBagCollection(ebc, {"f": Double()})(features())
    weights = torch.ones(7)
    torch.testing.assert_close(found["f"], 2 * ebc(features(weights=weights))["f"])


@pytest.mark.parametrize(
    "make",
    [
        lambda: PositionWeightedModuleCollection({"g": 3, "f": 2}),
        lambda: FeatureProcessedEmbeddingBagCollection(
            collection(), PositionWeightedModuleCollection({"f": 2, "g": 3})
        ),
        lambda: FeatureProcessedEmbeddingBagCollection(
            collection(), {"f": PositionWeightedModule(2), "g": PositionWeightedModule(3)}
        ),
    ],
)
def test_compiles_without_a_break(make):
    torch.manual_seed(0)
    module = with_weights(make())

    def tensor(result):
        return result.weights() if isinstance(result, KeyedJaggedTensor) else result.values()

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(tensor(compiled(features())), tensor(module(features())))


def test_bags_that_are_too_long():
    with pytest.raises(ValueError, match=r"bag 1.*3 ids.*2 positions"):
        PositionWeightedModule(2)(JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 3])))
    with pytest.raises(ValueError, match=r"'g'.*sample 1.*3 ids.*2 positions"):
        PositionWeightedModuleCollection({"g": 2})(features())


def test_wrong_constructions():
    with pytest.raises(ValueError, match=r"max_feature_length.*1.*0"):
        PositionWeightedModule(0)
    with pytest.raises(ValueError, match=r"max_feature_lengths\['f'\].*1.*0"):
        PositionWeightedModuleCollection({"f": 0})
    with pytest.raises(ValueError, match="is_weighted=True"):
        FeatureProcessedEmbeddingBagCollection(collection(is_weighted=False), {})
    with pytest.raises(ValueError, match=r"\['f', 'g'\].*\['f'\]"):
        FeatureProcessedEmbeddingBagCollection(collection(), {"f": PositionWeightedModule(2)})
