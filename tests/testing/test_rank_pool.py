import os
import sys
import time
import types
from pathlib import Path

import pytest
import torch.distributed as dist

from meshrec.testing import RankError, RankPool


def rank_and_size(offset):
    return dist.get_rank() + offset, dist.get_world_size()


def fail_on_one():
    if dist.get_rank() == 1:
        raise ValueError("bad luck")
    return "fine"


def fail_everywhere():
    raise ValueError("bad luck")


def die():
    if dist.get_rank() == 0:
        os._exit(3)


def test_results_come_by_rank(ranks):
    assert ranks(2).run(rank_and_size, 10) == [(10, 2), (11, 2)]


def test_an_error_leaves_the_pool_usable(ranks):
    with pytest.raises(RankError, match=r"rank 1:\n(.|\n)*ValueError: bad luck"):
        ranks(2).run(fail_on_one)
    assert ranks(2).run(rank_and_size, 0) == [(0, 2), (1, 2)]


def answer_late():
    time.sleep(2.0 if dist.get_rank() == 0 else 0.0)
    return "late"


def test_a_dead_process_is_reported_and_the_next_call_has_new_ones():
    with RankPool(2, timeout_seconds=30) as pool:
        with pytest.raises(RankError, match="code 3"):
            pool.run(die)
        assert pool.run(rank_and_size, 0) == [(0, 2), (1, 2)]


def test_a_late_answer_is_not_taken_for_another():
    with RankPool(2, timeout_seconds=30) as pool:
        pool.run(rank_and_size, 0)
        pool._timeout = 0.2
        with pytest.raises(RankError, match="answer"):
            pool.run(answer_late)
        pool._timeout = 30
        assert pool.run(rank_and_size, 0) == [(0, 2), (1, 2)]


def process_id():
    return os.getpid()


def test_ranks_that_may_be_out_of_step_are_replaced(ranks):
    pids = ranks(2).run(process_id)
    with pytest.raises(RankError, match="ValueError"):
        ranks(2).run(fail_everywhere)
    assert ranks(2).run(process_id) == pids
    with pytest.raises(RankError, match="ValueError"):
        ranks(2).run(fail_on_one)
    assert not set(ranks(2).run(process_id)) & set(pids)


def is_stopped(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_processes_are_stopped_between_calls(ranks):
    pids = ranks(2).run(process_id)
    while not all(map(is_stopped, pids)):
        time.sleep(0.01)
    assert ranks(2).run(process_id) == pids


def test_stopped_processes_notice_the_end_of_the_process_of_the_pool():
    with RankPool(2, timeout_seconds=30) as pool:
        pool.run(process_id)
        # The kernel closes these when it ends, however that may be.
        for end in (*pool._pipes, pool._watcher.stdin):
            end.close()
        for process in pool._processes:
            process.join(60)
            assert process.exitcode == 0


def test_functions_of_a_notebook_are_found_in_the_file_of_the_main_program(ranks, tmp_path, monkeypatch):
    main = types.ModuleType("__main__")
    main.__file__ = str(tmp_path / "cells.py")
    cell = "def doubled(number):\n    return 2 * number\n"
    Path(main.__file__).write_text(cell)
    exec(compile(cell, "<cell 1>", "exec"), vars(main))
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert ranks(2).run(main.doubled, 3) == [6, 6]
