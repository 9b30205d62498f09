import pytest
import torch

from meshrec.compat.bridge import keyed
from meshrec.optim import WarmupPolicy
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
        lambda optimizer: keyed.WarmupOptimizer(optimizer, [keyed.WarmupStage(WarmupPolicy.LINEAR, 3)]),
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
    stage = keyed.WarmupStage(WarmupPolicy.POLY, 10, 2.0, lr_scale=0.5)
    assert (stage.policy, stage.max_iters, stage.value, stage.lr_scale) == (WarmupPolicy.POLY, 10, 2.0, 0.5)


def test_there_is_no_norm_over_groups_of_ranks():
    with pytest.raises(ValueError, match="Leave enable_global_grad_clip"):
        keyed.GradientClippingOptimizer(make(), enable_global_grad_clip=True)
