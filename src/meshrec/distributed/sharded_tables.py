"""The tables of one module on this rank, and the way of a batch through them: routing, lookup, return, and
back.

[Note: the stages of a batch]

Each stage starts the communication that the next one waits for, so a pipeline can do other work in between::

    sizes = tables.route(features)      # route IDs; sizes are under way
    sent = tables.exchange(sizes)       # wait for sizes; IDs are under way
    batch = tables.arrive(sent)         # wait for IDs
    tables.resolve(batch)               # keys to slots; only if tables.needs_resolve
    results = tables.look_up(batch)     # look up; embeddings are under way
    embeddings = results.wait()         # ``receive``: wait for embeddings

``arrive`` and ``resolve`` run once per batch. ``look_up`` may run again when the tables have changed; the
slots are already in the batch. The backward pass runs ``send_grad``, and then ``receive_grad``, which updates
the tables.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, release_read
from meshrec.comms.mesh import ShardingEnv
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.comms.wire import FULL_PRECISION, TableWires
from meshrec.distributed.collected import GradientSignal
from meshrec.distributed.input_dist import Arrived, IdsInFlight, InputDist, LookupIds, SizesInFlight
from meshrec.distributed.local_axis import as_played, gathered, moved_to
from meshrec.distributed.lookup import FetchedRows, LookupTables
from meshrec.distributed.node_rows import Fetch, NodeRows
from meshrec.distributed.output_dist import Asked, Codecs, PooledOutput
from meshrec.distributed.replicas import Replicas
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_arrival import RowArrival
from meshrec.distributed.row_stats import column_peers
from meshrec.distributed.sequence_output import SequenceOutput
from meshrec.distributed.weight_grads import WeightGrads
from meshrec.distributed.wire_codec import BACKWARD, FORWARD, Codec
from meshrec.optim.in_backward import in_backward_spec
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.holdings import Holdings
from meshrec.tables.optimizer import FusedTable
from meshrec.tables.turnover import Turnover
from meshrec.tables.updates import TableGradient, TableUpdates
from meshrec.tables.writes import OwnWrites


@dataclass(kw_only=True)
class ArrivedBatch:
    """The IDs of one batch, on the ranks that look them up."""

    arrived: Arrived
    ids: list[LookupIds]
    """The IDs to look up in the split tables, for each rank that this process plays. For tables with an
    index, they are keys first, and slots after ``ShardedTables.resolve``.
    """
    asked: Asked
    local_ids: LookupIds | None
    """The IDs to look up in the data-parallel tables."""
    is_resolved: bool = False
    has_rows: bool = False
    """Whether the rows of tables with an index are in memory."""
    fetch: Fetch | None = None
    """The distinct IDs of this node, if rows cross the network in place of sums."""


@dataclass(kw_only=True)
class PendingLookup:
    """One lookup of a batch, between its forward and its backward pass."""

    batch: ArrivedBatch
    in_flight: InFlight | None = None
    fetched: Sequence[Tensor] = ()
    """The rows of ``batch.fetch``."""
    foreign_writes: Sequence[int] = ()
    """The number of writes by others to each table at the time of the lookup."""


class ShardedTables:
    """All work of one rank for one module.

    Attributes:
        routing: the routing of the module's IDs: that of the plan, or the one inside a node.

    Args:
        routing: the compiled plan.
        env: the ranks.
        held: the rectangles of each rank that this process plays (one, or with ``env.devices`` all ranks of
            the shard axis), in the order of ``routing.work[rank].rectangles``.
        local: the whole data-parallel tables.
        fused: the tables with a fused rule, by number. The others get ordinary gradients.
        input_dist: the routing of IDs.
        sequence: whether rows are not pooled.
        wire: the wire formats of rows and gradients, by table.
        turnovers: the admission and eviction of IDs in the split tables, and in the data-parallel ones.
        inside: the routing and the ranks inside a node, if rows cross the network in place of sums.
            ``input_dist`` is for these.
        may_fail: whether rows of some table, on any rank, may fail to come to memory.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        held: Sequence[Holdings],
        local: Holdings,
        *,
        fused: Mapping[int, FusedTable],
        input_dist: InputDist,
        sequence: bool,
        wire: TableWires,
        turnovers: Sequence[Turnover | None] = (None, None),
        inside: tuple[Routing, ShardingEnv] | None = None,
        may_fail: bool = False,
    ) -> None:
        self._env = env
        self._fused = list(fused.values())
        wires = [wire.of(table.name) for table in routing.tables]
        split, here, ranks = held[0], routing, env
        self._nodes, looked_up = None, list[Holdings | FetchedRows](held)
        if inside is not None:
            here, ranks = inside
            self._nodes = NodeRows(routing, here, env, split, wires=wires, clock=self._step)
            wires, looked_up = [FULL_PRECISION] * len(wires), [self._nodes.fetched]
        codecs = Codecs(*(Codec(here, wires, way, self._step) for way in (FORWARD, BACKWARD)))
        self.feedback = (codecs if self._nodes is None else self._nodes.codecs).backward.feedback
        """The residuals of this rank's gradients; None without error feedback."""
        out_dtype = codecs.forward.encoding.kernel_dtype
        works = here.work if env.devices else here.work[ranks.shard.rank :][:1]
        self._played = [
            LookupTables(here, work, own, sequence=sequence, out_dtype=out_dtype)
            for work, own in zip(works, looked_up, strict=True)
        ]
        self.split = self._played[0]
        self.local = LookupTables(routing, routing.local, local, sequence=sequence)
        has_index = any(part.held.indexes for part in self._played)
        self.needs_resolve = bool(has_index or local.indexes or self._nodes)
        """Whether some table finds the slots of its keys in an index. Otherwise batches skip ``resolve``."""
        self._row_arrival = RowArrival(routing, env, may_fail=may_fail)
        self._is_checked = False
        self._writes = OwnWrites(
            [table.label for table in fused.values()], [t.weight for t in fused.values()]
        )
        self._updates = [
            TableUpdates(
                own,
                {t: table for t, table in fused.items() if routing.replicated[t] == replicated},
                writes=self._writes,
                peers=None if replicated else functools.partial(column_peers, routing, env.shard),
                turnover=turnovers[replicated],
            )
            for own, replicated in ((split, False), (local, True))
        ]
        self._parameters = [*split.parameters, *local.parameters]
        is_deferred = any(table.rule.deferred for table in fused.values())
        self.collected = GradientSignal(input_dist.device) if is_deferred else None
        """The gradients that backward passes have left for ``step``; None without deferred updates."""
        self.watch: Callable[[Sequence[TableGradient]], None] | None = None
        """Called with the changes of each backward pass: those of the split tables, then of the data-parallel
        ones.
        """
        self.num_changes = 0
        """The number of updates and other changes of all rows so far. It is equal on all ranks."""
        self._input = input_dist
        self._output = (SequenceOutput if sequence else PooledOutput)(here, ranks, codecs)
        self.uses_in_order: list[int] = getattr(self._output, "uses_in_order", [])
        """The uses of sequences, in the order of their parts of the result."""
        # A process that plays all ranks has one message for each of them, and gets none from others.
        self._blocks = [0] if env.devices else self._output.blocks
        self._replicas = Replicas(self.split, env.replicate, input_dist, self._output.blocks, name="replicas")
        self._everywhere = Replicas(self.local, env.world, input_dist, [0], name="data_parallel")
        self._weight_grads = WeightGrads(here, ranks.shard)
        self._axis, self.routing = ranks.shard, here

    def recount(self) -> None:
        """Count the rows of hashed tables on all ranks, after they were loaded or moved. Collective."""
        for updates in self._updates:
            if updates.turnover is not None:
                updates.turnover.recount()

    @property
    def turnovers(self) -> list[Turnover]:
        """The coming and going of IDs, of the tables with hashed keys."""
        return [updates.turnover for updates in self._updates if updates.turnover is not None]

    @property
    def num_clamped_ids(self) -> int:
        """The number of IDs of this rank that ``BoundsCheckMode.WARN`` has replaced so far."""
        return self._input.num_clamped_ids

    def route(self, features: KeyedJaggedTensor) -> SizesInFlight:
        """Route the IDs and start to exchange sizes. Invalid input raises in ``exchange``, on every rank.

        Raises:
            ValueError: torch has attached another optimizer to a table beside its own.
        """
        if not self._is_checked:
            for table in self._fused:
                in_backward_spec(table.weight)
            self._is_checked = True
        trains = False
        if torch.is_grad_enabled():
            for parameter in self._parameters:
                trains |= parameter.requires_grad
        with phase("ids") if recorders else OFF:
            return self._input.send_sizes(features, trains=trains)

    def exchange(self, sizes: SizesInFlight) -> IdsInFlight:
        """Wait for the sizes and start to exchange IDs.

        Raises:
            ValueError: the input of a rank was invalid; raised on every rank.
        """
        with phase("ids") if recorders else OFF:
            return self._input.send_ids(sizes)

    def arrive(self, sent: IdsInFlight) -> ArrivedBatch:
        """Wait for the IDs and unpack them."""
        with phase("ids") if recorders else OFF:
            arrived = self._input.receive_ids(sent)
            messages = [arrived.message]
            if self._env.devices:
                messages = as_played(arrived)
            ids: list[LookupIds] = []
            for part, message in zip(self._played, messages, strict=True):
                unpacked = self._input.unpack(message, self._blocks, len(part.work.routes))
                ids.append(moved_to(part, unpacked) if ids else unpacked)
            local_ids = None
            if not self.local.is_empty:
                local_ids = self._input.unpack(arrived.local, [0], len(self.local.work.routes))
            batches = messages[0].header[:, 3].tolist()
            asked = Asked(arrived.source, ids[0], batches, self.split.block_sizes(ids[0]))
            return ArrivedBatch(arrived=arrived, ids=ids, asked=asked, local_ids=local_ids)

    def resolve(self, batch: ArrivedBatch) -> None:
        """Find the slots of the keys in tables with an index, once for each batch."""
        if batch.is_resolved:
            return
        trains = batch.arrived.wishes.backward
        with phase("lookup") if recorders else OFF:
            if self._nodes is None:
                batch.ids = [
                    part.resolve(own, train=trains) for part, own in zip(self._played, batch.ids, strict=True)
                ]
            if batch.local_ids is not None:
                batch.local_ids = self.local.resolve(batch.local_ids, train=trains)
        if self._nodes is not None:
            with phase("ids") if recorders else OFF:
                batch.fetch = self._nodes.ask(batch.ids[0], train=trains)
            batch.ids = [batch.fetch.slots]
        batch.is_resolved = True

    @property
    def rows_arrive(self) -> bool:
        """Whether rows may be on their way to memory after ``resolve``, so that it pays to call it early."""
        return self._row_arrival.may_fail

    def look_up(self, batch: ArrivedBatch) -> "Results":
        """Look the IDs up and start to send the results back.

        Raises:
            RowFileError: rows of a table in a file could not come; raised on every rank.
            ValueError: they have no room in the cache; raised on every rank.
        """
        if self._row_arrival.may_fail and not batch.has_rows:
            self._await_rows(batch)
        arrived, pending = batch.arrived, PendingLookup(batch=batch)
        # The anchor gives every rank a backward pass if any has one, because they exchange gradients.
        anchor = torch.empty(0, requires_grad=arrived.wishes.backward)
        return Results(self, pending, _send(self, pending, anchor, arrived.weights, *self._parameters))

    def _await_rows(self, batch: ArrivedBatch) -> None:
        self.resolve(batch)
        with phase("lookup") if recorders else OFF:
            local = batch.local_ids.pins if batch.local_ids is not None else ()
            self._row_arrival.wait([*batch.ids[0].pins, *local])
        batch.has_rows = True

    def send(self, pending: PendingLookup) -> Tensor:
        """Run the forward pass up to the exchange; return the rows of the data-parallel tables, fp32,
        flat.
        """
        batch = pending.batch
        if batch.arrived.wishes.backward:
            pending.foreign_writes = self._writes.foreign()
        if self._nodes is not None:
            assert batch.fetch is not None
            pending.fetched = self._nodes.fetched.weights = self._nodes.look_up(batch.fetch)
        with phase("lookup") if recorders else OFF:
            rows = self.split.forward(batch.ids[0], sum(batch.asked.block_sizes))
            if len(self._played) > 1:
                rows = gathered(rows, self._played, batch.ids)
        with phase("output") if recorders else OFF:
            pending.in_flight = self._output.send_rows(rows, batch.asked)
        local = rows.new_empty(0, dtype=torch.float32)
        if batch.local_ids is not None:
            with phase("lookup") if recorders else OFF:
                local = self.local.forward(batch.local_ids, sum(self.local.block_sizes(batch.local_ids)))
        return local

    def receive(self, pending: PendingLookup, local: Tensor) -> Tensor:
        """Run the forward pass from the exchange on; return [B, D], or flat rows per ID."""
        assert pending.in_flight is not None
        in_flight, pending.in_flight = pending.in_flight, None
        batch = pending.batch
        with phase("output") if recorders else OFF:
            return self._output.receive_rows(
                in_flight, None if batch.local_ids is None else local, batch.asked
            )

    def send_grad(self, pending: PendingLookup, grad: Tensor) -> Tensor:
        """Run the backward pass up to the exchange; return the gradient of the data-parallel rows.

        Raises:
            ValueError: the batch, or a table, was written to since the forward pass.
        """
        asked = pending.batch.asked
        asked.source.check_unchanged()
        self._writes.check(pending.foreign_writes)
        # The one place where gradients are averaged over ranks.
        scale = 1.0 / self._env.world.size
        release_read(self._axis)  # all ranks have read the embeddings by now
        with phase("gradient") if recorders else OFF:
            pending.in_flight, local = self._output.send_gradient(grad, asked, scale)
        return local

    def receive_grad(
        self, pending: PendingLookup, local_grad: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Run the backward pass from the exchange on: update tables in place, or return their gradients.

        Returns:
            The gradient of the caller's per-sample weights, if some rank wants it, and the gradient of each
                parameter; None for fused ones.
        """
        assert pending.in_flight is not None
        batch, local = pending.batch, None
        if batch.local_ids is not None:
            local = self._everywhere.sum_of_all(batch.arrived.local, batch.local_ids, local_grad)
        with phase("gradient") if recorders else OFF:
            split_grad = self._output.receive_gradient(pending.in_flight, batch.asked)
            pending.in_flight, sample_grad = None, None
            if self._nodes is not None:
                self._nodes.fetched.weights, pending.fetched = pending.fetched, ()
            if batch.arrived.wishes.weight_grads:
                sample_grad = self._sample_weight_grad(batch, split_grad, local_grad)
        if self._nodes is not None:
            split = self._gradient_at_home(batch, split_grad)
        else:
            split = self._replicas.sum_of_all(batch.arrived.message, batch.ids[0], split_grad)
        gradients = [split] if local is None else [split, local]
        if self.rows_arrive and (self._env.replicate.size > 1 or local is not None):
            # Rows of other replicas' IDs, which this rank did not look up.
            self._row_arrival.wait([pin for gradient in gradients for pin in gradient.pins])
        with phase("update") if recorders else OFF:
            self._collect(gradients)
            grads = [
                grad
                for updates, gradient in zip(self._updates, gradients, strict=False)
                for grad in updates.ordinary(gradient)
            ]
            self._apply(gradients, deferred=False)
            if self.watch is not None:
                self.watch(gradients)
        return sample_grad, grads + [None] * (len(self._parameters) - len(grads))

    def step(self) -> None:
        """Apply the gradients that backward passes have collected, if there are any. Collective."""
        if self.collected is not None and self.collected.signal.grad is not None:
            self._apply([updates.collected() for updates in self._updates], deferred=True)

    def _apply(self, gradients: Sequence[TableGradient], *, deferred: bool) -> None:
        """Make the updates of all deferred rules, or of all others. Either all of these updates are made or
        none.
        """
        pairs = list(zip(self._updates, gradients, strict=False))
        prepared = [updates.prepare(gradient, deferred=deferred) for updates, gradient in pairs]
        # Tables change from here on. All communication that can fail is done.
        self.num_changes += 1
        for (updates, gradient), each in zip(pairs, prepared, strict=True):
            updates.apply(each, gradient)

    def _gradient_at_home(self, batch: ArrivedBatch, grad: Tensor) -> TableGradient:
        """Return the gradient of this rank's rectangles from that of the rows that it fetched."""
        assert self._nodes is not None
        assert batch.fetch is not None
        with phase("gradient") if recorders else OFF:
            ids, every = batch.fetch.slots, list(range(len(self.split.work.rectangles)))
            by_row = self.split.sparse_grads(self.split.shaped(grad, ids), ids, every)
            return self._nodes.send_home(batch.fetch, by_row)

    def _step(self) -> int:
        """Return the number of updates of the tables so far; 0 if none has a fused optimizer."""
        return max((int(table.state["step"]) for table in self._fused), default=0)

    def _collect(self, gradients: Sequence[TableGradient]) -> None:
        if self.collected is None:
            return
        finite = True
        for updates, gradient in zip(self._updates, gradients, strict=False):
            finite &= updates.collect(gradient)
        self.collected.agree(finite, self._env.world)

    def _sample_weight_grad(self, batch: ArrivedBatch, split_grad: Tensor, local_grad: Tensor) -> Tensor:
        """Return the gradient of the per-sample weights for this rank's own loss, fp32 [N]. It is not
        averaged.
        """
        header = batch.arrived.message.header
        own = self.split.sample_weight_grad(split_grad, batch.ids[0])
        local = None
        if batch.local_ids is not None:
            local = self.local.sample_weight_grad(local_grad, batch.local_ids)
        blocks = own.split(header[self._output.blocks, 2].tolist())
        by_rank = [own] * len(blocks)
        for rank, block in zip(self._output.blocks, blocks, strict=True):
            by_rank[rank] = block
        grads = self._weight_grads.send_home(by_rank, local, batch.asked.source)
        return grads.mul_(self._env.world.size)


class Results:
    """Embeddings on their way back to the rank that asked for them."""

    def __init__(self, tables: ShardedTables, pending: PendingLookup, local: Tensor) -> None:
        self.tables, self.pending, self._local = tables, pending, local

    def wait(self) -> Tensor:
        """Wait for the embeddings: [B, D] for pooled tables, else flat rows per ID."""
        out: Tensor = _receive(self.tables, self.pending, self._local)
        return out


class _Send(torch.autograd.Function):
    """The lookup and the start of the exchange; in the backward pass, the end of the exchange and the
    update.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tables: ShardedTables,
        pending: PendingLookup,
        anchor: Tensor,
        sample_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.tables, ctx.pending = tables, pending
        return tables.send(pending)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sample_grad, table_grads = ctx.tables.receive_grad(ctx.pending, grads[0])
        return (None, None, None, sample_grad if ctx.needs_input_grad[3] else None, *table_grads)


class _Receive(torch.autograd.Function):
    """The end of the exchange; in the backward pass, its start.

    Values travel inside the stages. For autograd, only ``local`` connects the two functions.
    """

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, pending: PendingLookup, local: Tensor) -> Tensor:
        ctx.tables, ctx.pending = tables, pending
        return tables.receive(pending, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.tables.send_grad(ctx.pending, grads[0].contiguous())


# torch's own has no types.
_send: Any = _Send.apply
_receive: Any = _Receive.apply
