"""Detection of in-place writes to a tensor between a forward pass and its backward pass.

torch counts the in-place writes to every tensor (``Tensor._version``), and compares the counts of the tensors
that it saves for backward. The fused lookups save nothing through torch, because their own update writes to
the tables in place. They compare the counts here instead.
"""

import operator
from collections.abc import Callable, Sequence

from torch import Tensor

# Every training step reads versions, so avoid a Python call per tensor.
_version: Callable[[Tensor | None], int] = operator.attrgetter("_version")


def versions_of(tensors: Sequence[Tensor | None]) -> list[int]:
    """Return the number of in-place writes to each tensor so far; -1 for None and for inference tensors."""
    try:
        return list(map(_version, tensors))
    except (AttributeError, RuntimeError):
        pass  # a None or an inference tensor, which has no version
    return [-1 if tensor is None or tensor.is_inference() else tensor._version for tensor in tensors]


def check_unchanged(what: Sequence[str], tensors: Sequence[Tensor | None], before: Sequence[int]) -> None:
    """Raise if a tensor was written to since ``versions_of`` returned ``before``.

    Args:
        what: names of the tensors for the message.
        tensors: the tensors that were given to ``versions_of``.
        before: its result.

    Raises:
        ValueError: a tensor was written to; the error names the first one.
    """
    for name, version, now in zip(what, before, versions_of(tensors), strict=False):
        if version != now:
            raise ValueError(changed_message(name))


def changed_message(name: str) -> str:
    """Return the message about a tensor that was changed in place."""
    return (
        f"{name} changed in place between the forward pass and its backward pass, so the gradient belongs to "
        "other values than those that were looked up. Nothing was updated. Give every batch tensors of its "
        "own (clone() them before you write to them), and change tables only before forward or after "
        "backward."
    )
