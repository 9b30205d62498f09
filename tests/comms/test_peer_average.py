"""Averages from point-to-point messages: bits, traffic between hosts, and failures."""

import os

import pytest
import torch
import torch.distributed as dist

from meshrec.comms.collectives import measure_traffic
from meshrec.comms.failures import announce
from meshrec.comms.mesh import Axis
from meshrec.comms.peer_average import PeerAverage, Routes
from meshrec.ops.dist.average_naive import average_ranks
from meshrec.testing import RankError, RankPool

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def drawn_buffers(rank):
    generator = torch.Generator().manual_seed(rank)
    sizes = [0, 1, 5, 100_003]
    return [torch.randn(size, generator=generator).to(dtype) for size in sizes for dtype in DTYPES]


def averaged_over_hosts(hosts):
    group = dist.new_group()
    axis = Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=group)
    average = PeerAverage(axis, hosts, "test")
    buffers = drawn_buffers(axis.rank)
    with measure_traffic() as traffic:
        in_flight = [average.start(buffer) for buffer in buffers]
        means = [started.wait() for started in reversed(in_flight)][::-1]
    return means, traffic["test"]


@pytest.mark.parametrize("hosts", ["ab", "aab", "aabb", "abab", "aaab", "abcd"])
def test_bits_do_not_depend_on_hosts(ranks, hosts):
    for expected in (buffers := drawn_buffers(0)):
        expected.zero_()
    for expected, of_ranks in zip(
        buffers, zip(*map(drawn_buffers, range(len(hosts))), strict=True), strict=True
    ):
        average_ranks(expected, list(of_ranks), len(hosts))
    results = ranks(len(hosts)).run(averaged_over_hosts, list(hosts))
    for means, _ in results:
        assert all(map(torch.equal, means, buffers))
    num_bytes, size = sum(buffer.nbytes for buffer in buffers), len(hosts)
    # Two ranks exchange everything; others send terms and means of size - 1 shares, whoever passes them on.
    total = 2 * num_bytes if size == 2 else 2 * (size - 1) * num_bytes
    assert sum(sent for _, sent in results) == total


@pytest.mark.parametrize("hosts", ["a", "ab", "aabb", "abab", "aaab", "abbbcccc"])
def test_a_mean_crosses_to_each_other_host_once(hosts):
    routes, ranks = Routes(hosts), range(len(hosts))
    for owner in ranks:
        sent = [(sender, rank) for sender in ranks for rank in routes.targets(owner, sender)]
        assert sorted(rank for _, rank in sent) == [rank for rank in ranks if rank != owner]
        assert all(routes.source(owner, rank) == sender for sender, rank in sent)
        crossing = [hosts[rank] for sender, rank in sent if hosts[sender] != hosts[rank]]
        assert sorted(crossing) == sorted(set(hosts) - {hosts[owner]})


def die_before_averaging(hosts):
    axis = Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD)
    average = PeerAverage(axis, hosts, "gradients")
    average.start(torch.ones(1000)).wait()
    if axis.rank == 1:
        os._exit(7)
    average.start(torch.ones(1000)).wait()


def test_without_a_link_the_others_name_the_dead_rank():
    pool = RankPool(2, timeout_seconds=40)
    try:
        with pytest.raises(RankError, match=r"CollectiveError.*rank 0.*'gradients'.*no answer from rank 1"):
            pool.run(die_before_averaging, ["a", "b"])
    finally:
        pool.close()


def averages_while_another_fails():
    axis = Axis(size=dist.get_world_size(), rank=dist.get_rank(), group=dist.group.WORLD)
    average = PeerAverage(axis, ["a", "b"], "gradients")
    if axis.rank == 1:
        announce(ValueError("only here"))
        return "announced"
    try:
        average.start(torch.ones(1000)).wait()
    except ValueError as error:
        return str(error)
    return "none"


def test_without_a_link_an_error_of_one_rank_reaches_the_others():
    pool = RankPool(2, timeout_seconds=40)
    try:
        assert pool.run(averages_while_another_fails) == ["rank 1: only here", "announced"]
    finally:
        pool.close()
