"""The output shapes of the index ops, for tracing."""

import torch
from torch import Tensor

import meshrec.ops.index.naive  # noqa: F401 - the ops must exist before fakes are registered for them


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


for _name, _fake in (
    ("mix", _fake_mix),
    ("unique", _fake_unique),
    ("find", _fake_find),
    ("mix_parts", _fake_mix_parts),
    ("find_parts", _fake_find_parts),
):
    torch.library.register_fake(f"meshrec::index_{_name}", _fake)
