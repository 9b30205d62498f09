import pytest
import torch

from meshrec.tables.holder import TableHolder


class Halves(TableHolder):
    """A table whose columns lie in two parameters."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (torch.nn.Parameter(torch.zeros(3, 2)) for _ in range(2))

    def part_names(self):
        return ["weight"]

    def whole_parts(self):
        return {"weight": torch.cat([self.left.detach(), self.right.detach()], 1)}

    def load(self, values, prefix):
        if values["weight"].shape != (3, 4):
            raise ValueError(f"{prefix}weight has another shape.")
        self.left.data, self.right.data = values["weight"].split(2, 1)


def test_a_state_dict_has_the_whole_table_whatever_the_parameters():
    module, whole = torch.nn.ModuleDict({"t": Halves()}), torch.arange(12.0).view(3, 4)
    assert list(module.state_dict()) == ["t.weight"]
    module.load_state_dict({"t.weight": whole})
    assert torch.equal(module.state_dict()["t.weight"], whole)
    with pytest.raises(RuntimeError, match=r"t\.weight has another shape"):
        module.load_state_dict({"t.weight": whole[:2]})
    with pytest.raises(RuntimeError, match=r"Missing key.*t\.weight"):
        module.load_state_dict({})
    assert module.load_state_dict({}, strict=False).missing_keys == ["t.weight"]
    assert torch.equal(module.state_dict()["t.weight"], whole)
