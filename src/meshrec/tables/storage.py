"""How the rows of a table lie in memory: behind one protocol, for whole tables and for rectangles of them.

All else of a table (which rectangles a rank holds, how they share a parameter, its optimizer, its state dict,
routing and output) is the same for every storage.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshrec.ops import tbe
from meshrec.ops.memory import empty_pages
from meshrec.optim.optimizers import OptimizerSpec

# ``ops.tbe.forward`` without a call in between: every lookup comes by here.
_look_up: Callable[..., Tensor] = torch.ops.meshrec.tbe_forward.default


class RowStorage(Protocol):
    """Rows of ``dim`` numbers as rows of ``columns(dim)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the memory."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated; otherwise they are read only, and keep no optimizer state."""

    def columns(self, dim: int) -> int:
        """The elements that a row of ``dim`` numbers takes."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Memory ``[num_rows, columns]``, not filled."""

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """What ``allocate`` takes for rows of ``dim`` numbers, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """The optimizer state of ``num_rows`` rows before their first update, by slot; None: no state."""

    def look_up(
        self,
        weights: Sequence[Tensor],
        lookups: tbe.Lookups,
        out_size: int,
        out_dtype: torch.dtype,
        check_ids: bool,
        names: Tensor,
    ) -> Tensor:
        """Looks up and pools rows of several tables of this kind: see ``ops.tbe.forward``."""


@dataclass(frozen=True)
class DenseRows:
    """Rows as they are: fp32, fp16 or bf16, ``dim`` elements each, with fp32 state beside them."""

    dtype: torch.dtype
    is_trainable = True

    def columns(self, dim: int) -> int:
        """``dim``."""
        return dim

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """On huge pages, where it is large and on the CPU."""
        return empty_pages((num_rows, columns), self.dtype, device)

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Rows without gaps."""
        return num_rows * dim * self.dtype.itemsize

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """fp32, one tensor per slot of the spec, ``[num_rows]`` or ``[num_rows, dim]``."""
        return [
            empty_pages(slot.shape(num_rows, dim), torch.float32, device).fill_(slot.initial_value)
            for slot in (spec.state_slots() if spec is not None else ())
        ]

    def look_up(
        self,
        weights: Sequence[Tensor],
        lookups: tbe.Lookups,
        out_size: int,
        out_dtype: torch.dtype,
        check_ids: bool,
        names: Tensor,
    ) -> Tensor:
        """``ops.tbe.forward``: differentiable in the weights."""
        return _look_up(list(weights), *lookups[:-1], out_size, out_dtype, check_ids, names)
