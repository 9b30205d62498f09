"""Table updates on a rank, for unsharded and sharded tables: from the gradient of a lookup to changed rows.

[Note: what makes an update deterministic]

The same gradient gives the same bits, for any number of threads and any message order:

1. The kernels sort the rows looked up by a batch, add the gradients of the same row in batch order, and
   change every touched row once (``csrc/tbe/fused_update.cpp``). Threads split work by rows, never within
   a row.
2. Partial sums from several ranks are added in rank order (``distributed/row_stats.py``,
   ``distributed/output_dist.py``).
3. Stochastic rounding draws from (seed, step, row and column in the whole table), so a rectangle rounds
   as the whole table would. "step" is the number of the update, counted per table.
4. An update happens for all tables or for none: ``prepare`` does everything that can fail, including
   collectives and hyperparameter checks, and ``apply`` only writes.

[Note: who may change rows, and when]

Between a forward pass and its backward pass, only ``TableUpdates.apply`` may write to a table. (The gradient
of a lookup does not depend on the row values, so updates from other batches do no harm.) ``WriteCounter``
detects all other writes, and the backward pass then raises an error. Between steps any code may write to a
table in place, such as ``load_state_dict``, a checkpoint, or resharding. A pipeline that has looked up rows
before such a write looks them up again, because ``ShardedTables.num_changes`` has changed. No code may
replace a parameter's memory, because kernels, optimizer state and snapshots hold it.
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
    """Detection of writes to fused tables that table updates did not make, such as ``load_state_dict``.

    torch counts all in-place writes to a tensor (``_version``), and this class counts the writes by updates.
    The difference is the number of other writes. If it changes between forward and backward pass, the
    gradient is no longer valid. Writes by updates from other batches do no harm.

    Args:
        names: table names for messages.
        weights: table parameters.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        # Fixed: the module's parameters must stay these objects, see ``check_parameters``.
        self._names, self._weights = list(names), list(weights)
        # Number of writes by updates, per table.
        self._counted = [0] * len(self._weights)
        # A write raises two counts. The lock keeps other threads from reading them in between.
        self._lock = threading.Lock()

    def index_of(self, weight: Tensor) -> int:
        """Return the position of a parameter in ``weights``, by identity. Needed for ``count``."""
        return next(index for index, parameter in enumerate(self._weights) if parameter is weight)

    def foreign_writes(self) -> list[int]:
        """Return the number of in-place writes that were not made by updates, per table."""
        with self._lock:
            return list(map(operator.sub, map(_version, self._weights), self._counted))

    def count(self, indices: Sequence[int]) -> None:
        """Count a write by an update, for the tables at these positions in ``weights``."""
        # Kernels write without torch's knowledge, so raise torch's count here, too.
        with self._lock:
            increment_version([self._weights[index] for index in indices])
            for index in indices:
                self._counted[index] += 1

    def check(self, before: Sequence[int]) -> None:
        """Check that only updates have written to the tables since an earlier call to ``foreign_writes``.

        Args:
            before: result of the earlier call.

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
        """Check that the parameters in a module are still the objects that updates change.

        Args:
            weights: the module's present parameters, in the order of the constructor argument.

        Raises:
            ValueError: a parameter was replaced; the message names it.
        """
        # Compare by identity in C: every forward pass of a fused module does this.
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
    """A lookup in several rectangles, and the gradient of its output."""

    grad: Tensor
    """Gradient of the lookup's output."""
    lookups: tbe.Lookups
    """The lookup. ``lookups.tables`` are rectangle numbers."""


class TableGradient(NamedTuple):
    """Gradient for the tables on a rank, in one of two forms per rectangle."""

    looked_up: LookedUp | None
    """Gradient of a lookup's output, for all rectangles that are not in ``rows``; None: no such rectangle."""
    rows: Mapping[int, RowGradients]
    """Gradients already summed by row, by rectangle number."""
    pins: Sequence[object] = ()
    """Pins that keep the slots valid until the update; see ``tables.index.Resolved``."""


class TouchedRows(NamedTuple):
    """The rows of a rectangle that an update changes (U rows), as input to statistics over whole rows.

    Weight and state are empty if the statistics need only the gradient (``needs_gradient_only``).
    """

    rows: Tensor
    """Row positions in the rectangle, int64 [U]."""
    grad: Tensor
    """Gradient per row, fp32 [U, D]."""
    weight: Tensor
    """Present row values, fp32 [U, D]."""
    slots: list[Tensor]
    """Present optimizer state, one tensor with U rows per state slot."""


class RowPeers(Protocol):
    """The ranks that hold other columns in the same rows, and the statistics over whole rows.

    Some optimizers need a statistic over a whole row, such as the mean squared gradient. If the row is split
    by columns, several ranks must compute it together. One object serves all tables with the same update
    rule. All methods are collective.
    """

    def mean_squares(self, squares: Tensor, counts: Sequence[int], row_dims: Sequence[int]) -> Tensor:
        """Return the mean squared gradient of every whole row, fp32; see ``distributed.row_stats``.

        Args:
            squares: squared gradients per row, summed over the columns on this rank, fp32 [total rows].
            counts: number of rows per rectangle, in the order of ``squares``.
            row_dims: number of columns of a whole row, per rectangle.
        """

    def row_stats(
        self, touched: Sequence[TouchedRows], optimizer: int, hyper: Sequence[Hyper]
    ) -> list[Tensor]:
        """Compute the statistics over whole rows which the update formula needs.

        Args:
            touched: touched rows per rectangle.
            optimizer: number of the optimizer in the kernels.
            hyper: hyperparameters per rectangle.

        Returns:
            A tensor per rectangle, in the form of the argument ``row_stats`` to the kernel ``tbe_update``.
        """


FindPeers = Callable[[UpdateRule, Sequence[int]], "tuple[frozenset[int], RowPeers | None]"]
"""Function from an update rule and the numbers of its tables to two results: the numbers of the tables split
by columns, and the ranks with the other columns (None if no table is split)."""


class _Group:
    """The tables with a common update rule, and their rectangles on this rank. Filled by ``TableUpdates``.

    A rectangle is a row interval times a column interval of a table. The list ``split`` has the rectangles of
    tables split by columns, and ``whole`` has the other rectangles.

    Args:
        peers: the ranks with the other columns of the rows in ``split``. None: no table in the group is split
            by columns.
    """

    def __init__(self, rule: UpdateRule, tables: list[int], peers: RowPeers | None) -> None:
        self.rule, self.tables, self.peers = rule, tables, peers
        self.whole: list[int] = []
        """Numbers of the rectangles in tables that are not split by columns."""
        self.split: list[int] = []
        """Numbers of the rectangles in tables split by columns, with columns on other ranks."""
        # The fields below do not change between updates, and are cached because every update reads them.
        self.state: list[Tensor] = []
        """Optimizer state of the rectangles in ``whole``, ordered as by ``slot_major``."""
        self.origins: list[int] = []
        """First row and first column of every rectangle in ``whole``."""
        self.weights: list[Tensor] | None = None
        """Row memory of the rectangles in ``whole``; None if it may change, as in packed parameters."""
        self.members: list[tuple[int, FusedTable, dict[str, Any]]] = []
        """Table number, table, and optimizer state of every table."""


class _RectangleUpdate(NamedTuple):
    """Prepared update of a rectangle split by columns."""

    rectangle: int
    rows: RowGradients
    hyper: Tensor
    """Hyperparameters, float64."""
    sums: Tensor
    """Argument ``row_stats`` of the kernel ``tbe_update``."""


class _SplitUpdate(NamedTuple):
    """Prepared update of all rectangles in a group that are split by columns, for a single kernel call."""

    runs: Tensor
    """The sorted rows. Saves the kernel another sort; see ``naive.tbe_update``."""
    mean_squares: Tensor
    """Mean squared gradient of every whole row, fp32."""


class PreparedGroup(NamedTuple):
    """Prepared update of a group: everything that the kernel calls need in addition to the gradient."""

    group: _Group
    steps: dict[int, list[int]]
    """Numbers of the tables to update, keyed by update number.

    Every table counts its updates, so this update may have different numbers in different tables.
    """
    split: list[_RectangleUpdate] | _SplitUpdate
    """Updates of the rectangles split by columns."""


class PreparedUpdates(NamedTuple):
    """Prepared update of all tables: the result of ``TableUpdates.prepare``."""

    groups: list[PreparedGroup]
    admission_eviction: TableChanges | None
    """IDs to admit to hashed tables and rows to evict from them; None: no hashed table is updated."""


class TableUpdates:
    """Optimizer updates of a module's fused tables, on this rank.

    A fused table has an update rule (an optimizer), and kernels update it directly from the gradient of a
    lookup. Other tables get ordinary gradients. The number of updates is counted per table, so tables that
    were frozen for a while, or loaded from different checkpoints, continue with their counts.

    Args:
        shards: all tables on this rank.
        fused: fused tables by table number, including tables without rows on this rank.
        writes: counter for writes by updates.
        peers: finds the tables split by columns, and the ranks over which they are split. None: no table is
            split by columns.
        admission_eviction: admits IDs to hashed tables and evicts rows at every update; None without such
            tables.
    """

    def __init__(
        self,
        shards: LocalShards,
        fused: Mapping[int, FusedTable],
        *,
        writes: WriteCounter,
        peers: FindPeers | None = None,
        admission_eviction: AdmissionEviction | None = None,
    ) -> None:
        # The module recounts through it after rows were loaded.
        self.admission_eviction = admission_eviction
        # Shared with the module: the tables' step counts in ``fused`` change at every update.
        self._shards, self._fused, self._writes = shards, dict(fused), writes
        self._rectangles = shards.rectangles
        # Position of each fused table's parameter in ``writes``, which several ``TableUpdates`` may share.
        self._write_index = {number: writes.index_of(table.weight) for number, table in fused.items()}
        # Fixed for this object's life. Resharding creates a new ``TableUpdates``.
        self._groups: list[_Group] = []
        for rule in distinct_rules([table.rule for table in fused.values()]):
            tables = [number for number, table in fused.items() if table.rule is rule]
            split, row_peers = (frozenset[int](), None) if peers is None else peers(rule, tables)
            group = _Group(rule, tables, row_peers)
            for number, rectangle in enumerate(self._rectangles):
                if rectangle.table in tables:
                    (group.split if rectangle.table in split else group.whole).append(number)
            group.state = slot_major([shards.state[i] for i in group.whole])
            if not shards.is_packed:
                group.weights = [shards.weights[i] for i in group.whole]
            group.origins = [start for i in group.whole for start in self._rectangles[i].origin]
            group.members = [(number, fused[number], fused[number].state) for number in tables]
            self._groups.append(group)
        # Rectangles in tables without a rule, which get dense gradients.
        self._ordinary = [i for i, rectangle in enumerate(self._rectangles) if rectangle.table not in fused]
        deferred = [group for group in self._groups if group.rule.deferred]
        # Keys per slot, by rectangle. Only 16-bit rows need them: stochastic rounding draws by row number in
        # the whole table, and slots are not row numbers.
        self._row_keys = {
            i: keys
            for i, index in shards.indexes.items()
            if (keys := getattr(index, "slot_keys", None)) is not None
            and shards.weights[i].dtype is not torch.float32
        }
        # The backward pass only collects gradients for these rectangles.
        self._deferred = [i for group in deferred for i in group.whole + group.split]
        # External rows have a placeholder parameter, whose ``grad`` cannot hold their gradients.
        self._gradient_buffers = {
            i: gradient_buffer
            for i, gradient_buffer in shards.gradient_buffers().items()
            if self._rectangles[i].table in fused
        }

    def prepare(self, gradient: TableGradient, *, deferred: bool) -> PreparedUpdates:
        """Prepare an update: do everything that can fail, without changing a table.

        Collective over the ranks holding other columns in the same rows.

        Args:
            gradient: gradient for all tables.
            deferred: which tables to update. True: tables with a deferred rule, in ``optimizer.step()``.
                False: all other fused tables, in the backward pass.

        Returns:
            The prepared update, to be passed to ``apply`` with the same gradient.

        Raises:
            ValueError: a hyperparameter is out of range, or a hashed table has no room.
        """
        groups = [group for group in self._groups if group.rule.deferred == deferred]
        for group in groups:
            # A learning rate scheduler may have changed the param_group since the last step.
            group.rule.refresh()
        # Collective for groups with split tables, so all ranks treat the groups in the same order.
        prepared = [self._prepare_group(group, gradient) for group in groups]
        if self.admission_eviction is None:
            return PreparedUpdates(prepared, None)
        # Only tables updated now admit and evict. Frozen tables keep their rows.
        steps = {t: step for update in prepared for step, members in update.steps.items() for t in members}
        hashed = {table: step for table, step in steps.items() if table in self.admission_eviction.live}
        decision = self.admission_eviction.prepare(gradient.pins, hashed) if hashed else None
        return PreparedUpdates(prepared, decision)

    def apply(self, prepared: PreparedUpdates, gradient: TableGradient) -> None:
        """Apply a prepared update: change rows and optimizer state, and increment the tables' update counts.

        Args:
            prepared: result of ``prepare``.
            gradient: the gradient that ``prepare`` was called with.
        """
        decision = prepared.admission_eviction
        # ``finish`` below undoes the update in rows of refused IDs, so it must follow the kernel calls.
        if self.admission_eviction is not None and decision is not None:
            self.admission_eviction.apply(decision)
        for update in prepared.groups:
            group = update.group
            # Usually a single step number: all tables in the group have had equally many updates.
            for step, members in update.steps.items():
                # The same list object in the common case, by which _update_whole recognizes that cached
                # fields fit.
                rectangles = group.whole
                # Leave out frozen tables, and tables with other step numbers.
                if len(members) < len(group.tables):
                    rectangles = [i for i in rectangles if self._rectangles[i].table in members]
                self._update_whole(rectangles, gradient, group, step)
            if group.split:
                self._update_split(
                    update,
                    gradient,
                    {table for members in update.steps.values() for table in members},
                )
            # Only after the kernels, so a failed call does not count as an update.
            for step, members in update.steps.items():
                for table in members:
                    self._fused[table].state["step"] = step
                self._writes.count([self._write_index[table] for table in members])
        if self.admission_eviction is not None and decision is not None:
            self.admission_eviction.finish(decision)

    def ordinary_gradients(self, gradient: TableGradient) -> list[Tensor | None]:
        """Return a dense gradient per parameter, for autograd. None for fused tables' parameters."""
        if not self._ordinary:
            return [None] * len(self._shards.parameters)
        return self._shards.gradients(self._dense_gradients(gradient))

    def collect(self, gradient: TableGradient) -> bool:
        """Add gradients to ``parameter.grad``, for the tables updated by ``optimizer.step()``.

        Args:
            gradient: gradient for all tables.

        Returns:
            Whether all accumulated gradients are finite.
        """
        if not self._deferred:
            return True
        parts = self._row_gradients(gradient, self._trained(self._deferred))
        # Buffers take their rectangles first; ``parts`` then holds gradients for ordinary parameters only.
        finite = True
        for i, gradient_buffer in self._gradient_buffers.items():
            if i in parts:
                finite &= gradient_buffer.collect(parts.pop(i), gradient.pins)
        return self._shards.collect(parts) and finite

    def collected(self) -> TableGradient:
        """Return the gradients accumulated by ``collect``, for the tables updated by ``optimizer.step()``.

        Raises:
            ValueError: a collected gradient was replaced by a dense gradient.
        """
        deferred = {self._rectangles[i].table for i in self._deferred}
        rows = self._shards.collected({t: self._fused[t].label for t in deferred})
        pins: list[object] = []
        for i, gradient_buffer in self._gradient_buffers.items():
            if (gradient := gradient_buffer.collected()) is not None:
                rows[i] = gradient
                # Rectangles may share pins. List a pin once.
                pins += [pin for pin in gradient_buffer.pins if pin not in pins]
        # Without a looked-up gradient: all collected gradients are summed by row already.
        return TableGradient(None, rows, pins)

    def _prepare_group(self, group: _Group, gradient: TableGradient) -> PreparedGroup:
        """Prepare the update of the tables with a common rule. Leaves out frozen tables.

        With a deferred rule, also leaves out tables for which no gradient was collected.
        """
        # ``requires_grad`` may change between steps, so test it every time.
        members = [member for member in group.members if member[1].weight.requires_grad]
        if group.rule.deferred:
            # A rank without rows never has a gradient, but must count the step like the other ranks.
            members = [m for m in members if m[1].weight.grad is not None or not m[1].weight.numel()]
        # Tables in a group may have different counts: some were frozen, or loaded from other checkpoints.
        counts = {state["step"] for _, _, state in members}
        steps = {
            count + 1: [number for number, _, state in members if state["step"] == count]
            for count in sorted(counts)
        }
        return PreparedGroup(
            group, steps, [] if group.peers is None else self._prepare_split(group, group.peers, gradient)
        )

    def _update_whole(self, rectangles: list[int], gradient: TableGradient, group: _Group, step: int) -> None:
        """Update rectangles that are not split by columns.

        Makes a kernel call for all gradients from a lookup, and another for all gradients already summed by
        row.
        """
        rule, hyper = group.rule, group.rule.hyper_at(step)
        together = [i for i in rectangles if i not in gradient.rows] if gradient.rows else rectangles
        # The common case: all tables in the group get a lookup gradient, so its cached fields fit.
        if together and together is group.whole and gradient.looked_up is not None:
            grad, lookups = gradient.looked_up
            tbe.update(
                grad,
                *(lookups if len(together) == len(self._rectangles) else lookups.of_tables(together)),
                group.weights or [self._shards.weights[i] for i in together],
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
        # Gradients already summed by row. Present them to the kernel as a lookup that reads each row once.
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
        """Call the update kernel, which changes every touched row in some rectangles once.

        Args:
            sums: statistics over whole rows (``_RectangleUpdate.sums``), if the rows are split by columns.
            runs: the fields of a ``_SplitUpdate``, instead of ``sums``; else empty.
        """
        weights, grad, lookups = self._shards.weights, *looked_up
        tbe.update(
            grad,
            *lookups.of_tables(rectangles),
            [weights[i] for i in rectangles],
            slot_major([self._shards.state[i] for i in rectangles]),
            rule.code,
            hyper,
            sums,
            [start for i in rectangles for start in self._rectangles[i].origin],
            *self._trailing_arguments(rectangles, runs),
        )

    def _trailing_arguments(
        self, rectangles: Sequence[int], runs: tuple[Tensor, Tensor] | tuple[()] = ()
    ) -> Sequence[object]:
        """Return the last arguments of the update kernel: ``runs``, then the keys for stochastic rounding.

        The keys are left out if no rectangle needs them.
        """
        # Without keys, the remaining arguments keep their defaults.
        if not self._row_keys:
            return runs
        # The kernel takes an empty tensor for rectangles that need no keys, and None for missing ``runs``.
        nothing = torch.empty(0, dtype=torch.int64)
        return *(runs or (None, None)), [self._row_keys.get(i, nothing) for i in rectangles]

    def _update_split(self, prepared: PreparedGroup, gradient: TableGradient, tables: set[int]) -> None:
        """Update the rectangles of a group that are split by columns."""
        group, split = prepared.group, prepared.split
        # All rectangles at once, with the sorted rows from ``_prepare_split``.
        if isinstance(split, _SplitUpdate):
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
    ) -> list[_RectangleUpdate] | _SplitUpdate:
        """Prepare the update of the rectangles split by columns. Collective.

        A single kernel call (``_SplitUpdate``) updates all rectangles on two conditions. The statistics over
        whole rows need only the gradient, and this lookup alone trains all rectangles, at the same step.
        Otherwise every rectangle has a separate update. The ranks exchange the same data in both cases.
        """
        rule, split, looked_up = group.rule, group.split, gradient.looked_up
        # Width of whole rows, by which the statistics are divided.
        dims = [self._fused[self._rectangles[i].table].dim for i in split]
        steps = [self._fused[self._rectangles[i].table].state["step"] + 1 for i in split]
        hypers = [rule.hyper(step, dim) for step, dim in zip(steps, dims, strict=True)]
        values = [Hyper.from_tensor(hyper) for hyper in hypers]
        # A single kernel call needs a single step number, trained tables only, and lookup gradients only.
        at_once = all(needs_gradient_only(rule.code, h) for h in values) and len(set(steps)) == 1
        at_once &= self._trained(split) == split and not gradient.rows.keys() & split
        if not split or looked_up is None or not at_once:
            return self._prepare_row_updates(group, peers, gradient, hypers)
        lookups = looked_up.lookups.of_tables(split)
        # The kernel sorts the rows here. With ``runs``, the update need not sort them again.
        # Only sums of squares cross the network, a value per touched row. ``counts`` is read on the host.
        squares, counts, runs = tbe.row_squares(looked_up.grad, lookups, self._heights(split))
        return _SplitUpdate(runs, peers.mean_squares(squares, counts.tolist(), dims))

    def _prepare_row_updates(
        self, group: _Group, peers: RowPeers, gradient: TableGradient, hypers: Sequence[Tensor]
    ) -> list[_RectangleUpdate]:
        """Prepare an update for every rectangle that is split by columns, with its statistics. Collective."""
        weights, rule = self._shards.weights, group.rule
        values = [Hyper.from_tensor(hyper) for hyper in hypers]
        parts = self._row_gradients(gradient, group.split)
        # Also rectangles without touched rows: the exchange below is collective.
        touched = [
            self._touched_rows(i, parts.get(i) or _no_rows(weights[i]), not needs_gradient_only(rule.code, h))
            for i, h in zip(group.split, values, strict=True)
        ]
        stats = peers.row_stats(touched, rule.code, values)
        return [
            _RectangleUpdate(i, RowGradients(part.rows, part.grad), hyper, sums)
            for i, part, hyper, sums in zip(group.split, touched, hypers, stats, strict=True)
        ]

    def _touched_rows(self, i: int, part: RowGradients, with_weights: bool) -> TouchedRows:
        """Return the touched rows of a rectangle, as input to statistics."""
        rows, grad = part
        if not with_weights:
            return TouchedRows(rows, grad, grad.new_empty(0), [])
        # ``float`` because statistics are computed in fp32 for any row dtype.
        weight = self._shards.weights[i].detach()
        return TouchedRows(rows, grad, weight[rows].float(), [slot[rows] for slot in self._shards.state[i]])

    def _row_gradients(self, gradient: TableGradient, rectangles: Sequence[int]) -> dict[int, RowGradients]:
        """Return, by rectangle number, the gradient of every touched row, summed over the batch."""
        by_rectangle = {i: gradient.rows[i] for i in rectangles if i in gradient.rows}
        # One kernel call sorts and sums the gradients of all other rectangles.
        if gradient.looked_up is not None and (remaining := [i for i in rectangles if i not in by_rectangle]):
            grad, lookups = gradient.looked_up
            pairs = tbe.sparse_grad(grad, lookups.of_tables(remaining), self._heights(remaining))
            by_rectangle.update({i: RowGradients(*pair) for i, pair in zip(remaining, pairs, strict=True)})
        return by_rectangle

    def _dense_gradients(self, gradient: TableGradient) -> dict[int, Tensor]:
        """Return the dense gradients of ordinary tables, by rectangle number."""
        # Autograd adds these to ``parameter.grad``.
        weights = self._shards.weights
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
        """Return the number of rows in memory for each of these rectangles."""
        weights = self._shards.weights
        return [weights[i].shape[0] for i in rectangles]

    def _trained(self, rectangles: Sequence[int]) -> list[int]:
        """Return the numbers of the rectangles whose parameter requires a gradient now (is not frozen)."""
        return [i for i in rectangles if self._shards.is_trained(i)]


def _no_rows(weight: Tensor) -> RowGradients:
    """Return a gradient without rows, for a rectangle that a batch does not touch."""
    return RowGradients(
        torch.empty(0, dtype=torch.int64, device=weight.device),
        torch.empty(0, weight.shape[1], device=weight.device),
    )


# Shape legend: U touched rows, D width.


def rows_as_lookups(rows: Sequence[Tensor], dims: Sequence[int], tables: Sequence[int]) -> tbe.Lookups:
    """Return a lookup that reads each given row once, without pooling.

    The update kernel takes the output gradient of a lookup. For this lookup, the output gradient is the row
    gradients ``[U, D]`` of all tables, flattened and concatenated.

    Args:
        rows: touched rows per table, int64 [U]. If a row is repeated, the kernel adds its gradients.
        dims: number of columns per table.
        tables: table numbers for the field ``tables`` of the result.
    """
    # One bag per table, in which every row is an ID. ``NONE`` pooling returns the rows as they are.
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
    """Apply an optimizer step to some rows of an unsharded table, in place.

    Args:
        weight: the table, [rows, D].
        state: optimizer state, one tensor per state slot.
        rows: distinct rows to change, int64 [U].
        grad: gradient per row, fp32 [U, D].
        optimizer: number of the optimizer in the kernels (``OptimizerSpec.code``).
        hyper: hyperparameters, as ``UpdateRule.hyper`` returns them.
    """
    # Without origins: the table starts at row 0 and column 0.
    lookups = rows_as_lookups([rows], [grad.shape[1]], [0])
    tbe.update(grad.reshape(-1), *lookups, [weight], list(state), optimizer, hyper, None, [])


def slot_major(state: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Flatten optimizer state in the order of the kernels: first slot 0 of all tables, then slot 1, ..."""
    return [slot for slots in zip(*state, strict=True) for slot in slots]
