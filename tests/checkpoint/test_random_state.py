import random

import torch

from meshrec.checkpoint.random_state import random_state, set_random_state


def draw():
    return random.random(), random.gauss(0, 1), torch.rand(3).tolist()


def test_goes_on_where_it_was():
    random.gauss(0, 1)  # leaves a second number for the next call
    state = random_state()
    expected = draw()
    draw()
    set_random_state(state)
    assert draw() == expected
    assert all(isinstance(value, torch.Tensor) for value in state.values())
