import logging
import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from meshrec.comms import host_link
from meshrec.comms.collectives import Splits, all_gather, all_to_all, release_read
from meshrec.comms.host_link import links, open_link
from meshrec.comms.mesh import Axis, default_env
from meshrec.ops.library import has_kernels
from meshrec.testing import RankError, RankPool

pytestmark = pytest.mark.skipif(
    host_link._host_id() == "" or not has_kernels, reason="links need Linux and compiled kernels"
)
DTYPES = [torch.float32, torch.int64, torch.bfloat16, torch.uint8]


def new_axis():
    """An axis whose group, and so its link, is of its own."""
    group = dist.new_group()
    return Axis(size=group.size(), rank=group.rank(), group=group)


def draws(axis, count, largest):
    """What this rank sends in each of some exchanges; ranks draw the same sizes."""
    draw = random.Random(0)
    for number in range(count):
        sizes = [
            [draw.choice([0, 1, draw.randrange(largest)]) for _ in range(axis.size)] for _ in range(axis.size)
        ]
        splits = Splits(sizes[axis.rank], [row[axis.rank] for row in sizes])
        sent = torch.randint(0, 100, (sum(splits.sent),)).to(DTYPES[number % len(DTYPES)])
        yield sent, splits


def exchange_like_gloo():
    axis = default_env().world
    torch.manual_seed(axis.rank)
    for sent, splits in draws(axis, 30, 200_000):
        expected = sent.new_empty(sum(splits.received))
        dist.all_to_all_single(expected, sent, splits.received, splits.sent)
        assert torch.equal(all_to_all(sent, splits, axis, "test").wait(), expected)
        gathered = [torch.empty(3, 2) for _ in range(axis.size)]
        dist.all_gather(gathered, mine := torch.rand(2, 3).t())
        assert torch.equal(all_gather(mine, axis, "test").wait(), torch.stack(gathered))
    assert links[axis.group] is not None


@pytest.mark.parametrize("world_size", [2, 4])
def test_results_are_those_of_gloo(ranks, world_size):
    ranks(world_size).run(exchange_like_gloo)


def open_by_looking():
    group = new_axis().group
    first = links.get(group)
    return first, links[group] is links.get(group) is not None


def test_a_link_is_opened_when_it_is_looked_up_first(ranks):
    assert ranks(2).run(open_by_looking) == [(None, True)] * 2


def wait_in_another_order():
    axis = default_env().world
    started = []
    for sent, splits in draws(axis, 100, 1000):
        sent.fill_(axis.rank)
        started.append((all_to_all(sent, splits, axis, "test"), splits.received))
    started = started[:1] + started[:0:-1] if axis.rank == 0 else started
    for in_flight, sizes in started:
        expected = torch.arange(axis.size).repeat_interleave(torch.tensor(sizes))
        assert in_flight.wait().tolist() == expected.tolist()


def test_many_are_in_flight(ranks):
    ranks(4).run(wait_in_another_order)


def drop_without_waiting():
    axis = new_axis()
    mine = torch.full((10,), axis.rank)
    for _ in range(600):
        all_gather(mine, axis, "test")
    kept = all_gather(mine, axis, "test").wait()
    dist.barrier()
    all_gather(mine, axis, "test").wait()
    return kept[:, 0].tolist(), len(links[axis.group].sent)


def test_what_nobody_waits_for_holds_up_nobody(ranks):
    for gathered, num_kept in ranks(2).run(drop_without_waiting):
        assert gathered == [0, 1]
        assert num_kept <= 1


def start_too_many():
    link, mine, unread = open_link(new_axis().group), torch.zeros(1), []
    link.timeout_seconds = 0.2
    try:
        while True:
            unread.append(link.start(mine, [1, 1], torch.empty(2), [1, 1], same=True))
    except RuntimeError as error:
        dist.barrier()
        return len(unread), str(error)


def test_too_many_in_flight_are_an_error(ranks):
    expected = (256, "a peer did not answer within 0.2 s")
    assert ranks(2).run(start_too_many) == [expected, expected]


def leave_early():
    axis = new_axis()
    in_flight = all_gather(torch.full((1000,), axis.rank), axis, "test")
    if axis.rank == 0:
        links[axis.group].close()
        return None
    time.sleep(0.3)
    return in_flight.wait()[:, 0].tolist()


def test_who_leaves_waits_until_the_others_have_read(ranks):
    assert ranks(2).run(leave_early)[1] == [0, 1]


def expect_other_sizes():
    axis = new_axis()
    try:
        all_to_all(torch.zeros(4), Splits([2, 2], [3, 3]), axis, "test").wait()
    except RuntimeError as error:
        return str(error)


def test_sizes_that_do_not_fit_are_an_error(ranks):
    message = "the peer sends 8 bytes where 12 are expected"
    assert all(message in error for error in ranks(2).run(expect_other_sizes))


def use_in_a_child():
    axis = new_axis()
    link = links[axis.group]
    child = os.fork()
    if child == 0:
        link.close()  # leaves the parent's alone
        try:
            link.start(torch.zeros(1), [1, 1], torch.empty(2), [1, 1], same=True)
        except RuntimeError as error:
            os._exit(3 if "parent" in str(error) else 4)
        os._exit(5)
    gathered = all_gather(torch.tensor([axis.rank]), axis, "test").wait()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), gathered.tolist()


def test_a_child_process_does_not_speak_for_its_parent(ranks):
    assert ranks(2).run(use_in_a_child) == [(3, [[0], [1]])] * 2


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def refuse(how):
    axis, lines = new_axis(), Lines()
    logging.getLogger("meshrec").addHandler(lines)
    join = host_link.HostLink.join
    if axis.rank == 1 and how == "switch":
        os.environ["MESHREC_HOST_LINK"] = "0"
    if axis.rank == 1 and how == "join":

        def not_permitted(self, addresses):
            raise OSError("process_vm_readv: Operation not permitted")

        host_link.HostLink.join = not_permitted
    if axis.rank == 1 and how == "host":
        host_link._host_id = lambda: "another"
    try:
        gathered = all_gather(torch.tensor([axis.rank]), axis, "test").wait()
    finally:
        host_link.HostLink.join = join
        os.environ.pop("MESHREC_HOST_LINK", None)
        logging.getLogger("meshrec").removeHandler(lines)
    return links[axis.group] is None, gathered.tolist(), lines.lines


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("switch", "rank 1: MESHREC_HOST_LINK=0 switches it off"),
        ("join", "rank 1: process_vm_readv: Operation not permitted"),
        ("host", None),
    ],
)
def test_one_refusal_leaves_all_with_gloo(how, why):
    with RankPool(2) as pool:
        first, second = pool.run(refuse, how)
    assert first[:2] == second[:2] == (True, [[0], [1]])
    assert second[2] == []
    assert len(first[2]) == (why is not None)
    assert why is None or why in first[2][0]


def send_until(signal_number):
    axis = default_env().world
    links[axis.group].timeout_seconds = 2.0
    for number in range(10):
        if axis.rank == 1 and number == 5:
            os.kill(os.getpid(), signal_number)
        all_gather(torch.zeros(100_000), axis, "embeddings").wait()


@pytest.mark.parametrize(
    ("signal_number", "cause"),
    [(signal.SIGKILL, r"process \d+"), (signal.SIGSTOP, "a peer did not answer within 2 s")],
)
def test_who_waits_for_a_silent_peer_is_told(signal_number, cause):
    pool = RankPool(2, timeout_seconds=12)
    try:
        failed = r"rank 0: the collective 'embeddings' over ranks \[0, 1\] failed: no answer from rank 1"
        with pytest.raises(RankError, match=f"(?s){failed}.*{cause}"):
            pool.run(send_until, signal_number)
    finally:
        pool.close()


def fail_after_arrival(kind):
    """What makes the result of an exchange fails; the next exchange is as if nothing had been."""
    axis = default_env().world
    mine = torch.full((2,), axis.rank)
    splits = Splits([1, 1], [1, 1])

    def fail(*_):
        raise kind("no memory for the result")

    in_flight = all_to_all(mine, splits, axis, "test")
    with pytest.raises(kind, match=r"^no memory for the result"):
        in_flight.wait_and_compute(fail)
    received = all_to_all(mine, splits, axis, "test").wait().tolist()
    dist.barrier()
    release_read(axis)
    return received, len(links[axis.group].sent)


@pytest.mark.parametrize("kind", [MemoryError, RuntimeError])
def test_a_result_that_cannot_be_made_keeps_no_message(ranks, kind):
    assert ranks(2).run(fail_after_arrival, kind) == [([0, 1], 0)] * 2


def wait_for_old_exchanges_last():
    axis = new_axis()
    mine = torch.arange(4) + 10 * axis.rank
    expected = torch.stack([torch.arange(4) + 10 * rank for rank in range(axis.size)])
    waiting = [all_gather(mine, axis, "old") for _ in range(3)]
    assert links[axis.group] is not None
    # More than the link has room for.
    for number in range(600):
        assert (
            all_gather(torch.tensor([number]), axis, "new").wait().flatten().tolist() == [number] * axis.size
        )
    dropped = waiting.pop()
    del dropped
    assert torch.equal(waiting.pop().wait(), expected)
    work = waiting.pop().work
    work.wait(lambda messages, handle, number: messages.view(axis.size, -1).sum(0))
    assert torch.equal(work.result, expected.sum(0))


def test_exchanges_that_nobody_waits_for_do_not_stop_later_ones(ranks):
    ranks(2).run(wait_for_old_exchanges_last)
