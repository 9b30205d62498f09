import time
from collections.abc import Callable
from typing import Any

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
