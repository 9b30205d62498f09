import pytest
import torch

from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.local_shards import parameter_shard
from meshrec.tables.module import TableModule
from meshrec.tables.packing import Packing
from meshrec.tables.table import Rectangle


def halves():
    """A table whose columns lie in two parameters."""
    storage = DenseRows(torch.float32)
    shards = [
        parameter_shard(torch.nn.Parameter(torch.zeros(3, 2)), Packing([rectangle], storage), [[]], None)
        for rectangle in (Rectangle(0, 0, 3, 0, 2), Rectangle(0, 0, 3, 2, 4))
    ]
    return TableModule("t", (3, 4), storage, None, shards=shards)


def test_a_state_dict_has_the_whole_table_whatever_the_parameters():
    module, whole = torch.nn.ModuleDict({"t": halves()}), torch.arange(12.0).view(3, 4)
    assert [name for name, _ in module.named_parameters()] == ["t.part0", "t.part1"]
    assert list(module.state_dict()) == ["t.weight"]
    module.load_state_dict({"t.weight": whole})
    assert torch.equal(module.state_dict()["t.weight"], whole)
    with pytest.raises(RuntimeError, match=r"t\.weight"):
        module.load_state_dict({"t.weight": whole[:2]})
    with pytest.raises(RuntimeError, match=r"t\.weight"):
        module.load_state_dict({})
    assert module.load_state_dict({}, strict=False).missing_keys == ["t.weight"]
    assert torch.equal(module.state_dict()["t.weight"], whole)
