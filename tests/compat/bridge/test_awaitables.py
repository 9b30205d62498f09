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


class Number(LazyAwaitable):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def _wait_impl(self):
        return self.value


@pytest.mark.parametrize("three", [3, 3.0, torch.tensor(3.0)])
def test_a_lazy_value_computes_as_the_value_does(three):
    lazy = Number(three)
    assert lazy + 1 == 4
    assert 1 + lazy == 4
    assert 10 - lazy == 7
    assert 7 // lazy == 2
    assert lazy**2 == 9
    assert lazy + Number(1) == 4
    assert abs(-lazy) == 3
    assert lazy > 2
    assert lazy <= 3
    assert lazy != 4
    assert float(lazy) == 3.0
    assert int(lazy) == 3
    assert bool(lazy)
    assert len({lazy, lazy}) == 1


def test_lazy_matrices_multiply():
    assert (Number(torch.ones(2, 2)) @ torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
    assert (torch.ones(2, 2) + Number(torch.ones(2, 2))).sum() == 8


def test_every_lazy_value_is_an_awaitable():
    assert issubclass(LazyAwaitable, Awaitable)
    assert isinstance(Number(1), Awaitable)
    assert isinstance(awaitable.LazyAwaitable(lambda: 1), Awaitable)  # the result of a sharded module
    assert not isinstance(torch.ones(1), Awaitable)
