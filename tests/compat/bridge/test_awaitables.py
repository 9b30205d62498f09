import pytest
import torch

from meshrec.compat.bridge.awaitables import Awaitable, LazyAwaitable, LazyNoWait, NoWait
from meshrec.distributed import awaitable


class Ones(LazyAwaitable[torch.Tensor]):
    def __init__(self, size):
        super().__init__()
        self._size = size
        self.num_waits = 0

    def _wait_impl(self):
        self.num_waits += 1
        return torch.ones(self._size)


def test_a_lazy_value_is_waited_for_once_and_when_it_is_used():
    lazy = Ones([3, 2])
    assert lazy.num_waits == 0
    assert torch.equal(torch.add(lazy, 1), torch.full((3, 2), 2.0))
    assert lazy.shape == (3, 2)
    assert lazy.wait().sum() == 6
    assert lazy.num_waits == 1


def test_callbacks_change_the_value():
    lazy = Ones([2])
    lazy.callbacks.append(lambda value: value * 3)
    assert lazy.wait().tolist() == [3, 3]


def test_what_sharded_modules_return_is_lazy():
    assert isinstance(awaitable.LazyAwaitable(lambda: 1), LazyAwaitable)
    assert isinstance(Ones([1]), LazyAwaitable)
    assert not isinstance(awaitable.LazyAwaitable(lambda: 1), Ones)
    assert not isinstance(torch.ones(1), LazyAwaitable)


def test_values_that_are_there():
    assert NoWait(3).wait() == 3
    assert LazyNoWait([1, 2])[1] == 2
    eager = NoWait(3)
    eager.callbacks.append(lambda value: value + 1)
    assert eager.wait() == 4


def test_the_way_to_wait_must_be_written():
    with pytest.raises(TypeError, match="abstract"):
        LazyAwaitable()
    with pytest.raises(TypeError, match="abstract"):
        Awaitable()
