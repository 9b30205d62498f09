"""Fake kernels of the record operators, for tracing; see ``naive.py``."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.records.naive  # noqa: F401 - the ops must exist before fakes are registered for them


def _transfer(file: int, layout: list[int], keys: Tensor, *_: Any) -> Tensor:
    """Fake ``records_read`` and ``records_write``: a data-dependent number of failures."""
    return keys.new_empty(torch.library.get_ctx().new_dynamic_size(), 2)


def _used(slots: Tensor, stamps: Tensor, batch: int) -> Tensor:
    """Fake ``cache_used``: a data-dependent number of slots."""
    return slots.new_empty(torch.library.get_ctx().new_dynamic_size())


def _victims(counts: Tensor, pins: Tensor, hand: int, number: int) -> tuple[Tensor, int]:
    """Fake ``cache_victims``: a data-dependent number of slots; the hand does not move."""
    return counts.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64), hand


for _name, _fake in (
    ("records_read", _transfer),
    ("records_write", _transfer),
    ("cache_used", _used),
    ("cache_victims", _victims),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
