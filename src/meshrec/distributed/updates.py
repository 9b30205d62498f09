"""What a gradient does to the tables of a rank: a fused update in place, now or at the optimizer's step, or
an ordinary gradient.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.input_dist import LookupIds
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_stats import ColumnPeers, Touched, needs_gradient_only
from meshrec.ops.tbe.formulas import Hyper, formula_of
from meshrec.plan.mesh import Axis
from meshrec.tables.packing import Rectangle, RowGradients
from meshrec.tables.row_updates import slot_major, update_rows
from meshrec.tables.rule import UpdateRule, distinct


class LookedUp(NamedTuple):
    """The gradient of what ``tables`` looked up for ``ids``."""

    tables: LookupTables
    grad: Tensor
    ids: LookupIds


class TableGradient(NamedTuple):
    """The gradient of the tables of a rank: that of looked-up rows, but for the rectangles in ``rows``, whose
    rows are summed already.
    """

    looked_up: LookedUp | None
    rows: Mapping[int, RowGradients]

    def of(self, rectangles: Sequence[int]) -> dict[int, RowGradients]:
        """By row."""
        found = {i: self.rows[i] for i in rectangles if i in self.rows}
        if self.looked_up is not None and (rest := [i for i in rectangles if i not in found]):
            tables, grad, ids = self.looked_up
            found.update(zip(rest, tables.sparse_grads(grad, ids, rest), strict=True))
        return found


class _RowUpdate(NamedTuple):
    """The update of touched rows of a rectangle, with the sums over their other columns."""

    rectangle: int
    rows: Tensor
    grad: Tensor
    hyper: Tensor
    sums: Tensor


class _Group:
    """The rectangles of one rule. ``whole`` need no other rank; the columns of ``split`` lie on several."""

    def __init__(
        self, rule: UpdateRule, whole: list[int], split: list[int], peers: ColumnPeers | None
    ) -> None:
        self.rule, self.whole, self.split, self.peers = rule, whole, split, peers


class _RunUpdate(NamedTuple):
    """The update of looked-up rows of the split rectangles of a group, with what is known of their other
    columns: see ``LookupTables.update``.
    """

    runs: Tensor
    mean_squares: Tensor


class _Prepared(NamedTuple):
    """What an update needs besides the gradient. ``hyper``: for rows that are whole here."""

    group: _Group
    hyper: Tensor
    split: list[_RowUpdate] | _RunUpdate


class TableUpdates:
    """The fused rules of some tables; tables without a rule get ordinary gradients.

    ``rules``: for each table of the module its rule, None for ordinary gradients.
    """

    def __init__(
        self, tables: LookupTables, routing: Routing, axis: Axis, rules: Sequence[UpdateRule | None]
    ) -> None:
        self._held = tables.held
        self._rectangles = tables.work.rectangles
        self._dims = [table.dim for table in routing.tables]
        self._names = [table.name for table in routing.tables]
        by_columns = _split_by_columns(routing)
        self._groups: list[_Group] = []
        for rule in distinct(rules):
            of_rule = [t for t, other in enumerate(rules) if other is rule]
            needs_rows = bool(formula_of(rule.code).row_sums) and axis.size > 1
            peers = {t for t in of_rule if by_columns[t] and needs_rows}
            own = [i for i, rectangle in enumerate(self._rectangles) if rectangle.table in of_rule]
            whole = [i for i in own if self._rectangles[i].table not in peers]
            split = [i for i in own if self._rectangles[i].table in peers]
            column_peers = ColumnPeers(routing, axis, sorted(peers)) if peers else None
            self._groups.append(_Group(rule, whole, split, column_peers))
        self._ordinary = [i for i, rectangle in enumerate(self._rectangles) if rules[rectangle.table] is None]
        self._deferred = [
            i for group in self._groups if group.rule.deferred for i in group.whole + group.split
        ]

    def prepare(self, gradient: TableGradient, *, deferred: bool) -> list["_Prepared"]:
        """Everything that can fail of the updates of the rules that are deferred, or of the others.

        Collective over the shard axis where rules need rows that are split by columns.
        """
        return [
            _Prepared(
                group,
                group.rule.hyper(0),
                [] if group.peers is None else self._split(group, group.peers, gradient),
            )
            for group in self._groups
            if group.rule.deferred == deferred
        ]

    def apply(self, prepared: Sequence["_Prepared"], gradient: TableGradient) -> None:
        """Makes the updates."""
        for each in prepared:
            self._update_whole(each, gradient)
            self._update_split(each, gradient)

    def ordinary(self, gradient: TableGradient) -> list[Tensor | None]:
        """For each parameter the gradient to give to autograd, None for the fused ones."""
        return self._held.gradients(self._dense(gradient))

    def collect(self, gradient: TableGradient) -> bool:
        """Adds the gradients of deferred tables to ``parameter.grad``; whether all there is finite."""
        return self._held.collect(gradient.of(self._trained(self._deferred)))

    def collected(self) -> TableGradient:
        """What was collected, as a gradient.

        Raises:
            ValueError: where somebody put a dense gradient in the place of a collected one.
        """
        deferred = {self._rectangles[i].table for i in self._deferred}
        names = {t: f"table {self._names[t]!r}" for t in deferred}
        return TableGradient(None, self._held.collected(names))

    def _update_whole(self, prepared: "_Prepared", gradient: TableGradient) -> None:
        group, hyper, _ = prepared
        weights, state = self._held.weights, self._held.state
        trained = self._trained(group.whole)
        together = [i for i in trained if i not in gradient.rows]
        if together and gradient.looked_up is not None:
            self._update_looked_up(gradient.looked_up, together, group.rule.code, hyper)
        for i in trained:
            if i in gradient.rows:
                origin = self._rectangles[i].origin
                update_rows(weights[i].detach(), state[i], origin, *gradient.rows[i], group.rule.code, hyper)

    def _update_looked_up(
        self, looked_up: LookedUp, rectangles: list[int], optimizer: int, hyper: Tensor, *runs: Tensor
    ) -> None:
        tables, grad, ids = looked_up
        slots = slot_major([self._held.state[i] for i in rectangles])
        tables.update(grad, ids, rectangles, slots, optimizer, hyper, *runs)

    def _update_split(self, prepared: _Prepared, gradient: TableGradient) -> None:
        weights, rule = self._held.weights, prepared.group.rule
        if isinstance(prepared.split, _RunUpdate):
            assert gradient.looked_up is not None
            self._update_looked_up(
                gradient.looked_up, prepared.group.split, rule.code, prepared.hyper, *prepared.split
            )
            return
        for i, rows, grad, hyper, sums in prepared.split:
            if self._held.is_trained(i):
                weight, state, origin = weights[i].detach(), self._held.state[i], self._rectangles[i].origin
                update_rows(weight, state, origin, rows, grad, rule.code, hyper, sums)

    def _split(
        self, group: _Group, peers: ColumnPeers, gradient: TableGradient
    ) -> list[_RowUpdate] | _RunUpdate:
        """The updates of a group's split rectangles: of all at once, where the sums can be taken without
        the summed rows. What travels is the same.
        """
        rule, split, looked_up = group.rule, group.split, gradient.looked_up
        dims = [self._dims[self._rectangles[i].table] for i in split]
        hypers = [rule.hyper(dim) for dim in dims]
        numbers = [Hyper.from_tensor(hyper) for hyper in hypers]
        at_once = all(needs_gradient_only(rule.code, h) for h in numbers)
        at_once &= self._trained(split) == split and not gradient.rows.keys() & split
        if not split or looked_up is None or not at_once:
            return self._touched(group, peers, gradient, hypers, numbers)
        tables, grad, ids = looked_up
        squares, counts, runs = tables.row_squares(grad, ids, split)
        return _RunUpdate(runs, peers.mean_squares(squares, counts.tolist(), dims))

    def _touched(
        self,
        group: _Group,
        peers: ColumnPeers,
        gradient: TableGradient,
        hypers: Sequence[Tensor],
        numbers: Sequence[Hyper],
    ) -> list[_RowUpdate]:
        weights, rule = self._held.weights, group.rule
        parts = gradient.of(group.split)
        touched = [
            self._rows(i, parts.get(i) or _no_rows(weights[i]), not needs_gradient_only(rule.code, h))
            for i, h in zip(group.split, numbers, strict=True)
        ]
        stats = peers.row_stats(touched, rule.code, numbers)
        return [
            _RowUpdate(i, part.rows, part.grad, hyper, sums)
            for i, part, hyper, sums in zip(group.split, touched, hypers, stats, strict=True)
        ]

    def _rows(self, i: int, part: RowGradients, with_weights: bool) -> Touched:
        rows, grad = part
        if not with_weights:
            return Touched(rows, grad, grad.new_empty(0), [])
        weight = self._held.weights[i].detach()
        return Touched(rows, grad, weight[rows].float(), [slot[rows] for slot in self._held.state[i]])

    def _dense(self, gradient: TableGradient) -> dict[int, Tensor]:
        """The ordinary gradients, by rectangle."""
        weights = self._held.weights
        wanted = self._trained(self._ordinary)
        found = {
            i: torch.zeros_like(weights[i]).index_copy_(0, rows.rows, rows.grads.to(weights[i].dtype))
            for i in wanted
            if (rows := gradient.rows.get(i)) is not None
        }
        if gradient.looked_up is not None and (rest := [i for i in wanted if i not in found]):
            tables, grad, ids = gradient.looked_up
            found.update(zip(rest, tables.dense_grads(grad, ids, rest), strict=True))
        return found

    def _trained(self, rectangles: Sequence[int]) -> list[int]:
        """Without the tables that are frozen now."""
        return [i for i in rectangles if self._held.is_trained(i)]


def _no_rows(weight: Tensor) -> RowGradients:
    return RowGradients(
        torch.empty(0, dtype=torch.int64, device=weight.device),
        torch.empty(0, weight.shape[1], device=weight.device),
    )


def _split_by_columns(routing: Routing) -> list[bool]:
    """For each table whether its rows lie on several ranks: the same answer on all of them."""
    split = [False] * len(routing.tables)
    for work in routing.work:
        for rectangle in work.rectangles:
            split[rectangle.table] |= _width(rectangle) < routing.tables[rectangle.table].dim
    return split


def _width(rectangle: Rectangle) -> int:
    return rectangle.c1 - rectangle.c0
