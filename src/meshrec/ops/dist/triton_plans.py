"""Inputs for the Triton kernels in ``triton.py``. All but the bags depend only on the plan."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from meshrec.ops.tbe.layout import segment_bounds

# Shape legend: U uses, Q routes, K keys.

_MAX_COLUMNS = 128
"""Maximum number of columns that a program handles. Wider pieces are split."""


@dataclass(frozen=True, kw_only=True)
class PlanRoutes:
    """The routes of a plan, in the form that the kernels read."""

    fields: Tensor
    """Seven integers per route: those ``triton_kernels.ROUTE_FIELDS`` that depend only on the plan.

    int64 [Q, 7] on the CPU.
    """
    uses: list[int]
    """Use per route; [Q]."""
    first_of_rank: list[int]
    """First route to each rank, followed by Q."""
    max_routes: list[int]
    """For each use, the maximum number of routes that take the same ID; [U]."""

    @classmethod
    def from_router(cls, router: Sequence[Tensor]) -> "PlanRoutes":
        """Compute the routes from the five ``router`` tensors; ``naive`` documents these."""
        cut_start, cuts, interval_start, interval_routes, flat = (tensor.tolist() for tensor in router)
        routes = [flat[i : i + 3] for i in range(0, len(flat), 3)]
        # ends: end row per route, from the last interval on the route.
        ends, max_routes, interval = [0] * len(routes), [], 0
        num_rows = []
        for start, end in pairwise(cut_start):
            use_max = 0
            for cut in range(start + 1, end):
                takers = interval_routes[interval_start[interval] : interval_start[interval + 1]]
                use_max, interval = max(use_max, len(takers)), interval + 1
                for route in takers:
                    ends[route] = cuts[cut]  # a route's intervals are consecutive
            max_routes.append(use_max)
            num_rows.append(cuts[end - 1])
        # Ranks after the last rank with a route are left out.
        num_ranks = max((rank for rank, *_ in routes), default=-1) + 1
        num_routes = [0] * num_ranks
        rows, seen = [], set[int]()
        for (rank, use, first), end in zip(routes, ends, strict=True):
            # In the order of ROUTE_FIELDS.
            rows.append([rank, use, first, end, num_rows[use], use not in seen, num_routes[rank]])
            seen.add(use)
            num_routes[rank] += 1
        return cls(
            fields=torch.tensor(rows, dtype=torch.int64).view(-1, 7),
            uses=[use for _, use, _ in routes],
            first_of_rank=list(accumulate(num_routes, initial=0)),
            max_routes=max_routes,
        )


# Keyed by a plan tensor: entries live as long as the plan.
_route_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_group_cache: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def cached_routes(router: Sequence[Tensor]) -> PlanRoutes:
    """Return the routes of a plan, which are computed at the first call for this plan."""
    routes: PlanRoutes | None = _route_cache.get(router[4])
    if routes is None:
        routes = _route_cache[router[4]] = PlanRoutes.from_router(router)
    return routes


class UseBags(NamedTuple):
    """The bags of a batch that each use reads. A use is a pair of a feature and the table that it reads."""

    first: list[int]
    """First bag per use, from the key of the use; [U]."""
    number: list[int]
    """Bag count per use, from the key of the use; [U]."""

    @classmethod
    def from_offsets(
        cls, offsets: Tensor, segments: Tensor | None, num_keys: int, keys: Sequence[int]
    ) -> "UseBags":
        """Find the bags that each use reads.

        Args:
            offsets: first ID index per bag, followed by the number of IDs, [bags + 1].
            segments: first bag index per key, followed by the bag count, int64 [K + 1]. None: all
                keys have the same number of bags.
            keys: key per use, [U].
        """
        bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
        return cls([bounds[key] for key in keys], [bounds[key + 1] - bounds[key] for key in keys])


class ColumnGroups(NamedTuple):
    """The pieces of a pooled output, arranged for the kernels ``gather_columns`` and ``scatter_columns``.

    A piece is a range of columns that a rank sends for the output. Pieces may overlap, and are then added. A
    group is a range of output columns that are sums of the same pieces.

    Attributes:
        groups: groups of output columns, int64 [G, 4]; see ``gather_columns``.
        parts: the pieces of each group, int64 [., 3]; see ``gather_columns``.
        pieces: all pieces, cut to at most ``_MAX_COLUMNS`` columns, int64 [P, 5]; see ``scatter_columns``.
        has_means: whether any piece is divided by bag lengths.
        max_columns: width of the widest piece after cutting.
    """

    groups: Tensor
    parts: Tensor
    pieces: Tensor
    has_means: bool
    max_columns: int

    @classmethod
    def from_pieces(cls, pieces: list[list[int]]) -> "ColumnGroups":
        """Divide the output columns into groups, and cut the pieces for the backward pass.

        A group, or a cut piece, has at most ``_MAX_COLUMNS`` columns. ``naive`` documents ``pieces``.
        """
        # Between two adjacent edges, all columns are covered by the same pieces.
        edges = {edge for _, _, width, column, *_ in pieces for edge in (column, column + width)}
        groups: list[list[int]] = []
        parts: list[list[int]] = []
        for first, end in pairwise(sorted(edges)):
            overlapping = [piece for piece in pieces if piece[3] <= first < piece[3] + piece[2]]
            for column in range(first, end, _MAX_COLUMNS) if overlapping else ():
                groups.append([column, min(end - column, _MAX_COLUMNS), len(parts), len(overlapping)])
                # The part starts in the source as far after the piece as the group does in the output.
                parts += [[source, start + column - at, use] for source, start, _, at, _, use in overlapping]
        cut = [
            [source, start + skip, min(width - skip, _MAX_COLUMNS), column + skip, use]
            for source, start, width, column, _, use in pieces
            for skip in range(0, width, _MAX_COLUMNS)
        ]
        return cls(
            torch.tensor(groups, dtype=torch.int64).view(-1, 4),
            torch.tensor(parts, dtype=torch.int64).view(-1, 3),
            torch.tensor(cut, dtype=torch.int64).view(-1, 5),
            any(use >= 0 for *_, use in pieces),
            max((width for _, _, width, *_ in cut), default=1),
        )


def cached_groups(pieces: Tensor, device: torch.device) -> ColumnGroups:
    """Return the column groups for some pieces on a device, which are computed at the first such call."""
    by_device: dict[torch.device, ColumnGroups] = _group_cache.setdefault(pieces, {})
    if device not in by_device:
        groups = ColumnGroups.from_pieces(pieces.tolist())
        # Later batches may use the cache on other streams, so copy synchronously.
        by_device[device] = groups._replace(
            groups=groups.groups.to(device), parts=groups.parts.to(device), pieces=groups.pieces.to(device)
        )
    return by_device[device]


def ceil_div(number: int, size: int) -> int:
    """Return ``number / size``, rounded up."""
    return -(-number // size)
