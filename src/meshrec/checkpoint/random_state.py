"""Read and set a rank's random number generator states: Python, NumPy, torch and the current CUDA device.

The states are tensors, so a checkpoint stores them like weights.
"""

import logging
import random

import numpy as np
import torch
from torch import Tensor

_log = logging.getLogger(__name__)
_MERSENNE = "MT19937"
"""The only supported bit generator for NumPy's global functions: NumPy's default."""


def seed_python_and_numpy(seed: int, stream: str) -> None:
    """Seed Python's ``random`` and NumPy's global generator, but not torch's.

    Args:
        seed: run seed.
        stream: name for the purpose of the random numbers. Different names give independent numbers.
    """
    # random.Random hashes strings with SHA-512, so all processes get the same seed, unlike with `hash`.
    source = random.Random(f"{seed}/{stream}")
    random.seed(source.getrandbits(128))
    # NumPy's seeds have 32 bits.
    np.random.seed(source.getrandbits(32))


def random_state() -> dict[str, Tensor]:
    """Return the generators' current states as tensors, by name, such as "python" or "torch"."""
    # `gauss` is the second value of a generated pair of normal values, kept for the next call; or None.
    version, mersenne_words, gauss = random.getstate()
    assert version == 3
    state = {
        "python": torch.tensor(mersenne_words, dtype=torch.int64),
        "python_gauss": torch.tensor([0.0, 0.0] if gauss is None else [1.0, gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    numpy_state = np.random.get_state(legacy=False)
    assert isinstance(numpy_state, dict)
    if numpy_state["bit_generator"] == _MERSENNE:
        words = [*numpy_state["state"]["key"].tolist(), numpy_state["state"]["pos"]]
        state["numpy"] = torch.tensor(words, dtype=torch.int64)
        gauss_of = [float(numpy_state["has_gauss"]), numpy_state["gauss"]]
        state["numpy_gauss"] = torch.tensor(gauss_of, dtype=torch.float64)
    else:
        _log.warning(
            "NumPy's global generator is a %s, which checkpoints do not support: a resumed run draws other "
            "numbers from it. Keep the default %s, or use a generator saved by your state_dict().",
            numpy_state["bit_generator"],
            _MERSENNE,
        )
    # Only if CUDA is in use: reading the state would initialize CUDA, which takes device memory.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Tensor]) -> None:
    """Set the generators to states returned by `random_state`.

    Generators missing from ``state`` are unchanged: checkpoints from earlier releases lack NumPy's,
    and "cuda" is missing if the saving process did not use CUDA.
    """
    has_gauss, gauss = state["python_gauss"].tolist()
    # 3 is Python's version number of this generator state.
    random.setstate((3, tuple(state["python"].tolist()), gauss if has_gauss else None))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        *key, position = state["numpy"].tolist()
        has_gauss, gauss = state["numpy_gauss"].tolist()
        np.random.set_state((_MERSENNE, np.array(key, dtype=np.uint32), position, int(has_gauss), gauss))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
