"""The random number generators of a rank, as tensors: Python's, torch's, and those of its CUDA device."""

import random

import torch
from torch import Tensor


def random_state() -> dict[str, Tensor]:
    """The present state, by generator."""
    version, numbers, gauss = random.getstate()
    assert version == 3
    has_gauss = [0.0, 0.0] if gauss is None else [1.0, gauss]
    state = {
        "python": torch.tensor(numbers, dtype=torch.int64),
        "python_gauss": torch.tensor(has_gauss, dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Goes on from what ``random_state`` gave."""
    has_gauss, gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
