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


for _name, _fake in (("mix", _fake_mix), ("unique", _fake_unique), ("find", _fake_find)):
    torch.library.register_fake(f"meshrec::index_{_name}", _fake)
