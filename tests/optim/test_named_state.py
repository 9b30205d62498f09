import copy
import io
import pickle

import torch

from meshrec.optim import KeyedOptimizerWrapper
from meshrec.optim.named_state import NamedGroup, NamedState


def test_positions_are_names():
    state = NamedState({"b": {"step": 1}}, ["a", None, "b"])
    state[2] = state.pop("b")
    assert state == {"b": {"step": 1}}
    group = NamedGroup({"params": ["b"], "lr": 0.1}, ["a", None, "b"])
    group["params"] = [2, 0]
    group["lr"] = 0.2
    assert group == {"params": ["b", "a"], "lr": 0.2}


def test_copies_are_plain():
    parameters = {"a": torch.nn.Parameter(torch.ones(2))}
    optimizer = KeyedOptimizerWrapper(parameters, lambda p: torch.optim.Adam(p, lr=0.1))
    optimizer.init_state()
    saved = optimizer.state_dict()
    for copied in (copy.deepcopy(saved), pickle.loads(pickle.dumps(saved))):
        assert copied["param_groups"] == saved["param_groups"]
        assert copied["state"].keys() == saved["state"].keys()
        assert not isinstance(copied["state"], NamedState)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    assert torch.load(file, weights_only=True)["state"]["a"].keys() == saved["state"]["a"].keys()
