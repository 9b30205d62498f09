import logging
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from meshrec.comms import collectives
from meshrec.comms.collectives import (
    Splits,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather_objects,
    measure_traffic,
    named_failure,
    release_read,
)
from meshrec.comms.host_link import links
from meshrec.comms.mesh import Axis, default_env
from meshrec.ops.operators import OutOfMemoryError
from meshrec.testing import RankError, RankPool


class LogOf(logging.Handler):
    """The lines that a logger writes while it is open."""

    def __init__(self, name):
        super().__init__()
        self.logger, self.lines = logging.getLogger(name), []

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __enter__(self):
        self.before = self.logger.level  # other tests of this pool may have silenced it
        self.logger.setLevel(logging.WARNING)
        self.logger.addHandler(self)
        return self.lines

    def __exit__(self, *_):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.before)


def exchange():
    axis = default_env().world
    mine = torch.arange(3) + 10 * axis.rank
    with measure_traffic() as traffic:
        received = all_to_all(mine, Splits([1, 2], [1 + axis.rank] * 2), axis, "test").wait()
        gathered = all_gather(mine, axis, "gather").wait()
    value = torch.tensor([axis.rank])
    broadcast(value, axis, "first")
    return (
        received.tolist(),
        gathered.tolist(),
        dict(traffic),
        value.item(),
        gather_objects(axis.rank, axis, "o"),
    )


def test_collectives(ranks):
    first, second = ranks(2).run(exchange)
    assert first == ([0, 10], [[0, 1, 2], [10, 11, 12]], {"test": 16, "gather": 24}, 0, [0, 1])
    assert second[0] == [1, 2, 11, 12]
    assert second[2]["test"] == 8


def reduce_columns():
    """Collectives that change a column of a matrix, which has gaps in memory."""
    axis = default_env().world
    matrix = torch.tensor([[1.0, 10.0]]).repeat(4, 1) * (axis.rank + 1)
    all_reduce(matrix[:, 0], axis, "sum")
    broadcast(matrix[:, 1], axis, "second", source=1)
    return matrix.tolist()


def test_columns_are_reduced_and_broadcast_by_their_elements(ranks):
    assert ranks(2).run(reduce_columns) == [[[3, 20]] * 4] * 2


def exchange_copies():
    """As where tensors are on CUDA and the group is gloo's; the copies are then of other tensors."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(collectives, "links", defaultdict(lambda: None))
    monkeypatch.setattr(collectives, "goes_through_cpu", lambda tensor, group: True)
    try:
        axis = default_env().world
        total = torch.tensor([axis.rank + 1.0])
        all_reduce(total, axis, "sum")
        return (*exchange(), total.item())
    finally:
        monkeypatch.undo()


def test_tensors_of_another_device_than_the_groups_go_through_copies(ranks):
    *found, total = ranks(2).run(exchange_copies)[0]
    assert tuple(found) == ranks(2).run(exchange)[0]
    assert total == 3


def which_go_through_the_cpu():
    collectives._warned_devices.clear()  # other tests of this pool may have been told already
    group = default_env().world.group
    with LogOf("meshrec") as lines:
        found = [
            collectives.goes_through_cpu(torch.empty(1, device=device), group)
            for device in ("cpu", "meta", "meta")
        ]
    return found, lines


def test_one_line_says_that_exchanges_go_through_the_cpu(ranks):
    for found, lines in ranks(2).run(which_go_through_the_cpu):
        assert found == [False, True, True]
        assert len(lines) == 1
        assert "tables are on meta: every exchange copies through the CPU" in lines[0]


def send_the_same():
    """Rank p gives everybody p + 1 elements."""
    axis = default_env().world
    mine = torch.full((axis.rank + 1,), axis.rank)
    in_flight = all_to_all(mine, Splits([axis.rank + 1] * 2, [1, 2]), axis, "test", same=True)
    received = in_flight.wait().tolist()
    dist.barrier()
    release_read(axis)
    link = links[axis.group]
    return received, len(link.sent) if link else 0, link is not None


@contextmanager
def pool_of_two(host_link: str) -> Iterator[RankPool]:
    """Two ranks that may link, or not ("0"): set there, as they do not see the environment of tests."""
    with RankPool(2) as pool:
        pool.run(set_host_link, host_link)
        yield pool


def set_host_link(value):
    os.environ["MESHREC_HOST_LINK"] = value


@pytest.mark.parametrize("host_link", ["1", "0"])
def test_all_ranks_get_the_same(host_link):
    with pool_of_two(host_link) as pool:
        assert pool.run(send_the_same) == [([0, 1, 1], 0, host_link == "1")] * 2


def run_out_of_memory():
    axis = default_env().world
    try:
        all_to_all(torch.arange(2), Splits([1, 1], [2**50, 2**50]), axis, "embeddings").wait()
    except RuntimeError as error:
        return type(error), str(error)
    return None


@pytest.mark.parametrize("host_link", ["1", "0"])
def test_missing_memory_is_not_told_as_a_failed_collective(host_link):
    with pool_of_two(host_link) as pool:
        for kind, text in pool.run(run_out_of_memory):
            assert kind is OutOfMemoryError
            assert "allocate" in text
        assert len(pool.run(exchange)) == 2


def test_one_rank_needs_no_group():
    mine = torch.arange(3)
    assert all_to_all(mine, Splits([3], [3]), Axis(), "test").wait() is mine
    assert all_gather(mine, Axis(), "test").wait().tolist() == [[0, 1, 2]]
    assert gather_objects("x", Axis(), "test") == ["x"]


def lose_a_peer_of_gloo():
    group = dist.group.WORLD
    if dist.get_rank() == 1:
        os._exit(7)
    time.sleep(0.5)
    assert str(named_failure(RuntimeError("another error"))) == "another error"
    try:
        for _ in range(3):
            dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        raise named_failure(error) from error


def test_an_error_of_gloo_is_given_a_rank():
    pool = RankPool(2, timeout_seconds=40)
    try:
        with pytest.raises(RankError, match=r"CollectiveError.*rank 1"):
            pool.run(lose_a_peer_of_gloo)
    finally:
        pool.close()


def report_death():
    axis = default_env().world
    if axis.rank == 1:
        os._exit(7)
    time.sleep(0.5)
    for _ in range(3):
        all_to_all(torch.arange(2), Splits([1, 1], [1, 1]), axis, "embeddings").wait()


def test_the_error_says_who_does_not_answer():
    pool = RankPool(2, timeout_seconds=40)
    try:
        with pytest.raises(RankError, match=r"'embeddings'.*\[0, 1\].*rank 1") as failure:
            pool.run(report_death)
        assert re.search(r"rank 1:\s.*code 7", str(failure.value))
    finally:
        pool.close()
