"""What a rank holds of tables: one parameter for each table, whatever the number of its rectangles."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.routing import Rectangle

# U touched rows, D columns of a rectangle


class RowGradients(NamedTuple):
    """The touched rows of one rectangle, int64 [U], ascending, and their gradients, fp32 [U, D]."""

    rows: Tensor
    grads: Tensor


class Packing:
    """How the rectangles of one table lie in one parameter: one after the other, in rows of the greatest
    width that divides the widths of all. A rectangle alone is its parameter.
    """

    def __init__(self, rectangles: Sequence[Rectangle]) -> None:
        self.rectangles = list(rectangles)
        self._shapes = [(r.r1 - r.r0, r.c1 - r.c0) for r in rectangles]
        self._width = math.gcd(*(width for _, width in self._shapes))
        # How many packed rows a row of each rectangle takes, and where those of the rectangle begin.
        self._stretch = [width // self._width for _, width in self._shapes]
        rows = [height * n for (height, _), n in zip(self._shapes, self._stretch, strict=True)]
        self._begin = list(accumulate(rows, initial=0))

    @property
    def table(self) -> int:
        """Whose rectangles they are."""
        return self.rectangles[0].table

    @property
    def shape(self) -> tuple[int, int]:
        """Of the parameter."""
        return self._begin[-1], self._width

    def views(self, packed: Tensor) -> list[Tensor]:
        """The rectangles in the parameter's memory."""
        if len(self._shapes) == 1:
            return [packed]
        return [
            packed[begin:end].view(shape)
            for begin, end, shape in zip(self._begin, self._begin[1:], self._shapes, strict=False)
        ]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """One gradient from those of the rectangles."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts]).view(self.shape)

    def pack_rows(self, parts: Sequence[RowGradients], dtype: torch.dtype) -> Tensor:
        """One sparse gradient, coalesced, from those of the rectangles."""
        rows = [
            _stretched(part.rows, n) + begin
            for part, n, begin in zip(parts, self._stretch, self._begin, strict=False)
        ]
        grads = [part.grads.reshape(-1, self._width) for part in parts]
        return torch.sparse_coo_tensor(
            torch.cat(rows)[None],
            torch.cat(grads).to(dtype),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def unpack_rows(self, gradient: Tensor) -> list[RowGradients]:
        """What ``pack_rows`` had, from a coalesced gradient."""
        rows, grads = gradient._indices()[0], gradient._values().float()
        bounds = torch.searchsorted(rows, torch.tensor(self._begin, device=rows.device)).tolist()
        return [
            RowGradients((rows[low:high:n] - begin) // n, grads[low:high].reshape(-1, n * self._width))
            for low, high, n, begin in zip(bounds, bounds[1:], self._stretch, self._begin, strict=False)
        ]


class Held(NamedTuple):
    """The rectangles of one table that are here."""

    parameter: nn.Parameter
    packing: Packing


class Holdings:
    """Tables that a rank looks up together: a parameter and its packing for each, and the optimizer state of
    each rectangle, counted through all tables.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        packings: Sequence[Packing],
        state: Sequence[Sequence[Tensor]],
    ) -> None:
        self.parameters, self.packings, self.state = parameters, packings, state
        self._owners = [table for table, packing in enumerate(packings) for _ in packing.rectangles]

    @property
    def is_packed(self) -> bool:
        """Whether some parameter holds several rectangles."""
        return len(self.state) > len(self.parameters)

    @property
    def weights(self) -> Sequence[Tensor]:
        """The rectangles. Taken anew from parameters that hold several: their memory may be exchanged."""
        if not self.is_packed:
            return self.parameters
        return [
            view
            for parameter, packing in zip(self.parameters, self.packings, strict=True)
            for view in packing.views(parameter.detach())
        ]

    def of_table(self, table: int) -> "Held | None":
        """A table's parameter, None where nothing of it is here."""
        for parameter, packing in zip(self.parameters, self.packings, strict=True):
            if packing.table == table:
                return Held(parameter, packing)
        return None

    def state_of_table(self, table: int) -> list[Sequence[Tensor]]:
        """For each of its rectangles here the optimizer state."""
        tables = [rectangle.table for packing in self.packings for rectangle in packing.rectangles]
        return [state for owner, state in zip(tables, self.state, strict=True) if owner == table]

    def gradient(self, rectangle: int) -> Tensor | None:
        """``grad`` of the parameter that holds it."""
        return self.parameters[self._owners[rectangle]].grad

    def is_trained(self, rectangle: int) -> bool:
        """Whether its table requires a gradient now."""
        return self.parameters[self._owners[rectangle]].requires_grad

    def gradients(self, parts: Mapping[int, Tensor]) -> list[Tensor | None]:
        """For each parameter its gradient from those of its rectangles; None where there is none."""
        return [
            packing.pack([parts[i] for i in own]) if own[0] in parts else None
            for own, packing in zip(self._rectangles(), self.packings, strict=True)
        ]

    def collect(self, parts: Mapping[int, RowGradients]) -> bool:
        """Adds sparse gradients to ``parameter.grad``; whether all that is there now is finite."""
        finite = True
        for own, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if own[0] in parts:
                new = packing.pack_rows([parts[i] for i in own], parameter.dtype)
                parameter.grad = new if parameter.grad is None else (parameter.grad + new).coalesce()
                finite &= bool(parameter.grad._values().isfinite().all())
        return finite

    def collected(self) -> dict[int, RowGradients]:
        """The sparse gradients that ``collect`` gathered, by rectangle."""
        found: dict[int, RowGradients] = {}
        for own, packing, parameter in zip(self._rectangles(), self.packings, self.parameters, strict=True):
            if parameter.grad is not None and parameter.grad.is_sparse:
                found.update(zip(own, packing.unpack_rows(parameter.grad.coalesce()), strict=True))
        return found

    def _rectangles(self) -> list[list[int]]:
        """For each parameter the numbers of its rectangles."""
        ends = list(accumulate((len(packing.rectangles) for packing in self.packings), initial=0))
        return [list(range(begin, end)) for begin, end in pairwise(ends)]


def _stretched(rows: Tensor, n: int) -> Tensor:
    """Each row as the ``n`` packed rows that it takes."""
    return rows if n == 1 else (rows[:, None] * n + torch.arange(n, device=rows.device)).view(-1)
