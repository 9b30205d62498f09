"""State that is more than tensors and numbers: dicts, and objects with a state_dict of their own."""

import pytest
import torch

from meshrec.optim.keyed import KeyedOptimizerWrapper


class Average:
    def __init__(self):
        self.mean = torch.zeros(2)

    def state_dict(self):
        return {"mean": self.mean}

    def load_state_dict(self, state_dict):
        self.mean.copy_(state_dict["mean"])


def nested() -> KeyedOptimizerWrapper:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = KeyedOptimizerWrapper({"w": parameter}, lambda p: torch.optim.SGD(p, lr=0.5))
    optimizer.state[parameter].update({"inner": {"sum": torch.zeros(2), "seen": 0}, "average": Average()})
    return optimizer


def test_nested_state_is_saved_and_filled_in_place():
    optimizer, other = nested(), nested()
    slots = optimizer.state[optimizer.params["w"]]
    slots["inner"]["sum"] += 1
    slots["inner"]["seen"] = 3
    slots["average"].mean += 2
    target = other.state[other.params["w"]]["inner"]["sum"]
    other.load_state_dict(optimizer.state_dict())
    assert target.tolist() == [1, 1]
    assert other.state[other.params["w"]]["inner"]["seen"] == 3
    assert other.state_dict()["state"]["w"]["average"]["mean"].tolist() == [2, 2]


def test_nested_slots_are_compared_first():
    optimizer = nested()
    saved = {"state": {"w": {"inner": {"sum": torch.ones(3), "seen": 1}, "average": {"mean": torch.ones(2)}}}}
    with pytest.raises(ValueError, match=r"'sum'.*'w.inner'.*\[2\].*\[3\]"):
        optimizer.load_state_dict(saved)
    assert optimizer.state_dict()["state"]["w"]["average"]["mean"].tolist() == [0, 0]


def test_printed_with_names_and_shapes():
    assert "group 0: dampening=0" in repr(nested())
    assert repr(nested()).endswith("    w [2]")
