import pytest

from meshrec.checkpoint.agreement import (
    CheckpointError,
    DamagedCheckpointError,
    agreed,
    combined_error,
    ranks_of,
)
from meshrec.testing import RankError


def one_fails(kind):
    axis = ranks_of(None)

    def work():
        if axis.rank == 1:
            raise kind("the reason")
        return axis.rank

    agreed(axis, work, "writing")


@pytest.mark.parametrize(
    ("kind", "raised"),
    [
        (ValueError, "ValueError"),
        (DamagedCheckpointError, "DamagedCheckpointError"),
        (OSError, "CheckpointError.*OSError.*rank 1"),
    ],
)
def test_all_ranks_raise_what_one_meets(ranks, kind, raised):
    with pytest.raises(RankError, match=raised) as failure:
        ranks(2).run(one_fails, kind)
    assert "rank 0:" in str(failure.value)
    assert "rank 1:" in str(failure.value)


def everyone():
    axis = ranks_of(None)
    return agreed(axis, lambda: axis.rank, "counting")


def test_all_ranks_get_all_results(ranks):
    assert ranks(2).run(everyone) == [[0, 1], [0, 1]]


def test_one_process_needs_no_group():
    assert agreed(ranks_of(None), lambda: 5, "x") == [5]
    with pytest.raises(CheckpointError, match="OSError"):
        agreed(ranks_of(None), lambda: open_nothing(), "reading")


def open_nothing():
    raise OSError("no")


def test_different_reasons_are_all_told():
    error = combined_error({0: ValueError("a"), 2: OSError("b")}, "saving")
    assert isinstance(error, CheckpointError)
    assert str(error) == "saving failed: rank 0: a; rank 2: OSError: b"
