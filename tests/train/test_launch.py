import os
import time
import traceback

from meshrec.train.launch import _stragglers, first_error
from meshrec.train.run_folder import RunFolder


def lost_peer(folder):
    folder.error(0).write_text("Traceback\nmeshrec.CollectiveError: no answer from rank 1\n")
    return first_error(folder, 2, {1: 9}, {1})


def test_the_cause_is_told_from_its_consequences(tmp_path):
    folder = RunFolder(tmp_path)
    assert first_error(folder, 2).startswith("a rank ended without an error. Its log is one of")
    assert "rank 1 was killed by signal 9 (SIGKILL), as the system does when memory runs out" in first_error(
        folder, 2, {0: 15, 1: 9}
    )
    folder.error(0).write_text("")  # on a full disk
    assert "its traceback could not be written" in first_error(folder, 2)
    assert "rank 1 stopped answering" in lost_peer(folder)
    folder.error(0).write_text("Traceback\nmeshrec.CollectiveError: no answer from rank 1\n")
    assert "no answer from rank 1" in first_error(folder, 2)
    folder.error(1).write_text("Traceback\nZeroDivisionError: division by zero\n")
    os.utime(folder.error(0), (1, 1))  # the consequence was written first
    assert first_error(folder, 2).startswith(
        "rank 1: ZeroDivisionError: division by zero (the traceback is in"
    )
    folder.error(1).write_text("Traceback\nValueError: no plan fits.\n")
    assert first_error(folder, 2) == "no plan fits."
    try:
        raise ValueError("no plan fits.\nThe largest tables: t0.\nTake more ranks.")
    except ValueError:
        folder.error(1).write_text(traceback.format_exc())
    assert first_error(folder, 2) == "no plan fits.\nThe largest tables: t0.\nTake more ranks."


def test_ranks_without_an_error_are_stragglers_after_a_while(tmp_path):
    folder, now = RunFolder(tmp_path), time.time()

    def fail(rank, seconds_ago):
        folder.error(rank).write_text("1")
        os.utime(folder.error(rank), (now - seconds_ago, now - seconds_ago))

    assert _stragglers(folder, 3, now - 100) == []
    fail(0, 5)
    assert _stragglers(folder, 3, now - 100) == []  # the others may end by themselves
    fail(0, 50)
    fail(2, 1)
    assert _stragglers(folder, 3, now - 100) == [1]
    assert _stragglers(folder, 3, now - 20) == []  # the error is of an earlier start
