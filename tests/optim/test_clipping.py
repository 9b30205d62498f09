import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from meshrec.compat.bridge.keyed import batch_cal_norm
from meshrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)
from meshrec.optim.keyed import KeyedOptimizer
from meshrec.optim.parts import mark_shard

ROWS = torch.tensor([[4, 0, 4]])


def sgd(params):
    return torch.optim.SGD(params, lr=1.0)


def make_params():
    generator = torch.Generator().manual_seed(0)
    return {
        "table": torch.nn.Parameter(torch.randn(6, 4, generator=generator)),
        "dense": torch.nn.Parameter(torch.randn(3, 5, generator=generator)),
        "idle": torch.nn.Parameter(torch.randn(2, generator=generator)),
    }


def set_grads(params, *, sparse):
    generator = torch.Generator().manual_seed(1)
    table = torch.sparse_coo_tensor(
        ROWS, torch.randn(3, 4, generator=generator), (6, 4), check_invariants=True
    )
    params["table"].grad = table if sparse else table.to_dense()
    params["dense"].grad = torch.randn(3, 5, generator=generator)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("norm_type", [2.0, 1.0, "inf"])
@pytest.mark.parametrize("max_gradient", [0.5, 100.0])
def test_norm_clips_as_torch_clips_dense_gradients(max_gradient, norm_type, sparse):
    params, others = make_params(), make_params()
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, sgd), GradientClipping.NORM, max_gradient, norm_type
    )
    assert optimizer.last_total_grad_norm is None
    set_grads(params, sparse=sparse)
    set_grads(others, sparse=False)
    norm = torch.nn.utils.clip_grad_norm_(others.values(), max_gradient, float(norm_type))
    optimizer.step()
    sgd(others.values()).step()
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, others[name])
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)


@pytest.mark.parametrize("sparse", [False, True])
def test_value_clips_sums_of_duplicates(sparse):
    params, others = make_params(), make_params()
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, sgd), clipping=GradientClipping.VALUE, max_gradient=0.3
    )
    set_grads(params, sparse=sparse)
    set_grads(others, sparse=False)
    torch.nn.utils.clip_grad_value_(others.values(), 0.3)
    optimizer.step()
    sgd(others.values()).step()
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, others[name])


def test_the_norm_spans_all_optimizers():
    params, others = make_params(), make_params()
    set_grads(params, sparse=True)
    set_grads(others, sparse=False)
    parts = [(name, KeyedOptimizerWrapper({"x": params[name]}, sgd)) for name in params]
    optimizer = GradientClippingOptimizer(CombinedOptimizer(parts), GradientClipping.NORM, 0.5)
    norm = torch.nn.utils.clip_grad_norm_(others.values(), 0.5)
    optimizer.step()
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    torch.testing.assert_close(params["table"].grad.to_dense(), others["table"].grad)


def test_half_gradients_are_measured_in_fp32():
    parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float16))
    parameter.grad = torch.full((4, 4), 2.0**15, dtype=torch.float16)
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": parameter}, sgd), GradientClipping.NORM, 4.0
    )
    optimizer.step()
    assert optimizer.last_total_grad_norm == 2.0**17
    torch.testing.assert_close(parameter.detach(), torch.full((4, 4), -1.0, dtype=torch.float16))


def test_none_leaves_gradients_and_a_closure_comes_first():
    for clipping, expected in ((GradientClipping.NONE, 2.0), (GradientClipping.VALUE, 0.5)):
        parameter = torch.nn.Parameter(torch.zeros(3))
        keyed = KeyedOptimizerWrapper({"p": parameter}, sgd)
        optimizer = GradientClippingOptimizer(keyed, clipping, max_gradient=0.5)

        def closure(parameter=parameter):
            parameter.grad = torch.full((3,), 2.0)
            return 1.5

        assert optimizer.step(closure) == 1.5
        assert parameter.tolist() == [-expected] * 3


def test_without_gradients_nothing_happens():
    params = make_params()
    optimizer = GradientClippingOptimizer(KeyedOptimizerWrapper(params, sgd), GradientClipping.NORM)
    optimizer.step()
    assert optimizer.last_total_grad_norm is None


def test_clips_after_the_grad_scaler_unscales():
    params, others = make_params(), make_params()
    set_grads(params, sparse=True)
    set_grads(others, sparse=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    scaler.scale(torch.ones(()))
    for parameter in params.values():
        if parameter.grad is not None:
            parameter.grad = parameter.grad * 16.0
    optimizer = GradientClippingOptimizer(KeyedOptimizerWrapper(params, sgd), GradientClipping.NORM, 0.5)
    scaler.step(optimizer)
    torch.nn.utils.clip_grad_norm_(others.values(), 0.5)
    sgd(others.values()).step()
    for name, parameter in params.items():
        torch.testing.assert_close(parameter, others[name])


def test_state_passes_through():
    params = make_params()
    inner = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))
    optimizer = GradientClippingOptimizer(inner)
    optimizer.init_state()
    optimizer.add_param_group({"params": {"more": torch.nn.Parameter(torch.ones(2))}, "lr": 0.5})
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert set(optimizer.state_dict()["state"]) == {"table", "dense", "idle"}
    assert set(optimizer.params) == {"table", "dense", "idle", "more"}


class InBackward(KeyedOptimizer):
    @property
    def updates_in_backward(self):
        return True

    def step(self, closure=None):
        return None

    def add_param_group(self, param_group):
        raise AssertionError

    def create_state(self, names, sparse_names=()):
        raise AssertionError


def test_updates_in_backward_cannot_be_clipped():
    params = make_params()
    fused = InBackward(params, {}, [{"params": list(params.values()), "lr": 0.1}])
    message = r'updated in backward cannot be clipped.*Fuse with update="on_step"'
    for optimizer in (fused, CombinedOptimizer([fused]), GradientClippingOptimizer(fused)):
        with pytest.raises(ValueError, match=message):
            GradientClippingOptimizer(optimizer, GradientClipping.NORM)
    assert GradientClippingOptimizer(fused).updates_in_backward


@pytest.mark.parametrize("wrong", [{"max_gradient": 0.0}, {"norm_type": -1.0}, {"norm_type": "nan"}])
def test_limits_must_be_positive(wrong):
    with pytest.raises(ValueError, match=r"max_gradient.*norm_type.*above 0"):
        GradientClippingOptimizer(KeyedOptimizerWrapper(make_params(), sgd), GradientClipping.NORM, **wrong)


def infinity_norms(nan_rank):
    """The norms of shards of which one has a NaN: a marked shard's, a DTensor's and the bridge's."""
    group, rank = dist.group.WORLD, dist.get_rank()
    gradient = torch.tensor([1.0, 2.0 + rank])
    if rank == nan_rank:
        gradient[0] = torch.nan
    shard = torch.nn.Parameter(torch.zeros(2))
    shard.grad = gradient.clone()
    mark_shard(shard, group, is_sharded=True)
    whole = torch.empty(2, 2)
    dist.all_gather_into_tensor(whole, gradient[None], group=group)
    mesh = init_device_mesh("cpu", (2,))
    dtensor = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 2), mesh, [Shard(0)]))
    dtensor.grad = distribute_tensor(whole, mesh, [Shard(0)])
    norms = [batch_cal_norm([gradient], 1.0, torch.inf, [group]).item()]
    for parameter in (shard, dtensor):
        keyed = KeyedOptimizerWrapper({"p": parameter}, sgd)
        optimizer = GradientClippingOptimizer(keyed, GradientClipping.NORM, 1.0, "inf")
        optimizer.step()
        norms.append(optimizer.last_total_grad_norm.item())
    return norms


@pytest.mark.parametrize("nan_rank", [0, 1, None])
def test_the_infinity_norm_is_nan_if_a_shard_on_any_rank_has_a_nan(ranks, nan_rank):
    norm = 3.0 if nan_rank is None else torch.nan
    expected = torch.full((2, 3), norm)
    torch.testing.assert_close(torch.tensor(ranks(2).run(infinity_norms, nan_rank)), expected, equal_nan=True)
