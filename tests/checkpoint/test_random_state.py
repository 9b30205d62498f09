import logging
import random

import numpy as np
import pytest
import torch

from meshrec.checkpoint.random_state import random_state, seed_python_and_numpy, set_random_state


@pytest.fixture(autouse=True)
def _undisturbed():
    """Other tests of this process draw what they would have drawn."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng():
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def draw():
    return (
        random.random(),
        random.gauss(0, 1),
        torch.rand(3).tolist(),
        np.random.rand(3).tolist(),
        np.random.randn(),
    )


def test_goes_on_where_it_was():
    random.gauss(0, 1)  # leaves a second number for the next call
    np.random.randn()  # so does this
    state = random_state()
    expected = draw()
    draw()
    set_random_state(state)
    assert draw() == expected
    assert all(isinstance(value, torch.Tensor) for value in state.values())


def test_the_state_of_an_earlier_release_still_loads():
    state = {name: value for name, value in random_state().items() if not name.startswith("numpy")}
    expected = draw()[:3]
    np.random.seed(5)
    set_random_state(state)
    following = np.random.RandomState(5).rand(3).tolist()
    assert draw()[:4] == (*expected, following)


def test_a_generator_that_cannot_be_saved_is_told(caplog):
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        with caplog.at_level(logging.WARNING):
            state = random_state()
    finally:
        np.random.set_bit_generator(before)
    assert "numpy" not in state
    assert "NumPy's global generator is a PCG64" in caplog.text


def test_seeds_are_functions_of_seed_and_stream(run_code):
    drawn = []
    for seed, stream in ((1, "rank 0"), (1, "rank 1"), (2, "rank 0"), (1, "rank 0")):
        seed_python_and_numpy(seed, stream)
        drawn.append((random.random(), np.random.rand()))
    assert drawn[0] == drawn[3]
    assert len({number for pair in drawn for number in pair}) == 6
    script = (
        "import random, numpy as np; from meshrec.checkpoint.random_state import seed_python_and_numpy; "
        "seed_python_and_numpy(1, 'rank 0'); print((random.random(), float(np.random.rand())))"
    )
    assert run_code(script).stdout.strip() == str(tuple(map(float, drawn[0])))
