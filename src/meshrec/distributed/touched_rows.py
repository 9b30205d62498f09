"""Which rows of the rectangles here were touched, and when: four bytes per row, a store per looked-up id."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.distributed.updates import TableGradient
from meshrec.tables.packing import Rectangle
from meshrec.tables.rule import UpdateRule


class TouchedRows:
    """Watches the tables of one module from now on.

    Args:
        tables: of the module.
        rules: for each table of it its rule; the number of the update is what rows are marked with.
    """

    def __init__(self, tables: ShardedTables, rules: Sequence[UpdateRule | None]) -> None:
        self._rules = rules
        self._parts = [tables.split, tables.local]
        self._marks = [[_marks(rectangle) for rectangle in part.work.rectangles] for part in self._parts]
        tables.watch = self._mark

    def touched(self, table: int, since: int) -> Iterator[tuple[Rectangle, Tensor, Tensor]]:
        """For each rectangle of a table here: the rows touched after update ``since``, counted from the
        rectangle's first, and its weights."""
        for part, marks in zip(self._parts, self._marks, strict=True):
            for rectangle, last, weight in zip(part.work.rectangles, marks, part.weights, strict=True):
                if rectangle.table == table:
                    yield rectangle, (last > since).nonzero()[:, 0], weight.detach()

    def _mark(self, gradients: Sequence[TableGradient]) -> None:
        for part, marks, gradient in zip(self._parts, self._marks, gradients, strict=False):
            for i, rows in gradient.rows.items():
                self._set(part, marks, i, rows.rows)
            if gradient.looked_up is None:
                continue
            tables, _, ids = gradient.looked_up  # these may be fewer tables, with fewer routes
            for route, values in enumerate(_by_route(ids, len(tables.work.routes))):
                for lookup in tables.work.lookups:
                    if lookup.route == route and lookup.rectangle not in gradient.rows:
                        self._set(part, marks, lookup.rectangle, values)

    def _set(self, part: LookupTables, marks: Sequence[Tensor], i: int, rows: Tensor) -> None:
        rule = self._rules[part.work.rectangles[i].table]
        if rule is not None:
            # Deferred updates are made by the step that follows.
            marks[i].index_fill_(0, rows.long(), rule.step + rule.deferred)


def _marks(rectangle: Rectangle) -> Tensor:
    return torch.full((rectangle.r1 - rectangle.r0,), -1, dtype=torch.int32)  # never


def _by_route(ids: LookupIds, num_routes: int) -> Iterator[Tensor]:
    """The ids of each route, of all blocks."""
    bounds = ids.offsets[ids.segments.to(ids.offsets.device)].tolist()
    num_blocks = (len(bounds) - 1) // max(1, num_routes)
    for route in range(num_routes):
        places = [block * num_routes + route for block in range(num_blocks)]
        yield torch.cat([ids.values[bounds[p] : bounds[p + 1]] for p in places])
