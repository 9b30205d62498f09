"""Detection of in-place writes to a tensor between the forward and the backward pass.

torch counts the in-place writes to every tensor (``Tensor._version``), and compares the counts for tensors
that were saved for backward. A fused lookup saves nothing through torch, because its update writes to the
tables in place. It compares the counts with the functions in this file instead.
"""

import operator
from collections.abc import Callable, Sequence

from torch import Tensor

# Every training step reads versions, so avoid a Python call per tensor.
_version: Callable[[Tensor | None], int] = operator.attrgetter("_version")


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the number of in-place writes (``_version``) per tensor; -1 for None and inference tensors."""
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):
        pass  # a None or an inference tensor, which has no version
    # Slower, so only for lists with such tensors.
    return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def check_unchanged(names: Sequence[str], tensors: Sequence[Tensor | None], before: Sequence[int]) -> None:
    """Raise ValueError if a tensor was written to in place since ``versions_of`` returned ``before``.

    Args:
        names: name of each tensor, for the message.
        tensors: the tensors that were passed to ``versions_of``.
        before: the counts that ``versions_of`` returned.

    Raises:
        ValueError: a tensor was written to; the message names the first one.
    """
    for name, version, now in zip(names, before, versions_of(tensors), strict=False):
        if version != now:
            raise ValueError(in_place_change_message(name))


def in_place_change_message(name: str) -> str:
    """Return the error message for a tensor modified in place between forward and backward."""
    return (
        f"{name} changed in place between the forward pass and its backward pass, so the gradient belongs to "
        "other values than the lookup read. Nothing was updated. Give every batch separate tensors "
        "(clone() them before you write to them), and change tables only before forward or after "
        "backward."
    )
