import gc
import threading

import pytest

from meshrec.data import prefetch


def threads():
    return [each for each in threading.enumerate() if each.name == "meshrec-prefetch"]


def test_items_come_in_order_and_the_thread_ends():
    assert list(prefetch(iter(range(50)), depth=3)) == list(range(50))
    assert threads() == []


def test_errors_come_after_the_items_before_them():
    def broken():
        yield 1
        raise KeyError("here")

    items = prefetch(broken())
    assert next(items) == 1
    with pytest.raises(KeyError, match="here"):
        next(items)
    with pytest.raises(StopIteration):
        next(items)
    assert threads() == []


def endless(closed):
    try:
        while True:
            yield 0
    finally:
        closed.set()


@pytest.mark.parametrize("taken", [0, 5])
def test_closing_early_closes_the_iterator(taken):
    closed = threading.Event()
    with prefetch(endless(closed)) as items:
        for _ in range(taken):
            next(items)
    assert closed.wait(10)
    assert threads() == []
    items.close()


def test_dropping_it_stops_the_thread():
    closed = threading.Event()
    items = prefetch(endless(closed))
    assert next(items) == 0
    del items
    gc.collect()
    assert closed.wait(10)


def test_depth_is_how_far_it_reads_ahead():
    seen, waiting = [], threading.Event()

    def counted():
        for number in range(10):
            seen.append(number)
            if number == 3:
                waiting.set()
            yield number

    with prefetch(counted(), depth=3) as items:
        assert waiting.wait(10)  # three in the queue, one in the hand
        assert len(seen) == 4
        next(items)
    with pytest.raises(ValueError, match=r"depth.*1.*0"):
        prefetch([], depth=0)
