"""What is kept of users' histories: the limit, the order in which users leave, and what drops an entry."""

import random

import numpy as np
import pytest
import torch

from meshrec.serve.kept_histories import _OVERHEAD, KeptHistories

ITEMS, TIMES = np.array([3, 1, 2]), np.array([10, 20, 30])


def rows(num=3):
    return torch.arange(num * 4.0).view(num, 4)


def kept():
    histories = KeptHistories(1 << 20)
    histories.keep("ada", [ITEMS, TIMES], "v1", rows())
    return histories


def test_the_same_history_and_a_longer_one_find_what_was_kept():
    histories = kept()
    assert torch.equal(histories.find("ada", [ITEMS, TIMES], "v1"), rows())
    longer = [np.append(ITEMS, 9), np.append(TIMES, 40)]
    assert torch.equal(histories.find("ada", longer, "v1"), rows())
    assert histories.find("bob", longer, "v1") is None


@pytest.mark.parametrize(
    ("history", "version"),
    [
        ([ITEMS[:2], TIMES[:2]], "v1"),
        ([np.array([3, 1, 4]), TIMES], "v1"),
        ([ITEMS, np.array([10, 20, 31])], "v1"),
        ([ITEMS], "v1"),
        ([ITEMS, TIMES], "v2"),
    ],
)
def test_another_history_or_version_drops_what_was_kept(history, version):
    histories = kept()
    assert histories.find("ada", history, version) is None
    assert histories.find("ada", [ITEMS, TIMES], "v1") is None
    assert (len(histories), histories.num_bytes) == (0, 0)


def test_what_is_kept_does_not_change_with_the_arrays_of_the_caller():
    histories, given, items = KeptHistories(1 << 20), rows(), ITEMS.copy()
    histories.keep("ada", [items], "v1", given)
    given.zero_(), items.fill(0)
    assert torch.equal(histories.find("ada", [ITEMS], "v1"), rows())


def test_the_least_recently_used_leave_and_bytes_stay_below_the_limit():
    one = _OVERHEAD + ITEMS.nbytes + rows().nbytes
    histories = KeptHistories(3 * one)
    used, chosen = [], random.Random(0)
    for _ in range(300):
        user = chosen.randrange(6)
        if histories.find(user, [ITEMS], "v1") is None:
            assert user not in used[-3:]
            histories.keep(user, [ITEMS], "v1", rows())
        else:
            assert user in used[-3:]
        used = [*(each for each in used if each != user), user]
        assert histories.num_bytes == len(histories) * one <= 3 * one
    histories.clear()
    assert (len(histories), histories.num_bytes) == (0, 0)


def test_a_history_above_the_limit_is_not_kept():
    histories = KeptHistories(0)
    histories.keep("ada", [ITEMS], "v1", rows())
    assert len(histories) == 0
    with pytest.raises(ValueError, match="max_bytes is -1; it must be 0, which keeps nothing, or more"):
        KeptHistories(-1)
