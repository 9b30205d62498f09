import torch
from torch import nn

from meshrec.compat.bridge.devices import CopyableMixin, copy_to_device, init_parameters
from meshrec.compat.bridge.feature_processor_ import PositionWeightedModuleCollection


def test_copies_are_on_the_other_device():
    module = PositionWeightedModuleCollection({"a": 3, "b": 2})
    cpu, meta = torch.device("cpu"), torch.device("meta")
    moved = copy_to_device(module, current_device=cpu, to_device=meta)
    assert all(weight.is_meta for weight in moved.position_weights_dict.values())
    assert all(weight.device == cpu for weight in module.position_weights.values())
    assert moved.position_weights["a"] is moved.position_weights_dict["a"]
    kept = copy_to_device(module, current_device=meta, to_device=meta)
    assert all(weight.device == cpu for weight in kept.parameters())


def test_parameters_that_move_are_drawn():
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2)).to("meta")
    init_parameters(module, torch.device("cpu"))
    assert module[0].weight.device.type == "cpu"
    assert torch.equal(module[1].weight, torch.ones(2))
    before = module[0].weight.clone()
    init_parameters(module, torch.device("cpu"))
    assert torch.equal(module[0].weight, before)


def test_a_copyable_module_is_copied_to_a_device():
    class Copyable(CopyableMixin):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

    module = Copyable()
    assert module.copy(torch.device("meta")).weight.is_meta
    assert torch.equal(module.weight, torch.ones(2))
