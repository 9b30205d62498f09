"""The inputs of the Triton kernels of ``triton.py``: made once per plan, and the bags of a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshrec.ops.tbe.layout import segment_bounds

# U uses, Q routes, K keys

_MOST_COLUMNS = 128
"""Columns per program."""


@dataclass(frozen=True, kw_only=True)
class PlanRoutes:
    """The routes of a plan, from its router."""

    fields: Tensor
    """int64 [Q, 7] on the CPU: the first ``triton_kernels.ROUTE_FIELDS``, which do not depend on the
    batch.
    """
    uses: list[int]
    first_of_rank: list[int]
    """The first route of each rank, and Q."""
    most_routes: list[int]
    """[U]: the largest number of routes that take one ID."""

    @classmethod
    def of(cls, router: Sequence[Tensor]) -> "PlanRoutes":
        cut_begin, cuts, interval_begin, interval_routes, flat = (tensor.tolist() for tensor in router)
        routes = [flat[i : i + 3] for i in range(0, len(flat), 3)]
        ends, most_routes, interval = [0] * len(routes), [], 0
        num_rows = []
        for begin, end in pairwise(cut_begin):
            most = 0
            for cut in range(begin + 1, end):
                takers = interval_routes[interval_begin[interval] : interval_begin[interval + 1]]
                most, interval = max(most, len(takers)), interval + 1
                for route in takers:
                    ends[route] = cuts[cut]  # the intervals of a route follow each other
            most_routes.append(most)
            num_rows.append(cuts[end - 1])
        num_ranks = max((rank for rank, *_ in routes), default=-1) + 1
        of_rank = [0] * num_ranks
        rows, seen = [], set[int]()
        for (rank, use, first), end in zip(routes, ends, strict=True):
            rows.append([rank, use, first, end, num_rows[use], use not in seen, of_rank[rank]])
            seen.add(use)
            of_rank[rank] += 1
        return cls(
            fields=torch.tensor(rows, dtype=torch.int64).view(-1, 7),
            uses=[use for _, use, _ in routes],
            first_of_rank=list(accumulate(of_rank, initial=0)),
            most_routes=most_routes,
        )


# Caches by tensors of a plan; their entries end with the plan.
_made_routes: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_made_groups: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def routes_of(router: Sequence[Tensor]) -> PlanRoutes:
    found: PlanRoutes | None = _made_routes.get(router[4])
    if found is None:
        found = _made_routes[router[4]] = PlanRoutes.of(router)
    return found


class UseBags(NamedTuple):
    """The bags of a batch as the uses of a plan read them."""

    first: list[int]
    """The first bag of each use's key, [U]."""
    number: list[int]
    """The number of bags of each use, [U]."""

    @classmethod
    def of(cls, offsets: Tensor, segments: Tensor | None, num_keys: int, keys: Sequence[int]) -> "UseBags":
        bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
        return cls([bounds[key] for key in keys], [bounds[key + 1] - bounds[key] for key in keys])


class ColumnGroups(NamedTuple):
    """The pieces of a result, prepared for ``gather_columns`` and ``scatter_columns``."""

    groups: Tensor
    parts: Tensor
    pieces: Tensor
    has_means: bool
    most_columns: int

    @classmethod
    def of(cls, pieces: list[list[int]]) -> "ColumnGroups":
        """Split the columns where the set of pieces changes, and into at most ``_MOST_COLUMNS``."""
        edges = {edge for _, _, width, column, *_ in pieces for edge in (column, column + width)}
        groups: list[list[int]] = []
        parts: list[list[int]] = []
        for first, end in pairwise(sorted(edges)):
            own = [piece for piece in pieces if piece[3] <= first < piece[3] + piece[2]]
            for column in range(first, end, _MOST_COLUMNS) if own else ():
                groups.append([column, min(end - column, _MOST_COLUMNS), len(parts), len(own)])
                parts += [[source, start + column - at, use] for source, start, _, at, _, use in own]
        cut = [
            [source, start + skip, min(width - skip, _MOST_COLUMNS), column + skip, use]
            for source, start, width, column, _, use in pieces
            for skip in range(0, width, _MOST_COLUMNS)
        ]
        return cls(
            torch.tensor(groups, dtype=torch.int64).view(-1, 4),
            torch.tensor(parts, dtype=torch.int64).view(-1, 3),
            torch.tensor(cut, dtype=torch.int64).view(-1, 5),
            any(use >= 0 for *_, use in pieces),
            max((width for _, _, width, *_ in cut), default=1),
        )


def groups_of(pieces: Tensor, device: torch.device) -> ColumnGroups:
    found: dict[torch.device, ColumnGroups] = _made_groups.setdefault(pieces, {})
    if device not in found:
        made = ColumnGroups.of(pieces.tolist())
        # Cached for later batches, perhaps on other streams, so this copy must be complete.
        found[device] = made._replace(
            groups=made.groups.to(device), parts=made.parts.to(device), pieces=made.pieces.to(device)
        )
    return found[device]


def num_blocks(number: int, size: int) -> int:
    return -(-number // size)


