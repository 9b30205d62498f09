"""Updates for the tables on a rank, unsharded or sharded: from a gradient to changed rows.

[Note: what makes an update deterministic]

The same gradient gives the same bits, for any thread count and any message order:

1. The kernels sort the rows looked up by a batch, add equal rows' gradients in batch order, and
   change every touched row once (``csrc/tbe/fused_update.cpp``). Threads split work by rows, never within
   a row.
2. Partial sums from several ranks are added in rank order (``distributed/row_stats.py``,
   ``distributed/output_dist.py``).
3. Stochastic rounding draws from (seed, step, row and column in the whole table), so a rectangle rounds
   as the whole table would. "step" is the table's own update count.
4. An update happens for all tables or for none: ``prepare`` does everything that can fail, including
   collectives and hyperparameter checks, and ``apply`` only writes.

[Note: who may change rows, and when]

Between a forward pass and its backward pass only ``TableUpdates.apply`` may write to a table: a lookup
gradient does not depend on the rows, so updates from other batches do no harm. ``WriteCounter`` finds all
other writes, and the backward pass refuses them. Between steps anybody may write in place
(``load_state_dict``, a checkpoint, resharding); a pipeline that has looked rows up ahead looks them up again,
because ``ShardedTables.num_changes`` has changed. No caller may replace a parameter's memory: kernels,
optimizer state and snapshots hold it.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from meshrec.ops import tbe
from meshrec.ops.tbe.formulas import Hyper, needs_gradient_only
from meshrec.ops.tbe.layout import NONE
from meshrec.ops.versions import in_place_change_message
from meshrec.tables.hashed.admission_eviction import AdmissionEviction, TableChanges
from meshrec.tables.local_shards import LocalShards
from meshrec.tables.optimizer import FusedTable, UpdateRule, distinct_rules
from meshrec.tables.packing import RowGradients

_version: Callable[[Tensor], int] = operator.attrgetter("_version")  # in-place write count


class WriteCounter:
    """Counts in-place writes made by fused table updates, to detect all other writes.

    torch counts all in-place writes to a tensor. A gradient stays valid if another batch's update
    changes the table in between (it does not depend on the rows), but not if the user loads or writes
    weights. The difference between the two counts is the count of other writes.

    Args:
        names: table names for messages.
        weights: table parameters.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self._names, self._weights = list(names), list(weights)
        self._counted = [0] * len(self._weights)  # writes made by updates, per table
        self._lock = threading.Lock()

    def index_of(self, weight: Tensor) -> int:
        """Return a parameter's index in ``weights``, for ``count``."""
        return next(index for index, parameter in enumerate(self._weights) if parameter is weight)

    def foreign_writes(self) -> list[int]:
        """Count in-place writes per table not made by updates."""
        with self._lock:
            return list(map(operator.sub, map(_version, self._weights), self._counted))

    def count(self, indices: Sequence[int]) -> None:
        """Count one write by an update for the tables at ``indices`` in ``weights``."""
        with self._lock:
            increment_version([self._weights[index] for index in indices])
            for index in indices:
                self._counted[index] += 1

    def check(self, before: Sequence[int]) -> None:
        """Raise if anything but an update has written to a table since ``foreign_writes`` returned
        ``before``.

        Raises:
            ValueError: a table was written to; the message names it.
        """
        counts = self.foreign_writes()
        if counts == before:
            return
        for name, now, then in zip(self._names, counts, before, strict=True):
            if now != then:
                raise ValueError(in_place_change_message(name))

    def check_parameters(self, weights: Sequence[Tensor]) -> None:
        """Raise if a module's parameter is not the one changed by updates.

        Raises:
            ValueError: a parameter was replaced; the message names it.
        """
        if all(map(operator.is_, weights, self._weights)):
            return
        number = next(n for n, weight in enumerate(weights) if weight is not self._weights[n])
        raise ValueError(
            f"the parameter of {self._names[number]} was replaced by another one after the module was fused; "
            "its optimizer would go on to train the old one. Copy the new values into the parameter that is "
            "there (parameter.data.copy_(values), or load_state_dict without assign=True)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has other parameters, whose versions restart; a lock cannot be copied.
        return WriteCounter, (self._names, self._weights)


class LookedUp(NamedTuple):
    """Lookup output gradient, and the lookup. ``lookups.tables`` are rectangle numbers."""

    grad: Tensor
    lookups: tbe.Lookups


class TableGradient(NamedTuple):
    """Gradient for a rank's tables.

    The lookup output gradient, except for rectangles in ``rows``, where gradients are already summed by
    row.
    """

    looked_up: LookedUp | None
    rows: Mapping[int, RowGradients]
    pins: Sequence[object] = ()
    """Pins keeping the slots valid; see ``tables.index.Resolved``."""


class Touched(NamedTuple):
    """A rectangle's touched rows, as input to whole-row statistics.

    ``rows`` is int64 [U], ``grad`` and ``weight`` are fp32 [U, D], ``slots`` the optimizer state. Weight and
    state are empty if the statistics need only the gradient (``needs_gradient_only``).
    """

    rows: Tensor
    grad: Tensor
    weight: Tensor
    slots: list[Tensor]


class RowPeers(Protocol):
    """Ranks with other columns in the same rows, for tables with a common rule.

    All methods are collective.
    """

    def mean_squares(self, squares: Tensor, counts: Sequence[int], row_dims: Sequence[int]) -> Tensor:
        """Return mean squared gradients by whole row; see ``distributed.row_stats``.

        Args:
            squares: sum of squares over local columns per row, fp32 [total rows].
            counts: row count per rectangle.
            row_dims: columns of a whole row, per rectangle.
        """

    def row_stats(self, touched: Sequence[Touched], optimizer: int, hyper: Sequence[Hyper]) -> list[Tensor]:
        """Return the ``row_stats`` argument for ``tbe_update`` per rectangle.

        Args:
            touched: touched rows per rectangle.
            optimizer: optimizer code.
            hyper: hyperparameters per rectangle.
        """


FindPeers = Callable[[UpdateRule, Sequence[int]], "tuple[frozenset[int], RowPeers | None]"]
"""Given a rule and its table numbers, returns the tables with rows on several ranks, and those ranks."""


class _Group:
    """Tables and rectangles with a common update rule.

    Rows in ``whole`` rectangles are complete on this rank; rows in ``split`` have columns on other ranks.
    """

    def __init__(self, rule: UpdateRule, tables: list[int], peers: RowPeers | None) -> None:
        self.rule, self.tables, self.peers = rule, tables, peers
        self.whole: list[int] = []
        self.split: list[int] = []
        self.state: list[Tensor] = []
        """Optimizer state for rectangles in ``whole``, cached because every update needs it."""
        self.origins: list[int] = []
        """First row and column per rectangle in ``whole``."""
        self.weights: list[Tensor] | None = None
        """Row memory for rectangles in ``whole``; None if it may change, as in packed parameters."""
        self.members: list[tuple[int, FusedTable, dict[str, Any]]] = []
        """Number, table and state per table, listed once because every step iterates over them."""


class _RowUpdate(NamedTuple):
    """Update for the touched rows in a rectangle, with statistics over whole rows."""

    rectangle: int
    rows: RowGradients
    hyper: Tensor
    sums: Tensor  # row_stats argument for tbe_update


class _RunUpdate(NamedTuple):
    """Arguments to ``tbe_update`` for rows with columns on other ranks.

    ``runs`` saves the second sort, and ``mean_squares`` covers whole rows; see ``naive.tbe_update``.
    """

    runs: Tensor
    mean_squares: Tensor


class Prepared(NamedTuple):
    """Prepared update for a group: everything except the gradient."""

    group: _Group
    steps: dict[int, list[int]]
    """Tables to update, by their update number."""
    split: list[_RowUpdate] | _RunUpdate


class PreparedUpdates(NamedTuple):
    """Prepared updates for all groups, and hashed table IDs to admit and evict."""

    groups: list[Prepared]
    admission_eviction: TableChanges | None


class TableUpdates:
    """Updates the fused tables looked up together on a rank.

    Tables without a rule get ordinary gradients. Every table has an update count: tables frozen
    for a while, or loaded from different checkpoints, continue from that count.

    Args:
        held: the tables.
        fused: tables with a rule, by table number, including tables without rows on this rank.
        writes: counts writes by updates.
        peers: finds the tables split by columns; None if all rows are whole on this rank.
        admission_eviction: admits and evicts hashed table IDs at every update; None without such tables.
    """

    def __init__(
        self,
        held: LocalShards,
        fused: Mapping[int, FusedTable],
        *,
        writes: WriteCounter,
        peers: FindPeers | None = None,
        admission_eviction: AdmissionEviction | None = None,
    ) -> None:
        self.admission_eviction = admission_eviction
        self._held, self._fused, self._writes = held, dict(fused), writes
        self._rectangles = held.rectangles
        # Parameter index in ``writes`` per fused table. Both ``TableUpdates`` in a module share ``writes``.
        self._write_index = {number: writes.index_of(table.weight) for number, table in fused.items()}
        self._groups: list[_Group] = []
        for rule in distinct_rules([table.rule for table in fused.values()]):
            tables = [number for number, table in fused.items() if table.rule is rule]
            split, row_peers = (frozenset[int](), None) if peers is None else peers(rule, tables)
            group = _Group(rule, tables, row_peers)
            for number, rectangle in enumerate(self._rectangles):
                if rectangle.table in tables:
                    (group.split if rectangle.table in split else group.whole).append(number)
            group.state = slot_major([held.state[i] for i in group.whole])
            if not held.is_packed:
                group.weights = [held.weights[i] for i in group.whole]
            group.origins = [start for i in group.whole for start in self._rectangles[i].origin]
            group.members = [(number, fused[number], fused[number].state) for number in tables]
            self._groups.append(group)
        self._ordinary = [i for i, rectangle in enumerate(self._rectangles) if rectangle.table not in fused]
        deferred = [group for group in self._groups if group.rule.deferred]
        # Only 16-bit rows use stochastic rounding, which draws by whole-table row.
        self._row_keys = {
            i: keys
            for i, index in held.indexes.items()
            if (keys := getattr(index, "slot_keys", None)) is not None
            and held.weights[i].dtype is not torch.float32
        }
        self._deferred = [i for group in deferred for i in group.whole + group.split]
        self._gradient_buffers = {
            i: gradient_buffer
            for i, gradient_buffer in held.gradient_buffers().items()
            if self._rectangles[i].table in fused
        }

    def prepare(self, gradient: TableGradient, *, deferred: bool) -> PreparedUpdates:
        """Prepare an update: do everything that can fail, and change nothing.

        Args:
            gradient: gradient for all tables.
            deferred: whether to update tables for ``optimizer.step()``, or for the backward pass.

        Collective over the ranks with other columns in the same rows.

        Raises:
            ValueError: a hyperparameter is out of range, or a hashed table has no room.
        """
        groups = [group for group in self._groups if group.rule.deferred == deferred]
        for group in groups:
            # Schedulers change the param_group between steps.
            group.rule.refresh()
        prepared = [self._prepare_group(group, gradient) for group in groups]
        if self.admission_eviction is None:
            return PreparedUpdates(prepared, None)
        # Only tables updated now admit and evict; frozen tables keep their rows.
        steps = {t: step for update in prepared for step, members in update.steps.items() for t in members}
        hashed = {table: step for table, step in steps.items() if table in self.admission_eviction.live}
        decision = self.admission_eviction.prepare(gradient.pins, hashed) if hashed else None
        return PreparedUpdates(prepared, decision)

    def apply(self, prepared: PreparedUpdates, gradient: TableGradient) -> None:
        """Apply a prepared update: change rows and optimizer state, and increment the step numbers."""
        decision = prepared.admission_eviction
        if self.admission_eviction is not None and decision is not None:
            self.admission_eviction.apply(decision)
        for update in prepared.groups:
            group = update.group
            for step, members in update.steps.items():
                rectangles = group.whole
                if len(members) < len(group.tables):
                    rectangles = [i for i in rectangles if self._rectangles[i].table in members]
                self._update_whole(rectangles, gradient, group, step)
            if group.split:
                self._update_split(
                    update,
                    gradient,
                    {table for members in update.steps.values() for table in members},
                )
            for step, members in update.steps.items():
                for table in members:
                    self._fused[table].state["step"] = step
                self._writes.count([self._write_index[table] for table in members])
        if self.admission_eviction is not None and decision is not None:
            self.admission_eviction.finish(decision)

    def ordinary_gradients(self, gradient: TableGradient) -> list[Tensor | None]:
        """Return dense gradients by parameter for autograd; None for fused tables."""
        if not self._ordinary:
            return [None] * len(self._held.parameters)
        return self._held.gradients(self._dense_gradients(gradient))

    def collect(self, gradient: TableGradient) -> bool:
        """Add deferred tables' gradients to ``parameter.grad``.

        Returns whether all accumulated gradients are finite.
        """
        if not self._deferred:
            return True
        parts = self._row_gradients(gradient, self._trained(self._deferred))
        finite = True
        for i, gradient_buffer in self._gradient_buffers.items():
            if i in parts:
                finite &= gradient_buffer.collect(parts.pop(i), gradient.pins)
        return self._held.collect(parts) and finite

    def collected(self) -> TableGradient:
        """Return gradients added by ``collect``, for all deferred tables.

        Raises:
            ValueError: a collected gradient was replaced by a dense gradient.
        """
        deferred = {self._rectangles[i].table for i in self._deferred}
        rows = self._held.collected({t: self._fused[t].label for t in deferred})
        pins: list[object] = []
        for i, gradient_buffer in self._gradient_buffers.items():
            if (gradient := gradient_buffer.collected()) is not None:
                rows[i] = gradient
                pins += [pin for pin in gradient_buffer.pins if pin not in pins]
        return TableGradient(None, rows, pins)

    def _prepare_group(self, group: _Group, gradient: TableGradient) -> Prepared:
        """Prepare an update for a rule's tables, without frozen tables."""
        members = [member for member in group.members if member[1].weight.requires_grad]
        if group.rule.deferred:
            members = [member for member in members if not self._lacks_gradient(member[1])]
        counts = {state["step"] for _, _, state in members}
        steps = {
            count + 1: [number for number, _, state in members if state["step"] == count]
            for count in sorted(counts)
        }
        return Prepared(
            group, steps, [] if group.peers is None else self._prepare_split(group, group.peers, gradient)
        )

    def _lacks_gradient(self, table: FusedTable) -> bool:
        """Return whether a deferred table lacks a gradient from the backward pass."""
        # A rank without rows counts the step along with the other ranks.
        return table.weight.numel() > 0 and table.weight.grad is None

    def _update_whole(self, rectangles: list[int], gradient: TableGradient, group: _Group, step: int) -> None:
        """Update rectangles with whole rows on this rank, with one kernel call per gradient kind."""
        rule, hyper = group.rule, group.rule.hyper_at(step)
        together = [i for i in rectangles if i not in gradient.rows] if gradient.rows else rectangles
        # The common case, with the group's cached state and origins.
        if together and together is group.whole and gradient.looked_up is not None:
            grad, lookups = gradient.looked_up
            tbe.update(
                grad,
                *(lookups if len(together) == len(self._rectangles) else lookups.of_tables(together)),
                group.weights or [self._held.weights[i] for i in together],
                group.state,
                rule.code,
                hyper,
                None,
                group.origins,
                *self._trailing_arguments(together),
            )
            return
        if together and gradient.looked_up is not None:
            self._run_kernel(gradient.looked_up, together, rule, hyper)
        if summed := [i for i in rectangles if i in gradient.rows]:
            parts = [gradient.rows[i] for i in summed]
            lookups = rows_as_lookups(
                [part.rows for part in parts], [part.grads.shape[1] for part in parts], summed
            )
            grads = [part.grads.reshape(-1) for part in parts]
            self._run_kernel(
                LookedUp(grads[0] if len(grads) == 1 else torch.cat(grads), lookups), summed, rule, hyper
            )

    def _run_kernel(
        self,
        looked_up: LookedUp,
        rectangles: Sequence[int],
        rule: UpdateRule,
        hyper: Tensor,
        *,
        sums: Tensor | None = None,
        runs: tuple[Tensor, Tensor] | tuple[()] = (),
    ) -> None:
        """Call the update kernel, which changes every touched row in the rectangles once.

        Args:
            looked_up: gradient and lookups.
            rectangles: rectangles to update.
            rule: update rule.
            hyper: hyperparameters.
            sums: whole-row statistics per ID, or None.
            runs: ``runs`` and ``mean_squares``, or empty.
        """
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
            *self._trailing_arguments(rectangles, runs),
        )

    def _trailing_arguments(
        self, rectangles: Sequence[int], runs: tuple[Tensor, Tensor] | tuple[()] = ()
    ) -> Sequence[object]:
        """Return the last kernel arguments, as far as these rectangles need them."""
        if not self._row_keys:
            return runs
        nothing = torch.empty(0, dtype=torch.int64)
        return *(runs or (None, None)), [self._row_keys.get(i, nothing) for i in rectangles]

    def _update_split(self, prepared: Prepared, gradient: TableGradient, tables: set[int]) -> None:
        """Update the group's rectangles whose rows have columns on other ranks."""
        group, split = prepared.group, prepared.split
        if isinstance(split, _RunUpdate):
            assert gradient.looked_up is not None
            for step, members in prepared.steps.items():
                rectangles = [i for i in group.split if self._rectangles[i].table in members]
                assert rectangles == group.split, "runs are of all split rectangles at once"
                self._run_kernel(
                    gradient.looked_up, rectangles, group.rule, group.rule.hyper_at(step), runs=split
                )
            return
        for i, rows, hyper, sums in split:
            if self._rectangles[i].table in tables:
                lookups = rows_as_lookups([rows.rows], [rows.grads.shape[1]], [i])
                self._run_kernel(LookedUp(rows.grads.reshape(-1), lookups), [i], group.rule, hyper, sums=sums)

    def _prepare_split(
        self, group: _Group, peers: RowPeers, gradient: TableGradient
    ) -> list[_RowUpdate] | _RunUpdate:
        """Prepare updates for rectangles whose rows have columns on other ranks. Collective.

        One kernel call updates them all if the statistics need only the gradient. The ranks exchange the
        same data either way.
        """
        rule, split, looked_up = group.rule, group.split, gradient.looked_up
        dims = [self._fused[self._rectangles[i].table].dim for i in split]
        steps = [self._fused[self._rectangles[i].table].state["step"] + 1 for i in split]
        hypers = [rule.hyper(step, dim) for step, dim in zip(steps, dims, strict=True)]
        values = [Hyper.from_tensor(hyper) for hyper in hypers]
        at_once = all(needs_gradient_only(rule.code, h) for h in values) and len(set(steps)) == 1
        at_once &= self._trained(split) == split and not gradient.rows.keys() & split
        if not split or looked_up is None or not at_once:
            return self._prepare_row_updates(group, peers, gradient, hypers)
        lookups = looked_up.lookups.of_tables(split)
        # The kernel sorts the rows once here; ``runs`` saves the second sort in the update.
        squares, counts, runs = tbe.row_squares(looked_up.grad, lookups, self._heights(split))
        return _RunUpdate(runs, peers.mean_squares(squares, counts.tolist(), dims))

    def _prepare_row_updates(
        self, group: _Group, peers: RowPeers, gradient: TableGradient, hypers: Sequence[Tensor]
    ) -> list[_RowUpdate]:
        """Prepare an update per split rectangle, with row statistics over all ranks. Collective.

        Args:
            group: the group.
            peers: ranks with other columns in the same rows.
            gradient: gradient for this rank's tables.
            hypers: hyperparameters per rectangle in ``group.split``.
        """
        weights, rule = self._held.weights, group.rule
        values = [Hyper.from_tensor(hyper) for hyper in hypers]
        parts = self._row_gradients(gradient, group.split)
        touched = [
            self._touched_rows(i, parts.get(i) or _no_rows(weights[i]), not needs_gradient_only(rule.code, h))
            for i, h in zip(group.split, values, strict=True)
        ]
        stats = peers.row_stats(touched, rule.code, values)
        return [
            _RowUpdate(i, RowGradients(part.rows, part.grad), hyper, sums)
            for i, part, hyper, sums in zip(group.split, touched, hypers, stats, strict=True)
        ]

    def _touched_rows(self, i: int, part: RowGradients, with_weights: bool) -> Touched:
        """Return touched rows for rectangle ``i``, with weights and state if needed."""
        rows, grad = part
        if not with_weights:
            return Touched(rows, grad, grad.new_empty(0), [])
        weight = self._held.weights[i].detach()
        return Touched(rows, grad, weight[rows].float(), [slot[rows] for slot in self._held.state[i]])

    def _row_gradients(self, gradient: TableGradient, rectangles: Sequence[int]) -> dict[int, RowGradients]:
        """Return the gradients by rectangle, summed by touched row."""
        by_rectangle = {i: gradient.rows[i] for i in rectangles if i in gradient.rows}
        if gradient.looked_up is not None and (remaining := [i for i in rectangles if i not in by_rectangle]):
            grad, lookups = gradient.looked_up
            pairs = tbe.sparse_grad(grad, lookups.of_tables(remaining), self._heights(remaining))
            by_rectangle.update({i: RowGradients(*pair) for i, pair in zip(remaining, pairs, strict=True)})
        return by_rectangle

    def _dense_gradients(self, gradient: TableGradient) -> dict[int, Tensor]:
        """Return dense gradients for ordinary (not fused) tables, by rectangle."""
        weights = self._held.weights
        trained = self._trained(self._ordinary)
        by_rectangle = {
            i: torch.zeros_like(weights[i]).index_copy_(0, rows.rows, rows.grads.to(weights[i].dtype))
            for i in trained
            if (rows := gradient.rows.get(i)) is not None
        }
        if gradient.looked_up is not None and (remaining := [i for i in trained if i not in by_rectangle]):
            grad, lookups = gradient.looked_up
            dense = tbe.dense_grad(grad, [weights[i] for i in remaining], lookups.of_tables(remaining))
            by_rectangle.update(zip(remaining, dense, strict=True))
        return by_rectangle

    def _heights(self, rectangles: Sequence[int]) -> list[int]:
        """Return in-memory row counts by rectangle."""
        weights = self._held.weights
        return [weights[i].shape[0] for i in rectangles]

    def _trained(self, rectangles: Sequence[int]) -> list[int]:
        """Return the rectangles in tables not frozen now."""
        return [i for i in rectangles if self._held.is_trained(i)]


def _no_rows(weight: Tensor) -> RowGradients:
    """Return an empty gradient."""
    return RowGradients(
        torch.empty(0, dtype=torch.int64, device=weight.device),
        torch.empty(0, weight.shape[1], device=weight.device),
    )


# Shape legend: U touched rows, D width.


def rows_as_lookups(rows: Sequence[Tensor], dims: Sequence[int], tables: Sequence[int]) -> tbe.Lookups:
    """Return lookups reading every row once, without pooling: the lookup gradient is the row gradient.

    The matching output gradient has all row gradients ``[U, D]``, flattened and concatenated.

    Args:
        rows: touched rows per table, int64 [U]. Gradients for repeated rows are added.
        dims: width per table.
        tables: table indices.
    """
    counts = torch.tensor([0, *(len(rows_U) for rows_U in rows)], dtype=torch.int64)
    num_tables = len(tables)
    return tbe.Lookups(
        values=torch.cat(list(rows)) if num_tables > 1 else rows[0],
        offsets=counts.cumsum(0).to(rows[0].device),
        per_sample_weights=None,
        segments=None,
        num_keys=num_tables,
        keys=list(range(num_tables)),
        tables=list(tables),
        pooling=[NONE] * num_tables,
        flat=True,
        dims=list(dims),
    )


def update_rows(
    weight: Tensor,
    state: Sequence[Tensor],
    rows: Tensor,
    grad: Tensor,
    *,
    optimizer: int,
    hyper: Tensor,
) -> None:
    """Apply an optimizer step to distinct rows in a whole table, in place.

    Args:
        weight: the table, [rows, D].
        state: optimizer state, one tensor per slot.
        rows: distinct rows, int64 [U].
        grad: gradient per row, fp32 [U, D].
        optimizer: optimizer code.
        hyper: hyperparameters.
    """
    lookups = rows_as_lookups([rows], [grad.shape[1]], [0])
    tbe.update(grad.reshape(-1), *lookups, [weight], list(state), optimizer, hyper, None, [])


def slot_major(state: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Reorder optimizer state from tables to slots: first slot 0 for all tables, then slot 1."""
    return [slot for slots in zip(*state, strict=True) for slot in slots]
