"""Output shapes for the index operators (fake kernels), for tracing.

``schemas.inc`` has the signatures. A fake kernel names only the arguments that it needs.
"""

from typing import Any

import torch
from torch import SymInt, Tensor

# The operators must exist before fakes are registered for them.
import meshrec.ops.index.marked  # noqa: F401
import meshrec.ops.index.naive  # noqa: F401
import meshrec.ops.index.slots  # noqa: F401


def _dynamic_size() -> SymInt:
    """Return a symbolic size for a data-dependent dimension."""
    return torch.library.get_ctx().new_dynamic_size()


def _like_ids(ids: Tensor, *_: Any) -> Tensor:
    """Return the result shape of an operator with a result per ID."""
    return torch.empty_like(ids)


def _unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result shapes of ``index_unique``."""
    return ids.new_empty(_dynamic_size()), torch.empty_like(ids)


def _find(memory: list[Tensor], ids: Tensor, seed: int) -> Tensor:
    """Return the result shape of ``index_find``."""
    return torch.empty_like(ids)


def _find_parts(memory: Any, seeds: Any, ids: Tensor, starts: list[int], *_: Any) -> tuple[Tensor, Tensor]:
    """Return the result shapes of ``index_find_parts``."""
    return torch.empty_like(ids), ids.new_empty(len(starts))


def _range(values: Tensor, marks: Tensor | None) -> Tensor:
    """Return the result shape of ``marked_range``."""
    return values.new_empty(3, dtype=torch.int64)


def _histogram(values: Tensor, *options: Any) -> Tensor:
    """Return the result shape of ``marked_histogram``."""
    return values.new_empty(options[-1], dtype=torch.int64)


def _between(values: Tensor, *_: Any) -> Tensor:
    """Return the result shape of ``marked_between``."""
    return values.new_empty(_dynamic_size(), dtype=torch.int64)


def _release(pins: Any, alive: Any, slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the result shapes of ``release_slots``."""
    return torch.empty(_dynamic_size(), dtype=torch.int64), torch.empty(len(slots), dtype=torch.int64)


def _first_left(scores: Any, slots: list[Tensor], *_: Any) -> list[Tensor]:
    """Return the result shapes of ``first_left``."""
    return [
        *(table_slots.new_empty(_dynamic_size()) for table_slots in slots),
        torch.empty(len(slots), dtype=torch.int64),
    ]


for _name, _fake in (
    ("index_mix", _like_ids),
    ("index_order", _like_ids),
    ("index_mix_parts", _like_ids),
    ("index_unique", _unique),
    ("index_find", _find),
    ("index_find_parts", _find_parts),
    ("marked_range", _range),
    ("marked_histogram", _histogram),
    ("marked_between", _between),
    ("fill_slots", lambda *_: None),
    ("release_slots", _release),
    ("first_left", _first_left),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
