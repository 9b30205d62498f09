"""Feature processors in Python, in graphs and in TorchScript."""

import pytest
import torch

from meshrec.compat.bridge import embeddings
from meshrec.compat.bridge import feature_processor as old
from meshrec.compat.bridge import feature_processor_ as new
from meshrec.compat.bridge.fx import symbolic_trace
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedJaggedTensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning"),  # torch's own GraphModule
]


def features() -> KeyedJaggedTensor:
    lengths = torch.tensor([2, 0, 1, 3, 0, 1])
    return KeyedJaggedTensor(["a", "b", "c"], torch.arange(7), lengths=lengths).sync()


def collection() -> new.PositionWeightedModuleCollection:
    made = new.PositionWeightedModuleCollection({"a": 2, "b": 3})
    with torch.no_grad():
        for weights in made.position_weights_dict.values():
            weights.copy_(torch.rand_like(weights))
    return made


def processed(processors) -> new.FeatureProcessedEmbeddingBagCollection:
    tables = [embeddings.EmbeddingBagConfig(8, 4, name, feature_names=[name]) for name in ("a", "b")]
    return new.FeatureProcessedEmbeddingBagCollection(
        embeddings.EmbeddingBagCollection(tables, is_weighted=True), processors
    )


@pytest.mark.parametrize(
    "processors",
    [collection, lambda: {"a": new.PositionWeightedModule(2), "b": new.PositionWeightedModule(3)}],
)
def test_bags_are_weighted_everywhere_as_in_python(processors):
    module = processed(processors())
    expected = module(features())
    graph = symbolic_trace(module)
    for each in (graph, torch.jit.script(graph)):
        torch.testing.assert_close(each(features()).values(), expected.values())
    processor, bags = module.split()
    torch.testing.assert_close(bags(processor(features())).values(), expected.values())


def test_keys_without_weights_weigh_1():
    module = collection()
    expected = module(features())
    assert isinstance(expected, KeyedJaggedTensor)
    assert expected["c"].weights().tolist() == [1.0]
    torch.testing.assert_close(symbolic_trace(module)(features()).weights(), expected.weights())


def test_a_batch_may_have_no_keys():
    module = collection()
    for each in (module, torch.jit.script(symbolic_trace(module))):
        found = each(KeyedJaggedTensor.empty())
        assert found.keys() == []
        assert found.weights().tolist() == []


def test_one_feature():
    module = new.PositionWeightedModule(3)
    bags = JaggedTensor(torch.tensor([5, 6, 7]), lengths=torch.tensor([1, 2]))
    expected = module(bags)
    torch.testing.assert_close(torch.jit.script(symbolic_trace(module))(bags).weights(), expected.weights())


def test_old_processors():
    module = old.PositionWeightedProcessor({"b": 3, "a": 2})
    expected = module(features())
    found = torch.jit.script(symbolic_trace(module))(features())
    assert found.keys() == expected.keys() == ["a", "b"]
    torch.testing.assert_close(found.weights(), expected.weights())
    by_name = torch.jit.script(symbolic_trace(old.PositionWeightedModule({"a": 2})))(features().to_dict())
    assert by_name["a"].weights().tolist() == [1.0, 1.0]
    assert by_name["b"].weights_or_none() is None
