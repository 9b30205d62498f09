"""The one update path: what a gradient does to the tables of a rank, unsharded and sharded alike.

[Note: what makes an update deterministic]

The same gradient gives the same bits, whatever the number of threads and the order of messages:

1. The kernels sort the looked-up rows of a batch, add the gradients of equal rows in the order of the batch,
   and change every touched row once (``csrc/tbe/fused_update.cpp``). Threads split rows, never one row.
2. Partial sums of several ranks are added in the order of ranks (``distributed/row_stats.py``,
   ``distributed/output_dist.py``).
3. Stochastic rounding draws from (seed, step, row and column of the whole table), so that a rectangle rounds
   as the whole table would. "step" is the table's own count of updates.
4. An update happens for all tables or for none: ``prepare`` does everything that can fail, collectives and
   checks of hyperparameters among them, and ``apply`` only writes.

[Note: who may change rows, and when]

Between a forward pass and its backward pass only ``TableUpdates.apply`` may write to a table: the gradient of
a lookup does not depend on the rows, so updates of other batches do no harm. All other writes are found by
``OwnWrites`` and refused in the backward pass. Between steps anybody may write in place (``load_state_dict``,
a checkpoint, resharding); a pipeline that has looked rows up ahead looks them up again, because
``ShardedTables.num_changes`` has changed. No one may replace the memory of a parameter: kernels, optimizer
state and snapshots hold it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.ops import tbe
from meshrec.ops.tbe.formulas import Hyper, needs_gradient_only
from meshrec.tables.holdings import Holdings
from meshrec.tables.optimizer import FusedTable
from meshrec.tables.packing import RowGradients
from meshrec.tables.row_updates import rows_as_lookups, slot_major
from meshrec.tables.rule import UpdateRule, distinct
from meshrec.tables.turnover import Decision, Turnover
from meshrec.tables.writes import OwnWrites


class LookedUp(NamedTuple):
    """The gradient of what was looked up, in the shape of the output; ``lookups.tables`` are rectangles."""

    grad: Tensor
    lookups: tbe.Lookups


class TableGradient(NamedTuple):
    """The gradient of the tables of a rank: that of a lookup, except for the rectangles in ``rows``, whose
    gradients are summed by row already.
    """

    looked_up: LookedUp | None
    rows: Mapping[int, RowGradients]
    pins: Sequence[object] = ()
    """The objects that keep the slots in it valid; see ``tables.index.Resolved``."""


class Touched(NamedTuple):
    """The touched rows of one rectangle: ``rows`` int64 [U], ``grad`` and ``weight`` fp32 [U, D], and their
    state. Weight and state are empty where sums are of the gradient alone (``needs_gradient_only``).
    """

    rows: Tensor
    grad: Tensor
    weight: Tensor
    slots: list[Tensor]


class RowPeers(Protocol):
    """Other ranks that hold other columns of the same rows, for the tables of one rule. Collective."""

    def mean_squares(self, squares: Tensor, counts: Sequence[int], row_dims: Sequence[int]) -> Tensor:
        """Return the means of squared gradients over whole rows; see ``distributed.row_stats``."""

    def row_stats(self, touched: Sequence[Touched], optimizer: int, hyper: Sequence[Hyper]) -> list[Tensor]:
        """Return for each rectangle what ``tbe_update`` takes as ``row_stats``."""


FindPeers = Callable[[UpdateRule, Sequence[int]], "tuple[frozenset[int], RowPeers | None]"]
"""For a rule and its tables: the tables whose rows lie on several ranks, and those ranks."""


class _Group:
    """The rectangles of one rule. ``whole`` need no other rank; the columns of ``split`` lie on several."""

    def __init__(self, rule: UpdateRule, tables: list[int], peers: RowPeers | None) -> None:
        self.rule, self.tables, self.peers = rule, tables, peers
        self.whole: list[int] = []
        self.split: list[int] = []
        self.state: list[Tensor] = []
        """The optimizer state of ``whole``, kept since every update needs it."""
        self.origins: list[int] = []
        """The origins of ``whole``."""
        self.members: list[tuple[int, FusedTable, dict[str, Any]]] = []
        """Number, table and state of each of ``tables``: every step walks them."""


class _RowUpdate(NamedTuple):
    """The update of touched rows of one rectangle, with the sums over their other columns."""

    rectangle: int
    rows: RowGradients
    hyper: Tensor
    sums: Tensor


class _RunUpdate(NamedTuple):
    """The arguments of ``tbe_update`` for rows whose other columns are on other ranks.

    ``mean_squares`` are those of whole rows.
    """

    runs: Tensor
    mean_squares: Tensor


class Prepared(NamedTuple):
    """The prepared update of one group: all that it needs except the gradient."""

    group: _Group
    steps: dict[int, list[int]]
    """The tables to update, by the number of their update."""
    split: list[_RowUpdate] | _RunUpdate


class PreparedUpdates(NamedTuple):
    """The updates of all groups, and what they do to the IDs of hashed tables."""

    groups: list[Prepared]
    turnover: Decision | None


class TableUpdates:
    """The fused updates of the tables that a rank holds together.

    Tables without a rule get ordinary gradients. Every table counts its own updates: tables that were frozen
    for a while, or loaded from different checkpoints, go on from their own step.

    Args:
        held: the tables.
        fused: the tables with a fused rule, by number; also those of which this rank holds no rows.
        writes: counts the writes that updates make.
        peers: tells which tables are split by columns; None where all rows are whole here.
        turnover: lets IDs of hashed tables come and go with each update; None where there are none.
    """

    def __init__(
        self,
        held: Holdings,
        fused: Mapping[int, FusedTable],
        *,
        writes: OwnWrites,
        peers: FindPeers | None = None,
        turnover: Turnover | None = None,
    ) -> None:
        self.turnover = turnover
        self._held, self._fused, self._writes = held, dict(fused), writes
        self._rectangles = held.rectangles
        self._place = {number: writes.place_of(table.weight) for number, table in fused.items()}
        self._groups: list[_Group] = []
        for rule in distinct([table.rule for table in fused.values()]):
            tables = [number for number, table in fused.items() if table.rule is rule]
            split, found = (frozenset[int](), None) if peers is None else peers(rule, tables)
            group = _Group(rule, tables, found)
            for number, rectangle in enumerate(self._rectangles):
                if rectangle.table in tables:
                    (group.split if rectangle.table in split else group.whole).append(number)
            group.state = slot_major([held.state[i] for i in group.whole])
            group.origins = [start for i in group.whole for start in self._rectangles[i].origin]
            group.members = [(number, fused[number], fused[number].state) for number in tables]
            self._groups.append(group)
        self._ordinary = [i for i, rectangle in enumerate(self._rectangles) if rectangle.table not in fused]
        deferred = [group for group in self._groups if group.rule.deferred]
        # Stochastic rounding, of these types alone, draws by the row of the whole table.
        self._row_keys = {
            i: keys
            for i, index in held.indexes.items()
            if (keys := getattr(index, "slot_keys", None)) is not None
            and held.weights[i].dtype is not torch.float32
        }
        self._deferred = [i for group in deferred for i in group.whole + group.split]
        self._carriers = {
            i: carrier for i, carrier in held.carriers().items() if self._rectangles[i].table in fused
        }

    def prepare(self, gradient: TableGradient, *, deferred: bool) -> PreparedUpdates:
        """Prepare the updates of the deferred rules, or of the others: do everything that can fail.

        Collective over the ranks that hold other columns of the same rows.

        Raises:
            ValueError: a hyperparameter is out of its range now, or a hashed table has no room.
        """
        groups = [group for group in self._groups if group.rule.deferred == deferred]
        for group in groups:
            group.rule.refresh()
        prepared = [self._prepared(group, gradient) for group in groups]
        if self.turnover is None:
            return PreparedUpdates(prepared, None)
        steps = {t: step for each in prepared for step, members in each.steps.items() for t in members}
        hashed = {table: step for table, step in steps.items() if table in self.turnover.live}
        decision = self.turnover.prepare(gradient.pins, hashed) if hashed else None
        return PreparedUpdates(prepared, decision)

    def apply(self, prepared: PreparedUpdates, gradient: TableGradient) -> None:
        """Make the updates and count them."""
        decision = prepared.turnover
        if self.turnover is not None and decision is not None:
            self.turnover.apply(decision)
        for each in prepared.groups:
            group = each.group
            for step, members in each.steps.items():
                chosen = group.whole
                if len(members) < len(group.tables):
                    chosen = [i for i in chosen if self._rectangles[i].table in members]
                self._update_whole(chosen, gradient, group, step)
            if group.split:
                self._update_split(each, gradient, {table for own in each.steps.values() for table in own})
            for step, members in each.steps.items():
                for table in members:
                    self._fused[table].state["step"] = step
                self._writes.count([self._place[table] for table in members])
        if self.turnover is not None and decision is not None:
            self.turnover.finish(decision)

    def ordinary(self, gradient: TableGradient) -> list[Tensor | None]:
        """Return for each parameter the gradient to give to autograd, None for the fused ones."""
        return self._held.gradients(self._dense(gradient))

    def collect(self, gradient: TableGradient) -> bool:
        """Add the gradients of deferred tables to ``parameter.grad``; return whether all there is finite."""
        if not self._deferred:
            return True
        parts = self._by_row(gradient, self._trained(self._deferred))
        finite = True
        for i, carrier in self._carriers.items():
            if i in parts:
                finite &= carrier.collect(parts.pop(i), gradient.pins)
        return self._held.collect(parts) and finite

    def collected(self) -> TableGradient:
        """Return the collected gradients.

        Raises:
            ValueError: somebody put a dense gradient in the place of a collected one.
        """
        deferred = {self._rectangles[i].table for i in self._deferred}
        rows = self._held.collected({t: self._fused[t].label for t in deferred})
        pins: list[object] = []
        for i, carrier in self._carriers.items():
            if (found := carrier.collected()) is not None:
                rows[i] = found
                pins += [pin for pin in carrier.pins if pin not in pins]
        return TableGradient(None, rows, pins)

    def _prepared(self, group: _Group, gradient: TableGradient) -> Prepared:
        chosen = [each for each in group.members if each[1].weight.requires_grad]
        if group.rule.deferred:
            chosen = [each for each in chosen if not self._lacks_gradient(each[1])]
        counts = {state["step"] for _, _, state in chosen}
        steps = {
            count + 1: [number for number, _, state in chosen if state["step"] == count]
            for count in sorted(counts)
        }
        return Prepared(
            group, steps, [] if group.peers is None else self._split(group, group.peers, gradient)
        )

    def _lacks_gradient(self, table: FusedTable) -> bool:
        # A rank without rows of a table counts along with those who have some.
        return table.weight.numel() > 0 and table.weight.grad is None

    def _update_whole(self, chosen: list[int], gradient: TableGradient, group: _Group, step: int) -> None:
        """Update rectangles whose rows are whole here: all in one kernel call for each kind of gradient."""
        rule, hyper = group.rule, group.rule.hyper_at(step)
        together = [i for i in chosen if i not in gradient.rows] if gradient.rows else chosen
        if together and together is group.whole and gradient.looked_up is not None:
            grad, lookups = gradient.looked_up
            weights = self._held.weights
            tbe.update(
                grad,
                *lookups.of_tables(together),
                [weights[i] for i in together],
                group.state,
                rule.code,
                hyper,
                None,
                group.origins,
                *self._trailing(together),
            )
            return
        if together and gradient.looked_up is not None:
            self._call(gradient.looked_up, together, rule, hyper)
        if summed := [i for i in chosen if i in gradient.rows]:
            parts = [gradient.rows[i] for i in summed]
            lookups = rows_as_lookups(
                [part.rows for part in parts], [part.grads.shape[1] for part in parts], summed
            )
            grads = [part.grads.reshape(-1) for part in parts]
            self._call(
                LookedUp(grads[0] if len(grads) == 1 else torch.cat(grads), lookups), summed, rule, hyper
            )

    def _call(
        self,
        looked_up: LookedUp,
        rectangles: Sequence[int],
        rule: UpdateRule,
        hyper: Tensor,
        *,
        sums: Tensor | None = None,
        runs: tuple[Tensor, Tensor] | tuple[()] = (),
    ) -> None:
        """Run the kernel, which changes each touched row of these rectangles once."""
        weights, grad, lookups = self._held.weights, *looked_up
        tbe.update(
            grad,
            *lookups.of_tables(rectangles),
            [weights[i] for i in rectangles],
            slot_major([self._held.state[i] for i in rectangles]),
            rule.code,
            hyper,
            sums,
            [start for i in rectangles for start in self._rectangles[i].origin],
            *self._trailing(rectangles, runs),
        )

    def _trailing(
        self, rectangles: Sequence[int], runs: tuple[Tensor, Tensor] | tuple[()] = ()
    ) -> Sequence[object]:
        """Return the last arguments of the kernel, as far as these rectangles need them."""
        if not self._row_keys:
            return runs
        nothing = torch.empty(0, dtype=torch.int64)
        return *(runs or (None, None)), [self._row_keys.get(i, nothing) for i in rectangles]

    def _update_split(self, prepared: Prepared, gradient: TableGradient, tables: set[int]) -> None:
        group, split = prepared.group, prepared.split
        if isinstance(split, _RunUpdate):
            assert gradient.looked_up is not None
            for step, members in prepared.steps.items():
                chosen = [i for i in group.split if self._rectangles[i].table in members]
                assert chosen == group.split, "runs are of all split rectangles at once"
                self._call(gradient.looked_up, chosen, group.rule, group.rule.hyper_at(step), runs=split)
            return
        for i, rows, hyper, sums in split:
            if self._rectangles[i].table in tables:
                lookups = rows_as_lookups([rows.rows], [rows.grads.shape[1]], [i])
                self._call(LookedUp(rows.grads.reshape(-1), lookups), [i], group.rule, hyper, sums=sums)

    def _split(
        self, group: _Group, peers: RowPeers, gradient: TableGradient
    ) -> list[_RowUpdate] | _RunUpdate:
        """Prepare the updates of a group's split rectangles.

        All of them are updated at once if the row statistics can be computed without summing the rows. The
        ranks exchange the same data either way.
        """
        rule, split, looked_up = group.rule, group.split, gradient.looked_up
        dims = [self._fused[self._rectangles[i].table].dim for i in split]
        steps = [self._fused[self._rectangles[i].table].state["step"] + 1 for i in split]
        hypers = [rule.hyper(step, dim) for step, dim in zip(steps, dims, strict=True)]
        numbers = [Hyper.from_tensor(hyper) for hyper in hypers]
        at_once = all(needs_gradient_only(rule.code, h) for h in numbers) and len(set(steps)) == 1
        at_once &= self._trained(split) == split and not gradient.rows.keys() & split
        if not split or looked_up is None or not at_once:
            return self._touched(group, peers, gradient, hypers)
        lookups = looked_up.lookups.of_tables(split)
        squares, counts, runs = tbe.row_squares(looked_up.grad, lookups, self._heights(split))
        return _RunUpdate(runs, peers.mean_squares(squares, counts.tolist(), dims))

    def _touched(
        self, group: _Group, peers: RowPeers, gradient: TableGradient, hypers: Sequence[Tensor]
    ) -> list[_RowUpdate]:
        weights, rule = self._held.weights, group.rule
        numbers = [Hyper.from_tensor(hyper) for hyper in hypers]
        parts = self._by_row(gradient, group.split)
        touched = [
            self._rows(i, parts.get(i) or _no_rows(weights[i]), not needs_gradient_only(rule.code, h))
            for i, h in zip(group.split, numbers, strict=True)
        ]
        stats = peers.row_stats(touched, rule.code, numbers)
        return [
            _RowUpdate(i, RowGradients(part.rows, part.grad), hyper, sums)
            for i, part, hyper, sums in zip(group.split, touched, hypers, stats, strict=True)
        ]

    def _rows(self, i: int, part: RowGradients, with_weights: bool) -> Touched:
        rows, grad = part
        if not with_weights:
            return Touched(rows, grad, grad.new_empty(0), [])
        weight = self._held.weights[i].detach()
        return Touched(rows, grad, weight[rows].float(), [slot[rows] for slot in self._held.state[i]])

    def _by_row(self, gradient: TableGradient, rectangles: Sequence[int]) -> dict[int, RowGradients]:
        """Return the gradient of each rectangle by its touched rows."""
        found = {i: gradient.rows[i] for i in rectangles if i in gradient.rows}
        if gradient.looked_up is not None and (rest := [i for i in rectangles if i not in found]):
            grad, lookups = gradient.looked_up
            pairs = tbe.sparse_grad(grad, lookups.of_tables(rest), self._heights(rest))
            found.update({i: RowGradients(*pair) for i, pair in zip(rest, pairs, strict=True)})
        return found

    def _dense(self, gradient: TableGradient) -> dict[int, Tensor]:
        """Return the ordinary gradients, by rectangle."""
        weights = self._held.weights
        wanted = self._trained(self._ordinary)
        found = {
            i: torch.zeros_like(weights[i]).index_copy_(0, rows.rows, rows.grads.to(weights[i].dtype))
            for i in wanted
            if (rows := gradient.rows.get(i)) is not None
        }
        if gradient.looked_up is not None and (rest := [i for i in wanted if i not in found]):
            grad, lookups = gradient.looked_up
            dense = tbe.dense_grad(grad, [weights[i] for i in rest], lookups.of_tables(rest))
            found.update(zip(rest, dense, strict=True))
        return found

    def _heights(self, rectangles: Sequence[int]) -> list[int]:
        weights = self._held.weights
        return [weights[i].shape[0] for i in rectangles]

    def _trained(self, rectangles: Sequence[int]) -> list[int]:
        """Return the rectangles whose tables are not frozen now."""
        return [i for i in rectangles if self._held.is_trained(i)]


def _no_rows(weight: Tensor) -> RowGradients:
    return RowGradients(
        torch.empty(0, dtype=torch.int64, device=weight.device),
        torch.empty(0, weight.shape[1], device=weight.device),
    )
