import pytest
import torch

from meshrec import JaggedTensor, KeyedJaggedTensor
from meshrec.compat.bridge import sparse as bridge
from meshrec.compat.bridge.feature_processor import (
    PositionWeightedModule,
    PositionWeightedProcessor,
    offsets_to_range_traceble,
)
from meshrec.compat.bridge.fx import Tracer


def features():
    return KeyedJaggedTensor(["f", "g"], torch.tensor([5, 6, 7]), lengths=torch.tensor([2, 0, 0, 1]))


def double(module):
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(2)
    return module


def test_a_dictionary_is_changed_in_place():
    module = double(PositionWeightedModule({"f": 3}))
    assert list(module.state_dict()) == ["position_weights.f"]
    bags = features().to_dict()
    bags = {key: JaggedTensor(bag.values(), lengths=bag.lengths()) for key, bag in bags.items()}
    found = module(bags)
    assert found is bags
    assert found["f"].weights().tolist() == [2, 2]
    assert found["g"].weights_or_none() is None
    found["f"].weights().sum().backward()
    assert module.position_weights["f"].grad.tolist() == [1, 1, 0]
    module.reset_parameters()
    assert module.position_weights["f"].tolist() == [1, 1, 1]


POSITIONS = {"f1": [0, 1, 0], "f2": [0, 0, 0, 1, 2]}


def with_drawn_weights(kind, lengths):
    """Weights that differ by position: all of them are 1 at first."""
    module = kind(lengths)
    with torch.no_grad():
        for weights in module.position_weights.values():
            weights.copy_(torch.rand(len(weights)))
    return module


def runs_of(module):
    """The module itself, traced, and scripted."""
    traced = torch.fx.GraphModule(module, Tracer().trace(module))
    return module, traced, torch.jit.script(traced)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")  # torch's own GraphModule
@pytest.mark.parametrize("lengths", [{"f1": 10, "f2": 3}, {"f2": 4, "f1": 2}])
def test_populate_weights(lengths):
    """Under the name and with the batch of TorchRec's test: 3 samples, one of them without an ID of f1."""
    values, offsets = torch.arange(8), torch.tensor([0, 2, 2, 3, 4, 5, 8])
    kjt = bridge.KeyedJaggedTensor.from_offsets_sync(keys=["f1", "f2"], values=values, offsets=offsets)
    module = with_drawn_weights(PositionWeightedModule, lengths)
    for run in runs_of(module):
        found = run(kjt.to_dict())
        for key, positions in POSITIONS.items():
            assert torch.equal(found[key].values(), kjt[key].values())
            assert torch.equal(found[key].weights(), module.position_weights[key][positions])
    module = with_drawn_weights(PositionWeightedProcessor, lengths)
    expected = torch.cat([module.position_weights[key][positions] for key, positions in POSITIONS.items()])
    for run in runs_of(module):
        weighted = run(kjt)
        assert weighted.keys() == ["f1", "f2"]
        assert torch.equal(weighted.values(), values)
        assert torch.equal(weighted.weights(), expected)


def test_other_keys_are_left_out():
    module = double(PositionWeightedProcessor({"g": 2}))
    assert list(module.state_dict()) == ["position_weights.g"]
    found = module(features())
    assert found.keys() == ["g"]
    assert found.weights().tolist() == [2]


def test_all_keys_or_none():
    kjt = features()
    assert double(PositionWeightedProcessor({"f": 2, "g": 2}))(kjt).weights().tolist() == [2, 2, 2]
    assert PositionWeightedProcessor({"h": 2})(kjt) is kjt


def test_positions():
    positions = offsets_to_range_traceble(torch.tensor([0, 2, 2, 3]), torch.tensor([9, 9, 9]))
    assert positions.tolist() == [0, 1, 0]
