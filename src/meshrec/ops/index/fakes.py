"""The output shapes of the index ops, for tracing."""

import torch
from torch import Tensor

# The ops must exist before fakes are registered for them.
import meshrec.ops.index.marked  # noqa: F401
import meshrec.ops.index.naive  # noqa: F401
import meshrec.ops.index.slots  # noqa: F401


def _fake_mix(ids: Tensor, seed: int, inverse: bool) -> Tensor:
    return torch.empty_like(ids)


def _fake_unique(ids: Tensor) -> tuple[Tensor, Tensor]:
    return ids.new_empty(torch.library.get_ctx().new_dynamic_size()), torch.empty_like(ids)


def _fake_find(memory: list[Tensor], ids: Tensor, seed: int) -> Tensor:
    return torch.empty_like(ids)


def _fake_mix_parts(ids: Tensor, begins: list[int], ends: list[int], seeds: list[int]) -> Tensor:
    return torch.empty_like(ids)


def _fake_find_parts(
    memory: list[Tensor],
    seeds: list[int],
    ids: Tensor,
    begins: list[int],
    ends: list[int],
    indexes: list[int],
    firsts: list[int],
    mixes: list[int],
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), ids.new_empty(len(begins))


def _fake_range(values: Tensor, marks: Tensor | None) -> Tensor:
    return values.new_empty(3, dtype=torch.int64)


def _fake_histogram(values: Tensor, marks: Tensor | None, base: int, shift: int, size: int) -> Tensor:
    return values.new_empty(size, dtype=torch.int64)


def _fake_between(values: Tensor, marks: Tensor | None, least: int, greatest: int) -> Tensor:
    return values.new_empty(torch.library.get_ctx().new_dynamic_size(), dtype=torch.int64)


def _fake_fill(parts: list[Tensor], slots: list[Tensor], values: list[int]) -> None:
    pass


def _fake_release(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    size = torch.library.get_ctx().new_dynamic_size()
    return torch.empty(size, dtype=torch.int64), torch.empty(len(slots), dtype=torch.int64)


def _fake_first_left(
    scores: list[Tensor], slots: list[Tensor], *others: list[Tensor] | list[int]
) -> list[Tensor]:
    size = torch.library.get_ctx().new_dynamic_size
    return [*(own.new_empty(size()) for own in slots), torch.empty(len(slots), dtype=torch.int64)]


for _name, _fake in (
    ("index_mix", _fake_mix),
    ("index_order", lambda ids: torch.empty_like(ids)),
    ("index_unique", _fake_unique),
    ("index_find", _fake_find),
    ("index_mix_parts", _fake_mix_parts),
    ("index_find_parts", _fake_find_parts),
    ("marked_range", _fake_range),
    ("marked_histogram", _fake_histogram),
    ("marked_between", _fake_between),
    ("fill_slots", _fake_fill),
    ("release_slots", _fake_release),
    ("first_left", _fake_first_left),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
