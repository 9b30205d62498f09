"""What is kept of histories: the limit, the order in which entries leave, and what finds an entry."""

import random

import numpy as np
import pytest
import torch

from meshrec.serve.history_cache import HistoryCache

ITEMS, TIMES = [3, 1, 2], [10, 20, 30]


def rows(num=3):
    return torch.arange(num * 4.0).view(num, 4)


def history(*columns):
    return np.array(columns, np.int64).T


def kept():
    histories = HistoryCache(1 << 20)
    histories.put(history(ITEMS, TIMES), rows())
    return histories


def test_the_same_history_and_a_longer_one_find_what_was_kept():
    histories = kept()
    for found in (history(ITEMS, TIMES), history([*ITEMS, 9], [*TIMES, 40])):
        num_items, of_it = histories.find(found)
        assert num_items == 3
        assert torch.equal(of_it, rows())


@pytest.mark.parametrize(
    "other",
    [
        history(ITEMS[:2], TIMES[:2]),
        history([3, 1, 4], TIMES),
        history([3, 4, 2, 1], [*TIMES, 40]),
        history(ITEMS, [10, 20, 31]),
        history(ITEMS),
        np.zeros((0, 2), np.int64),
    ],
)
def test_another_history_finds_nothing(other):
    histories = kept()
    assert histories.find(other) is None
    assert histories.find(history(ITEMS, TIMES)) is not None


def test_a_longer_history_replaces_its_beginning():
    histories, longer = kept(), history([*ITEMS, 9], [*TIMES, 40])
    histories.put(longer, rows(4), histories.find(longer))
    assert len(histories) == 1
    assert histories.find(history(ITEMS, TIMES)) is None
    assert torch.equal(histories.find(longer).rows, rows(4))
    alone = HistoryCache(1 << 20)
    alone.put(longer, rows(4))
    assert histories.num_bytes == alone.num_bytes > rows(4).nbytes + longer.nbytes


def test_the_memory_of_room_after_rows_counts():
    with_room, without = HistoryCache(1 << 20), HistoryCache(1 << 20)
    with_room.put(history(ITEMS), rows(9)[:3])
    without.put(history(ITEMS), rows(3))
    assert with_room.num_bytes - without.num_bytes == rows(6).nbytes


def test_the_least_recently_used_leave_and_bytes_stay_below_the_limit():
    first = HistoryCache(1 << 20)
    first.put(history([0, 1, 2]), rows())
    one = first.num_bytes
    histories = HistoryCache(3 * one)
    used, chosen = [], random.Random(0)
    for _ in range(300):
        user = chosen.randrange(6)
        own = history([user, 1, 2])
        if histories.find(own) is None:
            assert user not in used[-3:]
            histories.put(own, rows())
        else:
            assert user in used[-3:]
        used = [*(each for each in used if each != user), user]
        assert histories.num_bytes == len(histories) * one <= 3 * one
    histories.clear()
    assert (len(histories), histories.num_bytes) == (0, 0)


def test_a_history_above_the_limit_is_not_kept():
    histories = HistoryCache(0)
    histories.put(history(ITEMS), rows())
    assert len(histories) == 0
    with pytest.raises(ValueError, match=r"max_bytes.*-1"):
        HistoryCache(-1)
