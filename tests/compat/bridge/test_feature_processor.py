import torch

from meshrec import JaggedTensor, KeyedJaggedTensor
from meshrec.compat.bridge.feature_processor import (
    PositionWeightedModule,
    PositionWeightedProcessor,
    offsets_to_range_traceble,
)


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
