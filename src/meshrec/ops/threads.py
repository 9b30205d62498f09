"""Number of CPU threads that torch uses within an operator."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def at_most_threads(limit: int) -> Iterator[None]:
    """Limit torch's CPU threads per operator in a ``with`` block. Applies to the whole process."""
    before = torch.get_num_threads()
    if limit >= before:
        yield
        return
    torch.set_num_threads(limit)
    try:
        yield
    finally:
        torch.set_num_threads(before)
