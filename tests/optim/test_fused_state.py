"""The state of the fused optimizers: saved, resumed, refused."""

import copy
import math

import pytest
import torch

from meshrec import fuse
from meshrec.optim import LARS, SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from meshrec.tables import FusedOptimizer

from .models import UPDATES, loss_of, make_bags, make_input, same, train, weights_of


@UPDATES
@pytest.mark.parametrize("kind", [SGD, RowWiseAdagrad, Adam, PartialRowWiseAdam, LARS])
def test_training_resumes_bit_for_bit(kind, update, tmp_path):
    spec = kind(lr=0.1)
    module = fuse(make_bags(), optimizer=spec, update=update)
    module.fused_optimizer.param_groups[0]["lr"] = 0.05
    train(module, optimizer=module.fused_optimizer)
    torch.save([module.state_dict(), module.fused_optimizer.state_dict()], tmp_path / "saved")
    saved, saved_optimizer = torch.load(tmp_path / "saved")
    assert set(saved_optimizer["state"]) == {"embedding_bags.t0.weight", "embedding_bags.t1.weight"}
    slots = {"step", *(slot.name for slot in spec.state_slots())}
    assert all(set(state) == slots and state["step"] == 3 for state in saved_optimizer["state"].values())
    resumed = fuse(make_bags(), optimizer=spec, update=update)
    resumed.load_state_dict(saved)
    resumed.fused_optimizer.load_state_dict(saved_optimizer)
    for one in (module, resumed):
        train(one, seed=7, optimizer=one.fused_optimizer)
    assert same(weights_of(module), weights_of(resumed))


def test_tables_with_different_numbers_of_steps_resume_bit_for_bit():
    def make():
        return fuse(make_bags(), optimizer=Adam(lr=0.1), update="on_step")

    module, resumed = make(), make()
    train(module, optimizer=module.fused_optimizer)
    loss_of(module, make_input()).backward()
    module.embedding_bags["t1"].weight.grad = None
    module.fused_optimizer.step()
    module.fused_optimizer.zero_grad()
    state = copy.deepcopy(module.fused_optimizer.state_dict())
    assert [slots["step"] for slots in state["state"].values()] == [4, 3]
    resumed.load_state_dict(module.state_dict())
    resumed.fused_optimizer.load_state_dict(state)
    for one in (module, resumed):
        train(one, optimizer=one.fused_optimizer)
    assert same(weights_of(module), weights_of(resumed))
    assert [slots["step"] for slots in resumed.fused_optimizer.state.values()] == [7, 6]


def test_a_state_dict_of_another_optimizer_is_refused():
    saved = fuse(make_bags(), optimizer=Adam(lr=0.1)).fused_optimizer.state_dict()
    with pytest.raises(ValueError, match=r"'embedding_bags.t0.weight'.*\['step', 'sum'\]"):
        fuse(make_bags(), optimizer=RowWiseAdagrad(lr=0.1)).fused_optimizer.load_state_dict(saved)


def test_state_is_there_from_the_beginning():
    optimizer = fuse(make_bags(), optimizer=Adagrad(lr=0.1, initial_accumulator_value=0.5)).fused_optimizer
    assert isinstance(optimizer, FusedOptimizer)
    optimizer.init_state()
    state = optimizer.state_dict()["state"]["embedding_bags.t1.weight"]
    assert state["step"] == 0
    assert torch.equal(state["sum"], torch.full((7, 16), 0.5))


def test_an_update_leaves_other_rows_alone():
    module = fuse(make_bags(), optimizer=Adam(lr=0.1, weight_decay=0.5))
    before = weights_of(copy.deepcopy(module))
    train(module)
    assert torch.equal(before[0][7:], weights_of(module)[0][7:])
    state = module.fused_optimizer.state[module.embedding_bags["t0"].weight]
    assert not state["exp_avg_sq"][7:].any()
    assert math.isfinite(float(state["exp_avg_sq"].sum()))
