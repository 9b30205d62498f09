import os
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from meshrec.comms.dense_gradients import DenseGradients, average_gradients
from meshrec.comms.host_link import links
from meshrec.comms.mesh import Axis, default_env
from meshrec.ops.dist.average_naive import average_ranks
from meshrec.testing import RankError, RankPool


def wrapped(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 300), nn.ReLU(), nn.Linear(300, 301), nn.ReLU(), nn.Linear(301, 1))
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1, **options)


def gradients(model, steps):
    torch.manual_seed(1 + dist.get_rank())
    for _ in range(steps):  # buckets are laid out anew after the first
        model.zero_grad()
        model(torch.rand(5, 7)).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def both_ways(options):
    axis = default_env().world
    hooked = wrapped(**options)
    state = DenseGradients.for_axis(axis)
    if links[axis.group] is None:
        return None
    hooked.register_comm_hook(state, average_gradients)
    return [(gradients(model, steps=3)) for model in (hooked, wrapped(**options))]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("view", [False, True])
def test_gradients_are_those_of_gloo(ranks, world_size, view):
    found = ranks(world_size).run(both_ways, {"gradient_as_bucket_view": view})
    if found[0] is None:
        pytest.skip("no links here")
    for own, expected in found:
        for gradient, first, reference in zip(own, found[0][0], expected, strict=True):
            assert torch.equal(gradient, first)  # on every rank
            if world_size == 2:
                assert torch.equal(gradient, reference)
            torch.testing.assert_close(gradient, reference)


def tables_backward(static_graph, ends_with_backward):
    """Return the number of buckets in progress in each tables' backward, and after it, and the gradients."""
    state = DenseGradients.for_axis(default_env().world)
    state.ends_with_backward = ends_with_backward
    in_progress = []

    class Tables(torch.autograd.Function):
        """Stands for the tables, whose backward comes after that of all dense parameters."""

        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            in_progress.append(len(state._in_progress))
            return gradient

    model = wrapped(static_graph=static_graph)
    model.register_comm_hook(state, average_gradients)
    for _ in range(3):
        torch.manual_seed(dist.get_rank())
        model.zero_grad()
        model(Tables.apply(torch.rand(5, 7, requires_grad=True))).sum().backward()
    return in_progress, len(state._in_progress), [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_tables_backward_does_not_wait_for_dense_gradients(ranks, world_size):
    pool = ranks(world_size)
    waiting = pool.run(tables_backward, False, False)
    for (in_progress, left, gradients), (before, _, expected) in zip(
        pool.run(tables_backward, False, True), waiting, strict=True
    ):
        assert min(in_progress) > 0
        assert left == 0
        assert max(before) == 0
        assert all(map(torch.equal, gradients, expected))


def test_with_a_static_graph_the_last_hook_waits(ranks):
    for _, left, _ in ranks(2).run(tables_backward, True, False):
        assert left == 0


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn_buffers(rank):
    generator = torch.Generator().manual_seed(rank)
    sizes = [0, 1, 5, 100_003]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes for dtype in DTYPES]


def averaged(with_link, is_deferred):
    group = dist.new_group()
    if not with_link:
        links[group] = None
    axis = Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=group)
    state = DenseGradients.for_axis(axis)
    buffers = drawn_buffers(axis.rank)
    with state.deferred() if is_deferred else nullcontext():
        futures = [state.start(buffer) for buffer in buffers]
    state.finish()
    assert all(future.value() is buffer for future, buffer in zip(futures, buffers, strict=True))
    return buffers


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_bits_are_those_of_adding_in_the_order_of_ranks(ranks, world_size):
    for expected in (buffers := drawn_buffers(0)):
        expected.zero_()
    terms = zip(*map(drawn_buffers, range(world_size)), strict=True)
    for expected, of_ranks in zip(buffers, terms, strict=True):
        average_ranks(expected, list(of_ranks), world_size)
    for ways in ((True, False), (False, False), (True, True), (False, True)):
        for found in ranks(world_size).run(averaged, *ways):
            assert all(map(torch.equal, found, buffers)), ways


def averaged_in_bf16(with_link):
    group = dist.new_group()
    if not with_link:
        links[group] = None
    axis = Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=group)
    state = DenseGradients.for_axis(axis, dtype=torch.bfloat16)
    buffers = [buffer for buffer in drawn_buffers(axis.rank) if buffer.dtype == torch.float32]
    for buffer in buffers:
        state.start(buffer)
    state.finish()
    return buffers


@pytest.mark.parametrize("world_size", [2, 3])
def test_bf16_exchange_adds_in_fp32_and_keeps_fp32_gradients(ranks, world_size):
    terms = [
        [buffer.bfloat16() for buffer in drawn_buffers(rank) if buffer.dtype == torch.float32]
        for rank in range(world_size)
    ]
    expected = [torch.empty_like(term) for term in terms[0]]
    for mean, sent in zip(expected, zip(*terms, strict=True), strict=True):
        average_ranks(mean, list(sent), world_size)
    for with_link in (True, False):
        for found in ranks(world_size).run(averaged_in_bf16, with_link):
            assert {buffer.dtype for buffer in found} == {torch.float32}
            assert all(map(torch.equal, found, [mean.float() for mean in expected]))


def fewer_elements_than_ranks():
    axis = default_env().world
    state = DenseGradients.for_axis(axis)
    if state is None:
        return None
    future = state.start(torch.tensor([1.0 + axis.rank]))
    empty = state.start(torch.empty(0))
    state.finish()
    return future.value().tolist(), empty.value().tolist()


def test_ranks_may_have_no_part(ranks):
    assert ranks(4).run(fewer_elements_than_ranks) in ([([2.5], [])] * 4, [None] * 4)


def test_one_rank_needs_no_hook():
    assert DenseGradients.for_axis(Axis()) is None


def die_in_the_backward_pass():
    axis = default_env().world
    model = wrapped()
    model.register_comm_hook(DenseGradients.for_axis(axis), average_gradients)
    gradients(model, steps=1)
    loss = model(torch.rand(5, 7)).sum()
    if axis.rank == 1:
        os._exit(7)
    loss.backward()


def test_the_others_name_the_dead_rank(ranks):
    if ranks(2).run(fewer_elements_than_ranks)[0] is None:
        pytest.skip("no links here")
    pool = RankPool(2, timeout_seconds=40)
    try:
        failed = r"'gradients of dense parameters' over ranks \[0, 1\] failed: no answer from rank 1"
        with pytest.raises(RankError, match=f"CollectiveError.*rank 0.*{failed}"):
            pool.run(die_in_the_backward_pass)
    finally:
        pool.close()
