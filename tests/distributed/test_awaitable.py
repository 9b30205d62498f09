import copy

import pytest
import torch

from meshrec.distributed.awaitable import LazyAwaitable, awaited


class Waits:
    def __init__(self, value):
        self.count, self.value = 0, value

    def __call__(self):
        self.count += 1
        return self.value


def test_nothing_waits_before_the_value_is_used():
    waits = Waits({"a": 1})
    lazy = LazyAwaitable(waits)
    assert "on its way" in repr(lazy)
    assert not hasattr(lazy, "__deepcopy__")
    assert waits.count == 0
    assert lazy["a"] == 1
    assert "a" in lazy
    assert len(lazy) == 1
    assert list(lazy) == ["a"]
    assert list(lazy.keys()) == ["a"]
    assert waits.count == 1
    assert repr(lazy) == "{'a': 1}"


def test_torch_functions_take_it_for_the_tensor():
    lazy = LazyAwaitable(Waits(torch.ones(2)))
    assert torch.equal(torch.cat([lazy, torch.zeros(1)]), torch.tensor([1.0, 1.0, 0.0]))
    assert torch.add(torch.ones(2), other=lazy).sum() == 4


def test_awaited():
    assert awaited(LazyAwaitable(Waits(3))) == 3
    assert awaited(3) == 3


def test_a_failure_reaches_who_uses_the_value():
    def fail():
        raise ValueError("rank 3: bad")

    with pytest.raises(ValueError, match="rank 3"):
        LazyAwaitable(fail).values()


def test_a_second_use_after_a_failure_raises_the_same_error():
    def fail():
        raise ValueError("row 7")

    lazy = LazyAwaitable(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="row 7"):
            lazy.wait()


def test_a_copy_is_the_same_promise():
    waits = Waits([1])
    assert copy.copy(LazyAwaitable(waits)).wait() == [1]


class Later(LazyAwaitable):
    def __init__(self, value):
        super().__init__()
        self.waits = Waits(value)

    def _wait_impl(self):
        return self.waits()


def test_a_subclass_may_make_the_value():
    lazy = Later(torch.ones(2))
    assert "on its way" in repr(lazy)
    assert torch.add(lazy, 1).tolist() == [2, 2]
    assert lazy.shape == (2,)
    assert lazy.waits.count == 1


def test_one_without_a_way_to_make_the_value_says_what_to_do():
    with pytest.raises(ValueError, match="LazyAwaitable"):
        LazyAwaitable().wait()


class Twos(LazyAwaitable):
    def _wait_impl(self):
        return torch.full((2,), 2.0)


def test_operators_take_the_value():
    assert (Twos() + 1).tolist() == [3, 3]
    assert (1 - Twos()).tolist() == [-1, -1]
    assert (Twos() @ Twos()).item() == 8
    assert (-Twos()).tolist() == [-2, -2]
    assert (Twos() == 2).all()
    assert int(LazyAwaitable(Waits(3))) == 3
    assert len({Twos(), Twos()}) == 2


class WithoutInit(LazyAwaitable):
    def __init__(self):
        pass

    def _wait_impl(self):
        return 1


@pytest.mark.parametrize("use", [LazyAwaitable.wait, repr, lambda lazy: lazy + 1, lambda lazy: lazy.shape])
def test_a_forgotten_constructor_is_named(use):
    with pytest.raises(RuntimeError, match="WithoutInit") as raised:
        use(WithoutInit())
    assert not isinstance(raised.value, RecursionError)
