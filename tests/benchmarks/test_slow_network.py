import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.slow_network import BACKEND, set_network
from meshrec.comms.collectives import Splits, all_gather, all_to_all
from meshrec.comms.host_link import links
from meshrec.comms.mesh import Axis
from meshrec.testing import RankPool

LATENCY = 0.05


def measured(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds by the clock, and of this process's cores."""
    wall, cores = time.monotonic(), time.process_time()
    work()
    return time.monotonic() - wall, time.process_time() - cores


def exchange_slowly(bytes_per_second: float) -> dict[str, tuple[float, float]]:
    group = dist.new_group(backend=BACKEND)
    rank = dist.get_rank()
    axis = Axis(size=2, rank=rank, group=group)
    sent, tensor = torch.arange(4.0) + 10 * rank, torch.ones(1000)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 1), process_group=group)
    set_network(latency_seconds=LATENCY, bytes_per_second=bytes_per_second)
    received: list[torch.Tensor] = []
    try:
        seconds = {
            "all_to_all": measured(
                lambda: received.append(all_to_all(sent, Splits([2, 2], [2, 2]), axis, "x").wait())
            ),
            "all_gather": measured(lambda: received.append(all_gather(sent, axis, "y").wait())),
            "all_reduce": measured(lambda: dist.all_reduce(tensor, group=group)),
            "barrier": measured(lambda: dist.barrier(group=group)),
            "backward of DDP": measured(lambda: model(torch.ones(1, 3) * (rank + 1)).sum().backward()),
        }
    finally:
        set_network()
    assert links.get(group) is None
    assert received[0].tolist() == [2.0 * rank, 2.0 * rank + 1, 2.0 * rank + 10, 2.0 * rank + 11]
    assert received[1].tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    assert torch.equal(tensor, torch.full((1000,), 2.0))
    assert model.module.weight.grad is not None
    assert model.module.weight.grad.tolist() == [[1.5, 1.5, 1.5]]
    dist.destroy_process_group(group)
    return seconds


def test_collectives_take_latency_and_leave_the_core_alone(ranks: Callable[[int], RankPool]) -> None:
    for seconds in ranks(2).run(exchange_slowly, float("inf")):
        assert min(wall for wall, _ in seconds.values()) >= LATENCY
        assert sum(cores for _, cores in seconds.values()) < LATENCY * len(seconds) / 2


def test_bytes_take_their_time(ranks: Callable[[int], RankPool]) -> None:
    for seconds in ranks(2).run(exchange_slowly, 4000 / 0.1):  # the all-reduce's bytes take 0.1 s
        assert seconds["all_reduce"][0] >= LATENCY + 0.1
        assert seconds["barrier"][0] >= LATENCY


def test_wrong_numbers() -> None:
    with pytest.raises(ValueError, match=r"latency_seconds.*-1.*0"):
        set_network(latency_seconds=-1)
    with pytest.raises(ValueError, match=r"bytes_per_second.*0.*above 0"):
        set_network(bytes_per_second=0)


def send_to_each_other() -> tuple[float, list[float], float]:
    """When this rank sent two messages, when those of the other one were there, when its own were taken."""
    group = dist.new_group(backend=BACKEND)
    peer, tensors = 1 - dist.get_rank(), [torch.full((1000,), float(tag)) for tag in range(2)]
    dist.barrier(group=group)
    set_network(latency_seconds=LATENCY, bytes_per_second=4000 / LATENCY)
    try:
        sent = time.monotonic()
        works = [dist.isend(tensor, peer, group=group, tag=tag) for tag, tensor in enumerate(tensors)]
        arrived = []
        for tag in range(2):
            received = torch.empty(1000)
            dist.recv(received, peer, group=group, tag=tag)
            assert torch.equal(received, tensors[tag])
            arrived.append(time.monotonic())
        for work in works:
            assert work is not None
            work.wait()
            assert work.is_completed()
        taken = time.monotonic()
    finally:
        set_network()
    dist.destroy_process_group(group)
    return sent, arrived, taken


def test_messages_arrive_one_after_the_other(ranks: Callable[[int], RankPool]) -> None:
    found = ranks(2).run(send_to_each_other)  # one clock for all processes
    for own, other in (found, found[::-1]):
        assert own[1][0] >= other[0] + 2 * LATENCY
        assert own[1][1] >= other[0] + 3 * LATENCY
        assert own[2] >= own[0] + 3 * LATENCY
