import pytest
import torch

from meshrec.compat.bridge import keyed
from meshrec.compat.bridge.rowwise_adagrad import RowWiseAdagrad
from meshrec.compat.bridge.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from meshrec.optim.clipping import GradientClipping


def make(**options):
    parameters = {"w": torch.nn.Parameter(torch.ones(2))}
    return keyed.KeyedOptimizerWrapper(parameters, lambda p: torch.optim.SGD(p, lr=0.1), **options)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda optimizer: optimizer,
        lambda optimizer: keyed.CombinedOptimizer([("a", optimizer)]),
        keyed.OptimizerWrapper,
        lambda optimizer: keyed.GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.5),
        lambda optimizer: WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, 3)]),
    ],
)
def test_groups_are_saved_only_on_demand(wrap):
    optimizer = wrap(make())
    assert list(optimizer.state_dict()) == ["state"]
    optimizer.save_param_groups(True)
    assert sorted(optimizer.state_dict()) == ["param_groups", "state"]


def test_the_factory_may_take_the_names():
    found = {}

    def factory(parameters):
        found.update(parameters)
        return torch.optim.SGD(parameters.values(), lr=0.1)

    parameters = {"w": torch.nn.Parameter(torch.ones(2))}
    keyed.KeyedOptimizerWrapper(parameters, factory, pass_params_dict=True)
    assert list(found) == ["w"]


def test_stages_have_their_arguments_in_order():
    stage = WarmupStage(WarmupPolicy.POLY, 10, 2.0, lr_scale=0.5)
    assert (stage.policy, stage.max_iters, stage.value, stage.lr_scale) == (WarmupPolicy.POLY, 10, 2.0, 0.5)


def test_there_is_no_norm_over_groups_of_ranks():
    with pytest.raises(ValueError, match="enable_global_grad_clip"):
        keyed.GradientClippingOptimizer(make(), enable_global_grad_clip=True)


class Counting(keyed.KeyedOptimizer):
    """As users write them: only a step, which wants its closure."""

    def step(self, closure):
        for parameter in self.params.values():
            self.state.setdefault(parameter, {"count": torch.zeros(())})["count"] += 1


def counting(name="w"):
    parameter = torch.nn.Parameter(torch.ones(2))
    return Counting({name: parameter}, {}, [{"params": [parameter], "lr": 1.0}])


def test_a_subclass_has_only_a_step():
    optimizer = counting()
    assert isinstance(optimizer, keyed.KeyedOptimizer)
    assert isinstance(make(), keyed.KeyedOptimizer)
    optimizer.init_state()
    assert optimizer.state_dict() == {"state": {"w": {"count": torch.ones(())}}}
    assert optimizer.params["w"].grad.tolist() == [0.0, 0.0]
    with pytest.raises(NotImplementedError, match="another"):
        optimizer.add_param_group({})
    with pytest.raises(ValueError, match="params"):
        Counting({}, {torch.ones(1): {}}, [])


@pytest.mark.parametrize(
    "wrap",
    [
        keyed.OptimizerWrapper,
        lambda optimizer: keyed.CombinedOptimizer([("", optimizer)]),
        lambda optimizer: keyed.GradientClippingOptimizer(optimizer, GradientClipping.VALUE, 0),
        lambda optimizer: WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, 3)]),
    ],
)
def test_wrappers_step_a_subclass(wrap):
    inside = counting()
    optimizer = wrap(inside)
    inside.params["w"].grad = torch.ones(2)
    optimizer.step()
    assert inside.state[inside.params["w"]]["count"] == 1
    other = wrap(counting())
    other.step()
    other.step()
    other.load_state_dict(optimizer.state_dict())
    assert other.state_dict()["state"]["w"]["count"] == 1


def test_loading_ends_with_the_users_hook():
    found = []

    class Hooked(Counting):
        def post_load_state_dict(self):
            found.append(self.state_dict()["state"]["w"]["count"].item())

    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = Hooked({"w": parameter}, {parameter: {"count": torch.zeros(())}}, [{"params": [parameter]}])
    saved = {"state": {"w": {"count": torch.tensor(5.0)}}}
    keyed.CombinedOptimizer([optimizer]).load_state_dict(saved)
    optimizer.load_state_dict(saved)
    assert found == [5.0, 5.0]


def test_a_limit_of_0_leaves_no_gradient():
    optimizer = make()
    optimizer.params["w"].grad = torch.ones(2)
    clipping = keyed.GradientClippingOptimizer(optimizer, GradientClipping.NORM, 0.0, track_grad_norm=True)
    clipping.step()
    assert optimizer.params["w"].tolist() == [1.0, 1.0]
    assert torch.allclose(clipping.last_total_grad_norm, torch.tensor(2.0).sqrt())


@pytest.mark.parametrize("norm_type", [1.0, 2.0, torch.inf])
def test_norms_of_gradients(norm_type):
    grads = [torch.tensor([3.0, -4.0]), torch.tensor([[1.0]])]
    expected = torch.linalg.vector_norm(torch.tensor([3.0, -4.0, 1.0]), norm_type)
    assert torch.allclose(keyed.compute_total_norm(grads, {}, norm_type), expected)
    assert keyed.compute_total_norm([], {}, norm_type) == 0


class Told(keyed.KeyedOptimizer):
    """It remembers what it was told."""

    told = ()

    def post_load_state_dict(self):
        self.told += ("loaded",)

    def set_optimizer_step(self, step):
        self.told += (step,)

    def update_hyper_parameters(self, params_dict):
        self.told += (params_dict,)


@pytest.mark.parametrize(
    "wrap",
    [
        keyed.OptimizerWrapper,
        keyed.GradientClippingOptimizer,
        lambda optimizer: WarmupOptimizer(optimizer, [WarmupStage(WarmupPolicy.LINEAR, 3)]),
    ],
)
def test_wrappers_pass_on_what_they_are_told(wrap):
    inner = Told({"w": torch.nn.Parameter(torch.ones(2))}, {}, [])
    outer = keyed.CombinedOptimizer([wrap(inner)])
    outer.post_load_state_dict()
    outer.set_optimizer_step(3)
    outer.update_hyper_parameters({"lr": 0.1})
    assert inner.told == ("loaded", 3, {"lr": 0.1})


class WithScratch(torch.optim.SGD):
    def scratch_buffers(self):
        return (self.param_groups[0]["params"][0].detach(),)


def test_scratch_buffers_are_those_of_the_optimizers_inside():
    weight = torch.nn.Parameter(torch.ones(2))
    inner = keyed.KeyedOptimizerWrapper({"w": weight}, lambda p: WithScratch(p, lr=0.1))
    for optimizer in (
        inner,
        keyed.OptimizerWrapper(inner),
        keyed.CombinedOptimizer([("a", inner), ("b", make())]),
    ):
        assert [buffer.tolist() for buffer in optimizer.scratch_buffers()] == [[1, 1]]
    assert make().scratch_buffers() == ()


def test_the_largest_of_empty_gradients():
    empty, full = torch.empty(0), torch.tensor([1.0, -3.0])
    assert keyed.batch_cal_norm([empty, full], 1.0, torch.inf).item() == 3
    assert keyed.batch_cal_norm([empty], 1.0, torch.inf).item() == -torch.inf
    assert keyed.batch_cal_norm([empty, full], 1.0, 2.0).item() == 10


@pytest.mark.parametrize("pass_params_dict", [False, True])
def test_a_wrapper_without_parameters_steps_nothing_and_says_so(pass_params_dict, caplog):
    def adagrad(params):
        return RowWiseAdagrad(list(params.values()) if pass_params_dict else params, lr=0.1)

    empty = keyed.KeyedOptimizerWrapper({}, adagrad, pass_params_dict)
    assert "no parameters" in caplog.text
    trained = make()
    combined = keyed.CombinedOptimizer([("tables", empty), ("dense", trained)])
    (weight,) = trained.params.values()
    combined.zero_grad()
    weight.sum().backward()
    combined.step()
    torch.testing.assert_close(weight.detach(), torch.full((2,), 0.9))
    combined.load_state_dict(combined.state_dict())
    assert list(combined.params) == ["dense.w"]


def test_init_state_of_a_wrapper_creates_state_and_zero_gradients():
    weight = torch.nn.Parameter(torch.ones(2, 3))
    wrapper = keyed.KeyedOptimizerWrapper({"w": weight}, lambda params: torch.optim.Adam(params, lr=0.1))
    assert not wrapper.state_dict()["state"]
    wrapper.init_state()
    assert list(wrapper.state_dict()["state"]) == ["w"]
    assert torch.equal(weight.grad, torch.zeros(2, 3))
    assert torch.equal(weight.detach(), torch.ones(2, 3))
