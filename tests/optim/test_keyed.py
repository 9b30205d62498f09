import copy
import pickle
from collections import defaultdict

import pytest
import torch

from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper


def adam(params):
    return torch.optim.Adam(params, lr=0.1)


def make_params(seed=0, names=("a", "b")):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.nn.Parameter(torch.randn(3, size, generator=generator))
        for size, name in enumerate(names, 2)
    }


def set_grads(params, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for parameter in params.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def train(optimizer, params, steps=3, seed=1):
    for step in range(steps):
        set_grads(params, seed + step)
        optimizer.step()


def same(params, others):
    return all(torch.equal(params[name], others[name]) for name in params)


def test_steps_as_the_torch_optimizer_does():
    params, others = make_params(), make_params()
    train(KeyedOptimizerWrapper(params, adam), params)
    train(adam(others.values()), others)
    assert same(params, others)


def test_state_dict_is_keyed_by_names_and_independent_of_order():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    train(optimizer, params)
    state_dict = optimizer.state_dict()
    assert set(state_dict["state"]) == {"a", "b"}
    assert set(state_dict["state"]["a"]) == {"step", "exp_avg", "exp_avg_sq"}
    assert state_dict["param_groups"][0]["params"] == ["a", "b"]
    others = {name: torch.nn.Parameter(params[name].detach().clone()) for name in ("b", "a")}
    resumed = KeyedOptimizerWrapper(others, adam)
    resumed.load_state_dict(copy.deepcopy(state_dict))
    train(optimizer, params, seed=5)
    for step in range(3):
        generator = torch.Generator().manual_seed(5 + step)
        for name in ("a", "b"):
            others[name].grad = torch.randn(others[name].shape, generator=generator)
        resumed.step()
    assert same(params, others)


def test_loading_copies_into_the_tensors_that_are_there():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    optimizer.init_state()
    held = optimizer.state[params["a"]]["exp_avg"]
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["a"]["exp_avg"].fill_(7)
    saved["param_groups"][0]["lr"] = 0.25
    optimizer.load_state_dict(saved)
    assert bool((held == 7).all())
    assert optimizer.param_groups[0]["lr"] == 0.25
    held.fill_(8)
    assert bool((saved["state"]["a"]["exp_avg"] == 7).all())


@pytest.mark.parametrize(
    "factory",
    [
        adam,
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.5),
        lambda p: torch.optim.Adagrad(p, lr=0.1, weight_decay=0.5, initial_accumulator_value=0.25),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.5),
        lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, weight_decay=0.5),
    ],
)
def test_init_state_changes_no_later_result(factory):
    params, others = make_params(), make_params()
    optimizer, plain = KeyedOptimizerWrapper(params, factory), KeyedOptimizerWrapper(others, factory)
    set_grads(params, 3)
    before = params["a"].grad
    optimizer.init_state()
    assert params["a"].grad is before
    assert same(params, others)
    assert set(optimizer.state_dict()["state"]) == {"a", "b"}
    train(optimizer, params)
    train(plain, others)
    assert same(params, others)


def test_init_state_steps_no_parameter_that_has_state():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    params["a"].grad = torch.ones_like(params["a"])
    optimizer.step()
    value, gradient = params["a"].detach().clone(), params["a"].grad
    moments = copy.deepcopy(optimizer.state[params["a"]])
    optimizer.init_state()
    assert torch.equal(params["a"], value)
    assert params["a"].grad is gradient
    state = optimizer.state[params["a"]]
    assert all(torch.equal(state[name], moments[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    assert optimizer.state[params["b"]]["step"] == 0


def test_init_state_with_sparse_gradients():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, lambda p: torch.optim.SparseAdam(p, lr=0.1))
    optimizer.init_state({"a", "b"})
    assert bool((optimizer.state[params["a"]]["exp_avg"] == 0).all())
    assert optimizer.state[params["a"]]["step"] == 0


def test_param_groups_can_be_left_out():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    train(optimizer, params)
    optimizer.save_param_groups(False)
    state_dict = copy.deepcopy(optimizer.state_dict())
    assert set(state_dict) == {"state"}
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.load_state_dict(state_dict)
    assert optimizer.param_groups[0]["lr"] == 0.5


def drop(name):
    return lambda saved: saved["state"].pop(name)


def rename(saved):
    saved["state"]["c"] = saved["state"].pop("b")


def drop_slot(saved):
    del saved["state"]["a"]["exp_avg"]


def reshape(saved):
    saved["state"]["b"]["exp_avg"] = torch.ones(1)


def untensor(saved):
    saved["state"]["b"]["exp_avg"] = 1.0


def regroup(saved):
    saved["param_groups"] = [{"params": ["a"], "lr": 1.0}, {"params": ["b"], "lr": 1.0}]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda saved: saved.pop("state"), r"state_dict.*'state'.*\['param_groups'\]"),
        (drop("b"), "'b'.*state_dict"),
        (rename, "state_dict.*'c'"),
        (
            drop_slot,
            r"'a'.*\['exp_avg', 'exp_avg_sq', 'step'\].*\['exp_avg_sq', 'step'\]",
        ),
        (reshape, r"'exp_avg'.*'b'.*\[3, 3\].*\[1\].*state_dict"),
        (untensor, "'exp_avg'.*'b'.*state_dict"),
        (regroup, r"\[\['a', 'b'\].*\[\['a'\].*\['b'\].*state_dict"),
    ],
)
def test_what_does_not_fit_changes_nothing(spoil, message):
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    train(optimizer, params)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    for slots in saved["state"].values():
        slots["exp_avg"].fill_(9)
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    for name, slots in optimizer.state_dict()["state"].items():
        assert torch.equal(slots["exp_avg"], before["state"][name]["exp_avg"])


def test_state_of_strangers_is_refused():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    train(optimizer, params)
    with pytest.raises(ValueError, match=r"1.*1 parameters"):
        KeyedOptimizerWrapper({"a": params["a"]}, lambda _: optimizer)


def test_add_param_group_takes_names():
    params, more = make_params(), make_params(names=("c",))
    optimizer = KeyedOptimizerWrapper(params, adam)
    combined = CombinedOptimizer([("x", optimizer)])
    combined.zero_grad()
    optimizer.add_param_group({"params": more, "lr": 0.5})
    train(optimizer, {**params, **more})
    assert set(optimizer.state_dict()["state"]) == {"a", "b", "c"}
    assert [group["lr"] for group in combined.param_groups] == [0.1, 0.5]
    assert set(combined.params) == {"x.a", "x.b", "x.c"}
    with pytest.raises(ValueError, match="'a'"):
        optimizer.add_param_group({"params": {"a": torch.nn.Parameter(torch.ones(1))}})
    with pytest.raises(ValueError, match="parameters"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    with pytest.raises(ValueError, match="them"):
        combined.add_param_group({"params": {}})


def make_combined():
    left, right = make_params(0), make_params(1)
    optimizers = [
        ("left", KeyedOptimizerWrapper(left, adam)),
        ("right", KeyedOptimizerWrapper(right, lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9))),
    ]
    return CombinedOptimizer(optimizers), {
        **{f"left.{n}": p for n, p in left.items()},
        **{f"right.{n}": p for n, p in right.items()},
    }


def test_combined_is_its_parts():
    combined, params = make_combined()
    assert list(combined.params) == ["left.a", "left.b", "right.a", "right.b"]
    assert len(combined.params) == 4
    assert len(combined.state) == 0
    train(combined, params)
    assert len(combined.state) == 4
    assert len(list(combined.state)) == 4
    assert params["right.b"] in combined.state
    with pytest.raises(KeyError):
        combined.state[torch.ones(1)]
    others = {
        name: parameter.detach().clone().requires_grad_() for name, parameter in make_combined()[1].items()
    }
    plain = [
        torch.optim.Adam([others["left.a"], others["left.b"]], lr=0.1),
        torch.optim.SGD([others["right.a"], others["right.b"]], lr=0.5, momentum=0.9),
    ]
    for step in range(3):
        set_grads(others, 1 + step)
        for optimizer in plain:
            optimizer.step()
    assert same(params, others)
    combined.zero_grad()
    assert all(parameter.grad is None for parameter in params.values())


def test_combined_saves_and_resumes():
    combined, params = make_combined()
    train(combined, params)
    saved = copy.deepcopy(combined.state_dict())
    assert set(saved["state"]) == set(params)
    resumed, others = make_combined()
    with torch.no_grad():
        for name, parameter in others.items():
            parameter.copy_(params[name])
    resumed.load_state_dict(saved)
    train(combined, params, seed=9)
    train(resumed, others, seed=9)
    assert same(params, others)


def test_reading_combined_state_creates_none():
    combined, params = make_combined()
    assert combined.state.get(params["left.a"]) is None
    assert isinstance(combined.optimizers[0][1].state, defaultdict)
    assert len(combined.optimizers[0][1].state) == 0


def test_combined_evaluates_a_closure_once_with_gradients():
    combined, params = make_combined()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        set_grads(params)
        return 3.0

    with torch.no_grad():
        assert combined.step(closure) == 3.0
    assert calls == [True]
    assert len(combined.state) == 4


def test_combined_refuses_two_of_a_name_or_parameter():
    params = make_params()
    one = KeyedOptimizerWrapper(params, adam)
    with pytest.raises(ValueError, match="'a'"):
        CombinedOptimizer([one, KeyedOptimizerWrapper(make_params(), adam)])
    with pytest.raises(ValueError, match=r"'x\.a'.*'a'"):
        CombinedOptimizer([one, ("x", KeyedOptimizerWrapper(params, adam))])


def test_wrapper_calls_before_and_after_the_step():
    params = make_params()
    seen = []
    start = params["a"].detach().clone()
    wrapper = OptimizerWrapper(
        KeyedOptimizerWrapper(params, adam),
        before_step=lambda: seen.append(torch.equal(params["a"], start)),
        after_step=lambda: seen.append(torch.equal(params["a"], start)),
    )
    train(wrapper, params, steps=1)
    assert seen == [True, False]
    assert set(wrapper.state_dict()["state"]) == {"a", "b"}
    wrapper.add_param_group({"params": make_params(names=("c",))})
    wrapper.init_state()
    assert set(wrapper.state_dict()["state"]) == {"a", "b", "c"}
    assert not wrapper.updates_in_backward


@pytest.mark.parametrize(
    "make", [lambda: KeyedOptimizerWrapper(make_params(), adam), lambda: make_combined()[0]]
)
def test_learning_rate_schedulers_drive_it(make):
    optimizer = make()
    start = [group["lr"] for group in optimizer.param_groups]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    for _ in range(2):
        set_grads(optimizer.params)
        optimizer.step()
        scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [lr / 4 for lr in start]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_one_cycle_finds_the_defaults():
    optimizer = KeyedOptimizerWrapper(make_params(), adam)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    assert optimizer.param_groups[0]["betas"][0] == 0.95


def test_hooks_of_torch_are_called():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, adam)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before step"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after step"))
    optimizer.register_state_dict_pre_hook(lambda _: seen.append("before save"))
    optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "extra": 1})
    optimizer.register_load_state_dict_pre_hook(lambda _, saved: {**saved, "param_groups": None})
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("after load"))
    train(optimizer, params, steps=1)
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["extra"] == 1
    saved["param_groups"][0]["lr"] = 0.7
    optimizer.load_state_dict(saved)
    assert seen == ["before step", "after step", "before save", "after load"]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_survives_pickling():
    params = make_params()
    optimizer = KeyedOptimizerWrapper(params, torch.optim.Adam)
    train(optimizer, params)
    copied = pickle.loads(pickle.dumps(optimizer))
    train(copied, copied.params, seed=7)
    train(optimizer, params, seed=7)
    assert same(params, copied.params)


def sparse_grad(parameter, rows, values):
    rows, values = torch.tensor([rows]), torch.tensor(values)[:, None].expand(-1, parameter.shape[1]).clone()
    return torch.sparse_coo_tensor(rows, values, parameter.shape, check_invariants=True)


@pytest.mark.parametrize("bad", [None, float("inf"), float("nan")])
def test_grad_scaler_unscales_and_skips_with_sparse_gradients(bad):
    tables, dense = make_params(0), make_params(1)
    combined = CombinedOptimizer(
        [
            ("tables", KeyedOptimizerWrapper(tables, lambda p: torch.optim.SGD(p, lr=1.0))),
            ("dense", KeyedOptimizerWrapper(dense, lambda p: torch.optim.SGD(p, lr=1.0))),
        ]
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=100)
    before = {name: parameter.detach().clone() for name, parameter in combined.params.items()}
    scaler.scale(torch.ones(()))
    for parameter in dense.values():
        parameter.grad = torch.full_like(parameter, 8.0)
    for parameter in tables.values():
        parameter.grad = sparse_grad(parameter, [0, 2, 0], [8.0, 16.0, 8.0])
    if bad is not None:
        tables["b"].grad = sparse_grad(tables["b"], [1], [bad])
    scaler.step(combined)
    scaler.update()
    if bad is not None:
        assert same(before, combined.params)
        assert scaler.get_scale() == 4.0
        return
    step = torch.tensor([2.0, 0.0, 2.0])[:, None]
    for name in tables:
        torch.testing.assert_close(tables[name].detach(), before[f"tables.{name}"] - step)
        torch.testing.assert_close(dense[name].detach(), before[f"dense.{name}"] - 1)
