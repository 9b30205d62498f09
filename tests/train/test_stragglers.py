import time

import pytest

from meshrec.comms.collectives import blocked
from meshrec.train.stragglers import Straggler, WaitClock, straggler


def test_the_rank_that_is_blocked_least_is_waited_for():
    found = straggler([[0.5, 0.5], [0.1, 0.1], [0.5, 0.5]], 2.0)
    assert found == Straggler(1, pytest.approx(0.4))


def test_transfers_that_block_all_alike_are_nobodys():
    assert straggler([[0.5, 0.5], [0.5, 0.5]], 2.0) is None
    assert straggler([[], []], 2.0) is None


def test_ranks_take_turns():
    found = straggler([[0.0, 0.4, 0.0], [0.3, 0.0, 0.3]], 1.0)
    assert found == Straggler(0, pytest.approx(0.6))


def slow_steps(slow):
    from meshrec.train import join

    ranks = join("cpu")
    clock = WaitClock()
    began = time.perf_counter()
    for _ in range(5):
        if ranks.rank == slow:
            time.sleep(0.05)
        with blocked():
            ranks.wait_for_all()
        clock.record_step()
    return clock.take(ranks, time.perf_counter() - began)


def test_a_slow_rank_is_named(ranks):
    found = ranks(4).run(slow_steps, 2)
    assert {each.rank for each in found} == {2}
    assert found[0].share > 0.1
