"""The tables of one module on this rank: one batch through routing, lookup and return, and back.

``start``, ``exchange``, ``look_up`` and the awaited result are the stages that a pipeline may overlap.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, release_read
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.comms.wire import WireFormats
from meshrec.distributed.collected import GradientSignal
from meshrec.distributed.input_dist import Arrived, Exchanging, InputDist, LookupIds, PackedIds, SizesInFlight
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.output_dist import Asked, PooledOutput, SequenceOutput
from meshrec.distributed.replicas import Replicas
from meshrec.distributed.routing import Routing
from meshrec.distributed.row_stats import column_peers
from meshrec.distributed.weight_grads import WeightGrads
from meshrec.plan.mesh import ShardingEnv
from meshrec.sparse import KeyedJaggedTensor
from meshrec.tables.holdings import Holdings
from meshrec.tables.optimizer import FusedTable
from meshrec.tables.updates import TableGradient, TableUpdates
from meshrec.tables.writes import OwnWrites


@dataclass(kw_only=True)
class PendingBatch:
    """One batch between its forward and its backward pass."""

    arrived: Arrived
    ids: LookupIds
    asked: Asked
    local_ids: LookupIds | None
    elsewhere: list[LookupIds]
    """Of the other devices of this process."""
    in_flight: InFlight | None = None


class ShardedTables:
    """Everything a rank does for one module.

    ``split``: its rectangles, in the order of ``routing.work[rank].rectangles``; ``local``: the whole
    data-parallel tables. ``fused``: by number, the tables with a fused rule; the others get ordinary
    gradients. ``elsewhere``: where one process plays all ranks, what its other devices hold.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        split: Holdings,
        local: Holdings,
        *,
        fused: Mapping[int, FusedTable],
        input_dist: InputDist,
        sequence: bool,
        wire: WireFormats,
        elsewhere: Sequence[Holdings] = (),
    ) -> None:
        self._env = env
        work = routing.work[env.shard.rank]
        out_dtype = wire.forward.kernel_dtype
        self.split = LookupTables(routing, work, split, sequence=sequence, out_dtype=out_dtype)
        self.local = LookupTables(routing, routing.local, local, sequence=sequence)
        self._elsewhere = [
            LookupTables(routing, other, held, sequence=sequence, out_dtype=out_dtype)
            for other, held in zip(routing.work[1:], elsewhere, strict=False)
        ]
        self._writes = OwnWrites(
            [table.label for table in fused.values()], [t.weight for t in fused.values()]
        )
        self._updates = [
            TableUpdates(
                held,
                {t: table for t, table in fused.items() if routing.replicated[t] == replicated},
                writes=self._writes,
                peers=None if replicated else functools.partial(column_peers, routing, env.shard),
            )
            for held, replicated in ((split, False), (local, True))
        ]
        self._parameters = [*split.parameters, *local.parameters]
        self.collected = (
            GradientSignal(input_dist.device) if any(t.rule.deferred for t in fused.values()) else None
        )
        """What backward passes left for ``step``; None where there is nothing to leave."""
        self.watch: Callable[[Sequence[TableGradient]], None] | None = None
        """Is told what each backward pass changes: of the split tables, then of the data-parallel ones."""
        self.num_changes = 0
        """Updates so far, and other changes of all rows: the same number on every rank."""
        self._input = input_dist
        self._output = (SequenceOutput if sequence else PooledOutput)(routing, env, wire)
        self.uses_in_order: list[int] = getattr(self._output, "uses_in_order", [])
        """For sequences: the uses in the order of their parts of the result."""
        self._replicas = Replicas(self.split, env.replicate, input_dist, self._output.blocks, name="replicas")
        self._everywhere = Replicas(self.local, env.world, input_dist, [0], name="data_parallel")
        self._weight_grads = WeightGrads(routing, env.shard)

    @property
    def num_clamped_ids(self) -> int:
        """How many ids of this rank ``BoundsCheckMode.WARN`` replaced so far."""
        return self._input.num_clamped_ids

    def start(self, features: KeyedJaggedTensor) -> SizesInFlight:
        """Routes the ids and starts to exchange sizes."""
        trains = False
        if torch.is_grad_enabled():
            for parameter in self._parameters:
                trains |= parameter.requires_grad
        with phase("ids") if recorders else OFF:
            return self._input.start(features, trains=trains)

    def exchange(self, started: SizesInFlight) -> Exchanging:
        """Starts to exchange ids. Raises ValueError on every rank when the input of any was bad."""
        with phase("ids") if recorders else OFF:
            return self._input.exchange(started)

    def look_up(self, exchanging: Exchanging) -> "Results":
        """Waits for the ids, looks them up, and starts to send the results back."""
        with phase("ids") if recorders else OFF:
            arrived = self._input.finish(exchanging)
            step = self._arrived_in_one_process(arrived) if self._env.devices else self._arrived(arrived)
        # With it every rank has a backward pass if any has: they exchange gradients.
        anchor = torch.empty(0, requires_grad=step.arrived.wishes.backward)
        return Results(self, step, _send(self, step, anchor, step.arrived.weights, *self._parameters))

    def send(self, step: PendingBatch) -> Tensor:
        """The forward pass up to the wire; gives the rows of the data-parallel tables, fp32, flat."""
        with phase("lookup") if recorders else OFF:
            rows = self.split.forward(step.ids, sum(step.asked.block_sizes))
            if step.elsewhere:
                rows = self._with_others(rows, step.elsewhere)
        with phase("output") if recorders else OFF:
            step.in_flight = self._output.start(rows, step.asked)
        local = rows.new_empty(0, dtype=torch.float32)
        if step.local_ids is not None:
            with phase("lookup") if recorders else OFF:
                local = self.local.forward(step.local_ids, sum(self.local.block_sizes(step.local_ids)))
        return local

    def receive(self, step: PendingBatch, local: Tensor) -> Tensor:
        """The forward pass from the wire on: [B, D], or flat rows per id."""
        assert step.in_flight is not None
        in_flight, step.in_flight = step.in_flight, None
        with phase("output") if recorders else OFF:
            return self._output.finish(in_flight, None if step.local_ids is None else local, step.asked)

    def send_grad(self, step: PendingBatch, grad: Tensor) -> Tensor:
        """The backward pass up to the wire; gives the gradient of the data-parallel rows."""
        # The one place where gradients are averaged over ranks.
        scale = 1.0 / self._env.world.size
        step.asked.source.check_unchanged()
        release_read(self._env.shard)  # the embeddings: all have read them by now
        with phase("gradient") if recorders else OFF:
            step.in_flight, local = self._output.start_grad(grad, step.asked, scale)
        return local

    def receive_grad(
        self, step: PendingBatch, local_grad: Tensor
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """The backward pass from the wire on: updates tables in place, or gives their gradients; before
        them the gradient of the caller's per-sample weights, where some rank wants it.
        """
        assert step.in_flight is not None
        local = None
        if step.local_ids is not None:
            local = self._everywhere.sum_of_all(step.arrived.local, step.local_ids, local_grad)
        with phase("gradient") if recorders else OFF:
            split_grad = self._output.finish_grad(step.in_flight, step.asked)
            step.in_flight, sample_grad = None, None
            if step.arrived.wishes.weight_grads:
                sample_grad = self._sample_weight_grad(step, split_grad, local_grad)
        split = self._replicas.sum_of_all(step.arrived.message, step.ids, split_grad)
        gradients = [split] if local is None else [split, local]
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
        """Applies what backward passes have collected, if they have. Collective."""
        if self.collected is not None and self.collected.signal.grad is not None:
            self._apply([updates.collected() for updates in self._updates], deferred=True)

    def _apply(self, gradients: Sequence[TableGradient], *, deferred: bool) -> None:
        """Makes the updates of all rules that are deferred, or of the others: all or none."""
        pairs = list(zip(self._updates, gradients, strict=False))
        prepared = [updates.prepare(gradient, deferred=deferred) for updates, gradient in pairs]
        # From here on tables change: what can fail on the wire is behind us.
        self.num_changes += 1
        for (updates, gradient), each in zip(pairs, prepared, strict=True):
            updates.apply(each, gradient)

    def _collect(self, gradients: Sequence[TableGradient]) -> None:
        if self.collected is None:
            return
        finite = True
        for updates, gradient in zip(self._updates, gradients, strict=False):
            finite &= updates.collect(gradient)
        self.collected.agree(finite, self._env.world)

    def _arrived(self, arrived: Arrived, blocks: Sequence[int] | None = None) -> PendingBatch:
        order = self._output.blocks if blocks is None else list(blocks)
        ids = self._input.unpack(arrived.message, order, len(self.split.work.routes))
        local_ids = None
        if not self.local.is_empty:
            local_ids = self._input.unpack(arrived.local, [0], len(self.local.work.routes))
        batches = arrived.message.header[:, 3].tolist()
        asked = Asked(arrived.source, ids, batches, self.split.block_sizes(ids))
        return PendingBatch(arrived=arrived, ids=ids, asked=asked, local_ids=local_ids, elsewhere=[])

    def _arrived_in_one_process(self, arrived: Arrived) -> PendingBatch:
        """As ``_arrived``, where the message to each rank is here, and nothing came from others."""
        if arrived.wishes.backward:
            raise ValueError(
                "tables over several devices of one process are for inference: a lookup in them has no "
                "gradient. Call the model under torch.no_grad(), or detach the per-sample weights."
            )
        words, header, elements = arrived.message
        messages = [
            PackedIds(own, header[rank : rank + 1], elements[rank : rank + 1])
            for rank, own in enumerate(words.split(header[:, 1].tolist()))
        ]
        mine, *others = messages
        step = self._arrived(arrived._replace(message=mine), blocks=[0])
        step.elsewhere = [
            _moved(self._input.unpack(message, [0], len(part.work.routes)), part)
            for message, part in zip(others, self._elsewhere, strict=True)
        ]
        return step

    def _with_others(self, rows: Tensor, ids: Sequence[LookupIds]) -> Tensor:
        """1-D: the rows of the first device, then those of each other one."""
        found = [
            part.forward(own, sum(part.block_sizes(own)))
            for part, own in zip(self._elsewhere, ids, strict=True)
        ]
        return torch.cat([each.view(-1).to(rows.device) for each in (rows, *found)])

    def _sample_weight_grad(self, step: PendingBatch, split_grad: Tensor, local_grad: Tensor) -> Tensor:
        """fp32 [N]: that of this rank's own loss, so nothing is averaged."""
        header = step.arrived.message.header
        own = self.split.sample_weight_grad(split_grad, step.ids)
        local = None
        if step.local_ids is not None:
            local = self.local.sample_weight_grad(local_grad, step.local_ids)
        blocks = own.split(header[self._output.blocks, 2].tolist())
        by_rank = [own] * len(blocks)
        for rank, block in zip(self._output.blocks, blocks, strict=True):
            by_rank[rank] = block
        grads = self._weight_grads.exchange(by_rank, local, step.asked.source)
        return grads.mul_(self._env.world.size)


def _moved(ids: LookupIds, part: LookupTables) -> LookupIds:
    """The ids on the device of the tables that they are for."""
    if part.is_empty:
        return ids
    device = part.held.parameters[0].device
    weights = None if ids.weights is None else ids.weights.to(device)
    return ids._replace(values=ids.values.to(device), offsets=ids.offsets.to(device), weights=weights)


class Results:
    """Embeddings on their way back; ``wait`` gives them."""

    def __init__(self, tables: ShardedTables, step: PendingBatch, local: Tensor) -> None:
        self.tables, self.step, self._local = tables, step, local

    def wait(self) -> Tensor:
        """[B, D] for pooled tables, else flat rows per id."""
        out: Tensor = _receive(self.tables, self.step, self._local)
        return out


class _Send(torch.autograd.Function):
    """Lookup and departure; in the backward pass arrival and update."""

    @staticmethod
    def forward(
        ctx: Any,
        tables: ShardedTables,
        step: PendingBatch,
        anchor: Tensor,
        sample_weights: Tensor | None,
        *weights: Tensor,
    ) -> Tensor:
        ctx.tables, ctx.step = tables, step
        return tables.send(step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        sample_grad, table_grads = ctx.tables.receive_grad(ctx.step, grads[0])
        return (None, None, None, sample_grad if ctx.needs_input_grad[3] else None, *table_grads)


class _Receive(torch.autograd.Function):
    """Arrival and assembly; in the backward pass departure. What travels does so in the step: to autograd,
    ``local`` alone leads from one side to the other.
    """

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, step: PendingBatch, local: Tensor) -> Tensor:
        ctx.tables, ctx.step = tables, step
        return tables.receive(step, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, ctx.tables.send_grad(ctx.step, grads[0].contiguous())


# Typed here, because torch's own is not.
_send: Any = _Send.apply
_receive: Any = _Receive.apply
