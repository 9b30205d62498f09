import pytest
import torch
from torch import nn

from meshrec.compat.bridge import comm
from meshrec.compat.bridge.comm import CopyableMixin, copy_to_device, init_parameters
from meshrec.compat.bridge.feature_processor_ import PositionWeightedModuleCollection


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in (*comm._SIZES, *comm._RANKS):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_nodes_have_8_ranks_or_all():
    assert comm.get_local_size(16) == 8
    assert comm.get_local_size(6) == 6
    assert comm.get_local_rank(16, rank=11) == 3
    assert comm.get_group_rank(16, rank=11) == 1
    assert comm.get_num_groups(16) == 2


def test_the_launcher_knows(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert comm.get_local_size(8) == 4
    assert comm.get_local_size(6) == 6
    assert comm.get_local_rank(8, rank=2) == 1
    monkeypatch.setenv("LOCAL_RANK", "5")
    assert comm.get_local_rank(8, rank=6) == 2


def test_the_device_is_what_there_is():
    assert comm.get_device_type() in ("cpu", "cuda")


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
