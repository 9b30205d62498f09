import copy
from unittest.mock import Mock

import pytest
import torch

from meshrec.compat.bridge.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from meshrec.compat.bridge.semi_sync import SemisyncOptimizer


class Outer(torch.optim.SGD):
    """Moves the parameters to where the last global step left them, plus half of what was learned since."""

    def __init__(self, params):
        super().__init__(params, lr=0.5)
        for parameter in params:
            self.state[parameter] = {"start": parameter.detach().clone(), "number": 0}

    @torch.no_grad()
    def global_step(self, local_step_counter, closure=None):
        for parameter, slots in self.state.items():
            parameter.copy_(slots["start"].lerp(parameter, self.param_groups[0]["lr"]))
            slots["start"].copy_(parameter)
            slots["number"] = int(local_step_counter)


def made(num_local_steps=3):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    params = dict(model.named_parameters())
    local = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))
    optimizer = SemisyncOptimizer(
        model.parameters(), local, KeyedOptimizerWrapper(params, Outer), num_local_steps=num_local_steps
    )
    return model, optimizer


def train(model, optimizer, steps):
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((4, 3), 1.0 + step)).square().sum().backward()
        optimizer.step()


def test_every_third_step_is_a_global_one():
    model, optimizer = made()
    alone = copy.deepcopy(model)
    adam = torch.optim.Adam(alone.parameters(), lr=0.1)
    starts = [p.detach().clone() for p in alone.parameters()]
    for step in range(6):
        train(model, optimizer, 1)
        train(alone, adam, 1)
        if step % 3 == 2:
            for parameter, start in zip(alone.parameters(), starts, strict=True):
                parameter.data.copy_(start.lerp(parameter.data, 0.5))
                start.copy_(parameter.data)
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert (int(optimizer._local_step_counter), int(optimizer._global_step_counter)) == (6, 2)


@pytest.mark.parametrize("groups", [False, True])
def test_state_goes_on_where_it_was_saved(groups):
    model, optimizer = made()
    optimizer.save_param_groups(groups)
    train(model, optimizer, 4)
    optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = 0.2, 0.25
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert set(saved[1]["state"]["bias"]) == {
        "semi_sync_local_step",
        "semi_sync_local_exp_avg",
        "semi_sync_local_exp_avg_sq",
        "semi_sync_global_start",
        "semi_sync_global_number",
        "__semisync_global_step_counter__",
        "__semisync_local_step_counter__",
    }
    other, again = made()
    again.save_param_groups(groups)
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert again._global_optimizer.state[other.bias]["number"] == 3
    if not groups:
        again.param_groups[0]["lr"], again.param_groups[1]["lr"] = 0.2, 0.25
    train(model, optimizer, 3)
    train(other, again, 3)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert int(again._global_step_counter) == 2


def test_both_optimizers_are_told():
    parts = [Mock(spec=KeyedOptimizer, params={"p": torch.ones(1)}, state={}, param_groups=[]) for _ in "ab"]
    parts[1].params = parts[0].params
    optimizer = SemisyncOptimizer([{"params": [torch.ones(1)]}], *parts)
    optimizer.zero_grad(set_to_none=False)
    optimizer.save_param_groups(True)
    optimizer.post_load_state_dict()
    for each in parts:
        each.zero_grad.assert_called_once_with(set_to_none=False)
        each.save_param_groups.assert_called_with(True)
        each.post_load_state_dict.assert_called_once_with()
    assert "semi_sync_local_optim: " in repr(optimizer)
    assert optimizer.defaults == {"_save_param_groups": True}


def test_what_does_not_fit_is_named():
    model, optimizer = made()
    local, outer = optimizer._inner()
    with pytest.raises(IndexError, match="global_params"):
        SemisyncOptimizer([], local, outer)
    with pytest.raises(ValueError, match=r"num_local_steps.*0"):
        SemisyncOptimizer(model.parameters(), local, outer, num_local_steps=0)
    other = KeyedOptimizerWrapper(dict(torch.nn.Linear(3, 2).named_parameters()), Outer)
    with pytest.raises(ValueError, match="'weight'"):
        SemisyncOptimizer(model.parameters(), local, other)
