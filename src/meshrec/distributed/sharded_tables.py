"""``ShardedTables``: exchange IDs and embeddings between ranks, look up rows, and update tables.

[Note: the stages of a batch]

A batch passes through stages. Every stage starts the communication for which the next stage waits, so a
pipeline can do other work in between::

    batch = tables.route(features)           # route IDs; sizes are in flight
    tables.advance(batch, Stage.EXCHANGED)   # wait for sizes; IDs are in flight
    tables.advance(batch, Stage.ARRIVED)     # wait for IDs
    tables.advance(batch, Stage.RESOLVED)    # keys to slots, in tables with an index
    link = tables.look_up(batch)             # look up; embeddings are in flight
    embeddings = tables.finish(batch, link)  # wait for embeddings

``advance`` runs all stages up to the given stage, and ``look_up`` runs the remaining stages. A plain forward
pass therefore calls only ``route``, ``look_up`` and ``finish``. A `LookupBatch` stores the state between
stages. ``look_up`` may run again after tables have changed, because the batch keeps its slots (positions of
rows in memory). The backward pass runs ``send_grad``, then ``receive_grad``, which updates the tables.

An input error is raised on all ranks by ``advance`` to ``EXCHANGED``. For other errors in these stages, see
[Note: a rank that fails alone] in comms/failures.py.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from meshrec.comms.collectives import all_reduce, release_read
from meshrec.comms.failures import announced_on_failure
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.comms.wire import FULL_PRECISION, TableWires
from meshrec.distributed.input_dist import InputDist
from meshrec.distributed.lookup import FetchedRows, LookupTables
from meshrec.distributed.lookup_batch import LookupBatch, LookupIds, PackedIds, Stage
from meshrec.distributed.output_dist import Codecs, PooledOutput, return_weight_grads
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_arrival import RowArrival
from meshrec.distributed.row_stats import column_peers
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec
from meshrec.ops.tbe.lookup import BATCH_TENSORS
from meshrec.ops.versions import check_unchanged
from meshrec.optim.in_backward import in_backward_spec
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.index import check_pinned, release_pins
from meshrec.tables.local_shards import LocalShards
from meshrec.tables.optimizer import FusedTable
from meshrec.tables.updates import TableGradient, TableUpdates, WriteCounter

if TYPE_CHECKING:
    from meshrec.distributed.node_rows import NodeRows
    from meshrec.distributed.replicas import Replicas
    from meshrec.distributed.sequence_output import SequenceOutput


class GradientSignal:
    """Parameter ``signal``, through whose gradient all ranks decide alike on an optimizer step.

    Some tables collect gradients in the backward pass for a later ``step()``. The optimizer's parameter
    groups contain ``signal``. Before the first backward pass and after ``zero_grad``, no gradients are
    collected, and ``signal.grad`` is None. Otherwise ``signal.grad`` is 0, or infinity if some rank has a
    non-finite gradient. GradScaler and gradient clipping read ``signal.grad``, so they decide alike on all
    ranks, even on ranks without tables.

    Args:
        device: device for the parameter.
    """

    def __init__(self, device: torch.device) -> None:
        self.signal = nn.Parameter(torch.zeros(1, device=device))

    def agree(self, finite: bool, axis: Axis) -> None:
        """Set ``signal.grad`` to 0 if ``finite`` is True on all ranks, else to infinity. Collective."""
        # A sum over ranks: infinity on any rank makes it infinite on all.
        signal = torch.full_like(self.signal, 0.0 if finite else torch.inf).detach()
        all_reduce(signal, axis, "finite gradients")
        self.signal.grad = signal


class ShardedTables:
    """The tables of a sharded module on this rank. Exchanges IDs and embeddings, looks up rows, and updates
    tables.

    A module has *split* tables, whose shards are on different ranks, and *data-parallel* tables, of which
    every rank has a copy. See [Note: the stages of a batch] for the order of calls.

    Attributes:
        routing: routes for the ID exchange, that is, which IDs go to which rank. These are the plan's routes,
            or with ``inside`` the routes inside a node.

    Args:
        routing: the compiled plan.
        env: the ranks.
        split_shards: shards of the split tables, in the order of ``routing.work[rank].rectangles``. Usually
            there is a single entry with this rank's shards. With ``env.devices``, there is an entry for every
            rank on the shard axis.
        local: this rank's copies of the data-parallel tables.
        fused: tables with a fused optimizer, by table number. Other tables get ordinary gradients.
        input_dist: sends and receives IDs.
        sequence: whether the module returns a row per ID instead of a pooled row per bag.
        wire: encodings for embeddings and gradients in messages between ranks, by table.
        admission_evictions: two objects which admit and evict rows of hashed tables, the first for the split
            tables, the second for the data-parallel tables. An entry is None if no such table is hashed.
        inside: routing and ranks for the exchange inside a node, if nodes exchange rows instead of sums.
            ``input_dist`` must use the same routing and ranks. None: nodes exchange sums.
        may_fail: whether some table on some rank has rows in a file, so that reading rows may fail.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        split_shards: Sequence[LocalShards],
        local: LocalShards,
        *,
        fused: Mapping[int, FusedTable],
        input_dist: InputDist,
        sequence: bool,
        wire: TableWires,
        admission_evictions: Sequence[AdmissionEviction | None] = (None, None),
        inside: tuple[Routing, ShardingEnv] | None = None,
        may_fail: bool = False,
    ) -> None:
        # Fixed for this object's life. Resharding replaces the whole object in its module.
        self._env = env
        # A list, because every step iterates over it.
        self._fused = list(fused.values())
        wires = [wire.for_table(table.name) for table in routing.tables]
        # ``here`` and ``ranks``: routing and ranks for the exchange of IDs and embeddings.
        split, here, ranks = split_shards[0], routing, env
        self._node_rows: NodeRows | None = None
        looked_up = list[LocalShards | FetchedRows](split_shards)
        # Only traffic between nodes is encoded; inside a node everything stays fp32.
        if inside is not None:
            from meshrec.distributed import node_rows

            here, ranks = inside
            self._node_rows = node_rows.NodeRows(routing, here, env, split, wires=wires, clock=self._step)
            wires, looked_up = [FULL_PRECISION] * len(wires), [self._node_rows.fetched]
        codecs = Codecs(*(Codec(here, wires, direction, self._step) for direction in (FORWARD, BACKWARD)))
        self.feedback = (codecs if self._node_rows is None else self._node_rows.codecs).backward.feedback
        """Rounding errors in the gradients this rank has sent; None if no wire format uses error feedback."""
        out_dtype = codecs.forward.encoding.kernel_dtype
        works = here.work if env.devices else here.work[ranks.shard.rank :][:1]
        # Split tables of every rank for which this process acts.
        self._rank_tables = [
            LookupTables(here, work, shards, sequence=sequence, out_dtype=out_dtype)
            for work, shards in zip(works, looked_up, strict=True)
        ]
        self.split = self._rank_tables[0]
        self.local = LookupTables(routing, routing.local, local, sequence=sequence)
        has_index = any(part.shards.indexes for part in self._rank_tables)
        self.needs_resolve = bool(has_index or local.indexes or self._node_rows)
        """Whether the stage ``RESOLVED`` has work: some table has an index from keys to slots, or nodes
        exchange rows.
        """
        self._row_arrival, self.rows_arrive = RowArrival(routing, env, may_fail=may_fail), may_fail
        """Whether some rows may be in files. Reading them starts in stage ``RESOLVED``, which a pipeline
        should therefore run early.
        """
        # Whether ``route`` has checked, once, that torch has not attached an optimizer to a fused table after
        # sharding.
        self._is_checked = False
        # Counts in-place writes to the weights, to tell writes by the user from updates.
        self._writes = WriteCounter(
            [table.label for table in fused.values()], [t.weight for t in fused.values()]
        )
        # The index is ``replicated``: split tables first, then data-parallel tables.
        self._updates = [
            TableUpdates(
                shards,
                {t: table for t, table in fused.items() if routing.replicated[t] == replicated},
                writes=self._writes,
                peers=None if replicated else functools.partial(column_peers, routing, env.shard),
                admission_eviction=admission_evictions[replicated],
            )
            for shards, replicated in ((split, False), (local, True))
        ]
        # ``receive_grad`` returns gradients in this order.
        self._parameters = [*split.parameters, *local.parameters]
        # Only tables with ``update="on_step"`` need a signal.
        is_deferred = any(table.rule.deferred for table in fused.values())
        self.collected = GradientSignal(input_dist.device) if is_deferred else None
        """Signal whether gradients are collected for ``step``; None if backward updates all tables."""
        self.watch: Callable[[Sequence[TableGradient]], None] | None = None
        """Function which every backward pass calls with the gradients for the split tables and for the
        data-parallel tables. Set by ``touched_rows.TouchedRows``.
        """
        self.num_changes = 0
        """Number of updates and state dict loads so far, equal on all ranks. A pipeline compares it to find
        out whether rows it has looked up are outdated.
        """
        self._input = input_dist
        self._output: PooledOutput | SequenceOutput
        if sequence:
            from meshrec.distributed import sequence_output

            self._output = sequence_output.SequenceOutput(here, ranks, codecs)
        else:
            self._output = PooledOutput(here, ranks, codecs)
        self.uses_in_order: list[int] = getattr(self._output, "uses_in_order", [])
        """Use numbers in the order of the result, if the module returns a row per ID; else empty."""
        # With ``env.devices``, only the first rank has a batch, so every rank gets a single message.
        self._blocks = [0] if env.devices else self._output.blocks
        # Sum gradients over ranks with copies of the same rows: for the split tables, over the replicate
        # axis, and for the data-parallel tables, over all ranks. None without copies.
        self._replicas: Replicas | None = None
        self._data_parallel: Replicas | None = None
        if env.world.size > 1:
            from meshrec.distributed import replicas

            # Ranks on the replicate axis have copies of this rank's shards.
            if env.replicate.size > 1:
                self._replicas = replicas.Replicas(
                    self.split, env.replicate, input_dist, self._output.blocks, name="replicas"
                )
            self._data_parallel = replicas.Replicas(
                self.local, env.world, input_dist, [0], name="data_parallel"
            )
        self._axis, self.routing = ranks.shard, here

    def recount(self) -> None:
        """Count the rows in hashed tables over all ranks again, after rows were loaded. Collective."""
        for admission_eviction in self.admission_evictions:
            admission_eviction.recount()

    @property
    def admission_evictions(self) -> list[AdmissionEviction]:
        """Objects which admit and evict rows of hashed tables; empty without hashed tables."""
        return [
            updates.admission_eviction for updates in self._updates if updates.admission_eviction is not None
        ]

    @property
    def num_clamped_ids(self) -> int:
        """Number of invalid IDs which ``BoundsCheckMode.WARN`` has replaced by 0 on this rank so far."""
        return self._input.num_clamped_ids

    @announced_on_failure
    def route(self, features: KeyedJaggedTensor) -> LookupBatch:
        """Start a batch: sort the IDs by destination rank, and start to exchange message sizes. Collective.

        Invalid input does not raise here, but in the next stage, on every rank.

        Returns:
            A new batch in stage ``ROUTED``.

        Raises:
            ValueError: torch has attached an optimizer to a table with a fused optimizer.
        """
        if not self._is_checked:
            # Raises if torch has attached an optimizer.
            for table in self._fused:
                in_backward_spec(table.weight)
            self._is_checked = True
        trains = False
        if torch.is_grad_enabled():
            for parameter in self._parameters:
                trains |= parameter.requires_grad
        with phase("ids") if recorders else OFF:
            return self._input.send_sizes(features, trains=trains)

    @announced_on_failure
    def advance(self, batch: LookupBatch, stage: Stage) -> LookupBatch:
        """Run all stages of a batch up to and including ``stage``, except stages already run. Collective.

        Args:
            batch: batch from ``route``.
            stage: last stage to run, at most ``RESOLVED``.

        Returns:
            The same batch.

        Raises:
            ValueError: the input on some rank is invalid. All ranks raise it.
        """
        self._advance(batch, stage)
        return batch

    def _advance(self, batch: LookupBatch, stage: Stage) -> None:
        """Run all stages of a batch up to and including ``stage``; see `advance`."""
        # Not decorated, because ``advance`` and ``look_up`` announce failures.
        if batch.stage < Stage.EXCHANGED <= stage:
            with phase("ids") if recorders else OFF:
                self._input.send_ids(batch)
            batch.stage = Stage.EXCHANGED
        if batch.stage < Stage.ARRIVED <= stage:
            with phase("ids") if recorders else OFF:
                self._arrive(batch)
            batch.stage = Stage.ARRIVED
        if batch.stage < Stage.RESOLVED <= stage:
            if self.needs_resolve:
                self._resolve(batch)
            batch.stage = Stage.RESOLVED

    def _arrive(self, batch: LookupBatch) -> None:
        """Stage ``ARRIVED``: wait for the IDs from all ranks, and unpack them."""
        assert batch.in_flight is not None
        # Only the words were missing; the header is known since stage EXCHANGED.
        batch.message, batch.in_flight = PackedIds(batch.in_flight.wait(), *batch.message[1:]), None
        messages = split_message(batch) if self._env.devices else [batch.message]
        batch.ids = []
        for part, message in zip(self._rank_tables, messages, strict=True):
            unpacked = self._input.unpack(message, self._blocks, len(part.work.routes))
            batch.ids.append(copy_ids(part, unpacked) if batch.ids else unpacked)
        batch.local_ids = None
        if not self.local.is_empty:
            batch.local_ids = self._input.unpack(batch.local_message, [0], len(self.local.work.routes))
        # Keep the keys for stochastic rounding, because ``_resolve`` replaces them in ``ids``.
        batch.keys, batch.batches = batch.ids[0].values, messages[0].header[:, 3].tolist()
        batch.block_sizes = self.split.block_sizes(batch.ids[0])

    def _resolve(self, batch: LookupBatch) -> None:
        """Stage ``RESOLVED``: replace keys by slots in tables with an index, or request rows from nodes."""
        with phase("lookup") if recorders else OFF:
            # With an exchange of rows between nodes, the owners resolve keys, see `NodeRows.request_rows`.
            if self._node_rows is None:
                batch.ids = [
                    part.resolve(ids, train=batch.trains)
                    for part, ids in zip(self._rank_tables, batch.ids, strict=True)
                ]
            if batch.local_ids is not None:
                batch.local_ids = self.local.resolve(batch.local_ids, train=batch.trains)
        if self._node_rows is not None:
            with phase("ids") if recorders else OFF:
                batch.fetch = self._node_rows.request_rows(batch.ids[0], train=batch.trains)
            # From now on, IDs are positions among the distinct IDs, whose rows will be fetched.
            batch.ids = [batch.fetch.slots]

    @announced_on_failure
    def look_up(self, batch: LookupBatch) -> Tensor:
        """Run the remaining stages, look up the rows, and start to send them to the requesting ranks.
        Collective.

        Args:
            batch: batch from ``route``, in any stage. It may have been looked up before.

        Returns:
            Rows from the data-parallel tables. Pass them to ``finish``: they connect both calls in the
            autograd graph.

        Raises:
            RowFileError: rows could not be read from a file. All ranks raise it.
            ValueError: the cache has no room for the rows, or the input on some rank is invalid. All ranks
                raise it.
        """
        self._advance(batch, Stage.RESOLVED)
        # A second lookup need not wait, because the batch's pins keep the rows in memory.
        if self.rows_arrive and not batch.has_rows:
            with phase("lookup") if recorders else OFF:
                local = batch.local_ids.pins if batch.local_ids is not None else ()
                self._row_arrival.wait([*batch.ids[0].pins, *local])
            batch.has_rows = True
        # The anchor requires a gradient on all ranks if some rank trains, because the backward pass is
        # collective.
        anchor = torch.empty(0, requires_grad=batch.trains)
        link: Tensor = _send(self, batch, anchor, batch.sample_weights, *self._parameters)
        batch.stage = Stage.LOOKED_UP
        return link

    def finish(self, batch: LookupBatch, link: Tensor) -> Tensor:
        """Wait for the embeddings of a batch after ``look_up``, and return them. Collective.

        Args:
            link: result of ``look_up``, which connects both calls in the autograd graph.

        Returns:
            Pooled embeddings, fp32 [B, D], or a row per ID, fp32, flat.
        """
        embeddings: Tensor = _receive(self, batch, link)
        return embeddings

    def send(self, batch: LookupBatch) -> Tensor:
        """Forward pass of `_Send`: look up rows, and start to send them. Collective.

        Returns:
            Rows from the data-parallel tables, fp32, flat.
        """
        # Count writes before rows are read, so that ``send_grad`` notices any later write.
        batch.foreign_writes = self._writes.foreign_writes() if batch.trains else ()
        if self._node_rows is not None:
            assert batch.fetch is not None
            batch.fetched = self._node_rows.fetched.weights = self._node_rows.look_up(batch.fetch)
        with phase("lookup") if recorders else OFF:
            rows = self.split.forward(batch.ids[0], sum(batch.block_sizes))
            if len(self._rank_tables) > 1:
                rows = _look_up_other_ranks(rows, self._rank_tables, batch.ids)
        with phase("output") if recorders else OFF:
            batch.in_flight = self._output.send_rows(rows, batch)
        # Data-parallel tables are looked up while the embeddings travel.
        local = rows.new_empty(0, dtype=torch.float32)
        if batch.local_ids is not None:
            with phase("lookup") if recorders else OFF:
                local = self.local.forward(batch.local_ids, sum(self.local.block_sizes(batch.local_ids)))
        return local

    @announced_on_failure
    def receive(self, batch: LookupBatch, local: Tensor) -> Tensor:
        """Forward pass of `_Receive`: wait for the rows, and return the embeddings. Collective.

        Args:
            local: result of ``send``.

        Returns:
            Pooled embeddings, fp32 [B, D], or a row per ID, fp32, flat.
        """
        assert batch.in_flight is not None
        # Dropped from the batch, so its messages can be freed while the batch waits for the backward pass.
        in_flight, batch.in_flight = batch.in_flight, None
        with phase("output") if recorders else OFF:
            return self._output.receive_rows(in_flight, None if batch.local_ids is None else local, batch)

    @announced_on_failure
    def send_grad(self, batch: LookupBatch, grad: Tensor) -> Tensor:
        """Backward pass of `_Receive`: start to send gradients to the ranks which have the rows. Collective.

        Returns:
            Gradient for the rows from the data-parallel tables.

        Raises:
            ValueError: the user has written to the batch or to a table since the forward pass.
        """
        source = batch.source
        # The backward pass reads the caller's IDs and weights again, so they must be unchanged.
        check_unchanged(BATCH_TENSORS, (source.values, source.offsets, source.weights), source.versions)
        if self.needs_resolve:
            check_pinned(batch.ids[0].pins)
        # Updates by other batches are allowed, but writes by the user make the gradient wrong.
        self._writes.check(batch.foreign_writes)
        # Gradients are averaged over ranks here and nowhere else.
        scale = 1.0 / self._env.world.size
        release_read(self._axis)  # all ranks have read the embeddings by now
        with phase("gradient") if recorders else OFF:
            batch.in_flight, local = self._output.send_gradient(grad, batch, scale)
        return local

    @announced_on_failure
    def receive_grad(
        self, batch: LookupBatch, local_grad: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Backward pass of `_Send`: wait for the gradients, and update the fused tables in place. Collective.

        Returns:
            The gradient for the caller's per-sample weights, and a list with the gradient for every table
            parameter. The first is None if no rank needs it. List entries for fused tables are None.
        """
        assert batch.in_flight is not None
        local = None
        if batch.local_ids is not None:
            # Data-parallel tables first, so their exchange overlaps with the gradients in flight.
            if self._data_parallel is None:
                local = self.local.gradient(local_grad, batch.local_ids)
            else:
                local = self._data_parallel.sum_gradients(batch.local_message, batch.local_ids, local_grad)
        with phase("gradient") if recorders else OFF:
            split_grad = self._output.receive_gradient(batch.in_flight, batch)
            batch.in_flight, sample_grad = None, None
            if self._node_rows is not None:
                # Another batch may have replaced the fetched rows since this batch's forward pass.
                self._node_rows.fetched.weights, batch.fetched = batch.fetched, ()
            if batch.needs_weight_grads:
                sample_grad = self._sample_weight_grad(batch, split_grad, local_grad)
        if self._node_rows is not None:
            split = self._gradient_from_nodes(batch, split_grad)
        # Without a replicate axis, the gradients of all ranks have arrived already.
        elif self._replicas is None:
            split = self.split.gradient(split_grad, batch.ids[0])
        else:
            split = self._replicas.sum_gradients(batch.message, batch.ids[0], split_grad)
        gradients = [split] if local is None else [split, local]
        if self.rows_arrive and (self._env.replicate.size > 1 or local is not None):
            # The gradients may touch rows looked up only by other replicas, which are not in memory yet.
            self._row_arrival.wait([pin for gradient in gradients for pin in gradient.pins])
        with phase("update") if recorders else OFF:
            self._store_gradients(gradients)
            grads = [
                grad
                for updates, gradient in zip(self._updates, gradients, strict=False)
                for grad in updates.ordinary_gradients(gradient)
            ]
            # Tables with ``update="on_step"`` follow in ``step``.
            self._apply(gradients, deferred=False)
            # After the update, so marked rows have been changed.
            if self.watch is not None:
                self.watch(gradients)
        if self.needs_resolve and self.collected is None:  # collected gradients keep the slots until ``step``
            self._release(batch, gradients)
        return sample_grad, grads + [None] * (len(self._parameters) - len(grads))

    def _release(self, batch: LookupBatch, gradients: Sequence[TableGradient]) -> None:
        """Release a batch's slots after the update, so that they may be given to other rows."""
        for ids in [*batch.ids, batch.local_ids]:
            if ids is not None:
                release_pins(ids.pins)
        for gradient in gradients:
            release_pins(gradient.pins)

    @announced_on_failure
    def step(self) -> None:
        """Update tables with ``update="on_step"`` by the gradients which backward passes have collected.

        Collective. Does nothing if no gradients are collected.
        """
        # After ``zero_grad``, the signal's gradient is None, and there is nothing to apply.
        if self.collected is not None and self.collected.signal.grad is not None:
            self._apply([updates.collected() for updates in self._updates], deferred=True)

    def _apply(self, gradients: Sequence[TableGradient], *, deferred: bool) -> None:
        """Update tables. If this raises, no table has been updated. Collective.

        Args:
            deferred: True updates the tables with ``update="on_step"``, False updates all other fused tables.
        """
        pairs = list(zip(self._updates, gradients, strict=False))
        # May communicate and may fail, but changes no table. So all are prepared before any is applied.
        prepared = [updates.prepare(gradient, deferred=deferred) for updates, gradient in pairs]
        # Tables change from here on. All fallible communication has completed.
        self.num_changes += 1
        for (updates, gradient), update in zip(pairs, prepared, strict=True):
            updates.apply(update, gradient)

    def _gradient_from_nodes(self, batch: LookupBatch, grad: Tensor) -> TableGradient:
        """Send gradients for rows fetched from other nodes back, and return the gradient for this rank's
        tables.
        """
        assert self._node_rows is not None
        assert batch.fetch is not None
        with phase("gradient") if recorders else OFF:
            ids, every = batch.fetch.slots, list(range(len(self.split.work.rectangles)))
            by_row = self.split.sparse_grads(self.split.output_shaped(grad, ids), ids, every)
            return self._node_rows.return_gradients(batch.fetch, by_row)

    def _step(self) -> int:
        """Return the largest update count of any fused table so far; 0 if no table is fused."""
        return max((int(table.state["step"]) for table in self._fused), default=0)

    def _store_gradients(self, gradients: Sequence[TableGradient]) -> None:
        """Store gradients for tables with ``update="on_step"``, and set the `GradientSignal`. Collective.

        Without such tables, do nothing.
        """
        if self.collected is None:
            return
        finite = True
        for updates, gradient in zip(self._updates, gradients, strict=False):
            finite &= updates.collect(gradient)
        self.collected.agree(finite, self._env.world)

    def _sample_weight_grad(self, batch: LookupBatch, split_grad: Tensor, local_grad: Tensor) -> Tensor:
        """Return the gradient for the per-sample weights of this rank's N IDs, fp32 [N]. Collective.

        Args:
            split_grad: gradient for the output of this rank's split tables.
            local_grad: gradient for the rows from the data-parallel tables.
        """
        header = batch.message.header
        split_grads = self.split.sample_weight_grad(split_grad, batch.ids[0])
        local = None
        if batch.local_ids is not None:
            local = self.local.sample_weight_grad(local_grad, batch.local_ids)
        blocks = split_grads.split(header[self._output.blocks, 2].tolist())
        # Blocks are in unpacking order, and messages must be in rank order.
        by_rank = [split_grads] * len(blocks)
        for rank, block in zip(self._output.blocks, blocks, strict=True):
            by_rank[rank] = block
        grads = return_weight_grads(by_rank, local, batch.source, self.routing, self._axis)
        # Undo ``send_grad``'s average over ranks, because the weights belong to this rank's loss alone.
        return grads.mul_(self._env.world.size)


class _Send(torch.autograd.Function):
    """Autograd function around ``ShardedTables.send`` (forward) and ``receive_grad`` (backward).

    The lookup is two functions, so that the caller can do other work while rows (or gradients) are exchanged.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tables: ShardedTables,
        batch: LookupBatch,
        anchor: Tensor,
        sample_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        """Look up rows, and start to send them.

        Args:
            anchor: empty tensor which requires a gradient if some rank trains, so autograd calls
                ``backward``.
        """
        ctx.tables, ctx.batch = tables, batch
        return tables.send(batch)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sample_grad, table_grads = ctx.tables.receive_grad(ctx.batch, grads[0])
        # A gradient for each argument of ``forward``; the first three need none.
        return (None, None, None, sample_grad if ctx.needs_input_grad[3] else None, *table_grads)


class _Receive(torch.autograd.Function):
    """Autograd function around ``ShardedTables.receive`` (forward) and ``send_grad`` (backward).

    Rows and gradients travel in the `LookupBatch`. In the autograd graph, only ``local`` connects `_Send` to
    this function.
    """

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, batch: LookupBatch, local: Tensor) -> Tensor:
        """Wait for the rows, and return the embeddings.

        Args:
            local: rows from the data-parallel tables, from `_Send`.
        """
        ctx.tables, ctx.batch = tables, batch
        return tables.receive(batch, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.tables.send_grad(ctx.batch, grads[0].contiguous())


# torch's ``apply`` is untyped.
_send: Any = _Send.apply
_receive: Any = _Receive.apply


def split_message(batch: LookupBatch) -> list[PackedIds]:
    """Split the packed IDs of a batch into a message per rank.

    Raises:
        ValueError: a backward pass is requested, but tables over several devices are for inference.
    """
    if batch.trains:
        raise ValueError(
            "tables over several devices of one process are for inference: a lookup in them has no "
            "gradient. Call the model under torch.no_grad(), or detach the per-sample weights."
        )
    words, header, elements = batch.message
    return [
        PackedIds(rank_words, header[rank : rank + 1], elements[rank : rank + 1])
        # Column 1 of a header: int32 words in the message.
        for rank, rank_words in enumerate(words.split(header[:, 1].tolist()))
    ]


def copy_ids(part: LookupTables, ids: LookupIds) -> LookupIds:
    """Return the IDs on the device of ``part``, where they are looked up."""
    # A rank without tables has no parameter from which to read the device.
    if part.is_empty:
        return ids
    device = part.shards.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


def _look_up_other_ranks(rows: Tensor, played: Sequence[LookupTables], ids: Sequence[LookupIds]) -> Tensor:
    """Look up rows on the devices of all other ranks, and append them to the first rank's rows.

    Args:
        played: for every rank for which this process acts, its tables, in rank order.

    Returns:
        Rows from all ranks, flat, in rank order, on the first rank's device.
    """
    gathered_rows = [rows.view(-1)]
    for part, rank_ids in zip(played[1:], ids[1:], strict=True):
        gathered_rows.append(part.forward(rank_ids, sum(part.block_sizes(rank_ids))).view(-1).to(rows.device))
    return torch.cat(gathered_rows)
