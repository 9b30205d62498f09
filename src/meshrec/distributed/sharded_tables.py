"""The tables of one module on this rank: one batch through routing, lookup and return, and back.

``start``, ``exchange``, ``look_up`` and the awaited result are the stages that a pipeline may overlap.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.collectives import InFlight
from meshrec.distributed.gradient_exchange import (
    RowGradients,
    finish_gather,
    gathered_sizes,
    reduce_bytes,
    reduce_gradients,
    start_gather,
)
from meshrec.distributed.input_dist import Arrived, Exchanging, InputDist, LookupIds, Message, Started
from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.mesh import Axis, ShardingEnv
from meshrec.distributed.output_dist import Asked, CommsPrecision, PooledOutput, SequenceOutput
from meshrec.distributed.routing import Routing
from meshrec.distributed.updates import FusedRule, TableUpdates, distinct
from meshrec.sparse import KeyedJaggedTensor


@dataclass(kw_only=True)
class Step:
    """One batch between its forward and its backward pass."""

    arrived: Arrived
    ids: LookupIds
    asked: Asked
    local_ids: LookupIds | None
    in_flight: InFlight | None = None


class Tables(NamedTuple):
    """What a rank holds: a weight and its optimizer state for each rectangle."""

    weights: Sequence[nn.Parameter]
    state: Sequence[Sequence[Tensor]]


class ShardedTables:
    """Everything a rank does for one module.

    ``split``: its rectangles, in the order of ``routing.work[rank].rectangles``; ``local``: the whole
    data-parallel tables. ``rules``: for each table of the module what a gradient does to it; None: ordinary
    gradients.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        split: Tables,
        local: Tables,
        *,
        rules: Sequence[FusedRule | None],
        input_dist: InputDist,
        sequence: bool,
        precision: CommsPrecision,
    ) -> None:
        self._env, self._rules = env, distinct(rules)
        work = routing.work[env.shard.rank]
        self.split = LookupTables(
            routing, work, split.weights, sequence=sequence, out_dtype=precision.forward
        )
        self.local = LookupTables(routing, routing.local, local.weights, sequence=sequence)
        self._split_updates = TableUpdates(
            self.split, routing, env.shard, _of(rules, routing.replicated, False), split.state
        )
        self._local_updates = TableUpdates(
            self.local, routing, env.shard, _of(rules, routing.replicated, True), local.state
        )
        self._input = input_dist
        self._output = (SequenceOutput if sequence else PooledOutput)(routing, env, precision)

    @property
    def num_clamped_ids(self) -> int:
        """How many ids of this rank ``BoundsCheckMode.WARN`` replaced so far."""
        return self._input.num_clamped_ids

    def start(self, features: KeyedJaggedTensor) -> Started:
        """Routes the ids and starts to exchange sizes."""
        return self._input.start(features)

    def exchange(self, started: Started) -> Exchanging:
        """Starts to exchange ids. Raises ValueError on every rank when the input of any was bad."""
        return self._input.exchange(started)

    def look_up(self, exchanging: Exchanging) -> "Results":
        """Waits for the ids, looks them up, and starts to send the results back."""
        arrived = self._input.finish(exchanging)
        ids = self._input.unpack(arrived.message, self._output.blocks, len(self.split.work.routes))
        local_ids = None
        if not self.local.is_empty:
            local_ids = self._input.unpack(arrived.local, [0], len(self.local.work.routes))
        batches = arrived.message.header[:, 3].tolist()
        asked = Asked(arrived.source, batches, self.split.block_sizes(ids))
        step = Step(arrived=arrived, ids=ids, asked=asked, local_ids=local_ids)
        received, local = _send(self, step, *self.split.weights, *self.local.weights)
        return Results(self, step, received, local)

    def uses_in_order(self) -> list[int]:
        """For sequences: the uses in the order of their parts of the result."""
        assert isinstance(self._output, SequenceOutput)
        return self._output.uses_in_order

    def send(self, step: Step) -> tuple[Tensor, Tensor]:
        """The forward pass up to the wire: what will have arrived, and the rows of the data-parallel
        tables.
        """
        rows = self.split.forward(step.ids, sum(step.asked.block_sizes))
        step.in_flight = self._output.start(rows, step.asked)
        local = rows.new_empty(0, dtype=torch.float32)
        if step.local_ids is not None:
            local = self.local.forward(step.local_ids, sum(self.local.block_sizes(step.local_ids)))
        return step.in_flight.tensor, local

    def receive(self, step: Step, local: Tensor) -> Tensor:
        """The forward pass from the wire on: [B, D], or flat rows per id."""
        assert step.in_flight is not None
        in_flight, step.in_flight = step.in_flight, None
        return self._output.finish(in_flight, None if step.local_ids is None else local, step.asked)

    def send_grad(self, step: Step, grad: Tensor) -> Tensor:
        """The backward pass up to the wire; gives the gradient of the data-parallel rows."""
        # The one place where gradients are averaged over ranks.
        scale = 1.0 / self._env.world.size
        step.in_flight, local = self._output.start_grad(grad, step.asked, scale)
        return local

    def receive_grad(self, step: Step, local_grad: Tensor) -> list[Tensor | None]:
        """The backward pass from the wire on: updates tables in place, or gives their gradients."""
        assert step.in_flight is not None
        local = None
        if step.local_ids is not None:
            local = self._of_replicas(
                self.local, step.arrived.local, step.local_ids, [0], local_grad, self._env.world
            )
        split_grad = step.in_flight.wait().float()
        step.in_flight = None
        split = self._of_replicas(
            self.split, step.arrived.message, step.ids, self._output.blocks, split_grad, self._env.replicate
        )
        # From here on tables change: what can fail on the wire is behind us.
        for rule in self._rules:
            rule.advance()
        grads = _applied(self._split_updates, split)
        return grads + (_applied(self._local_updates, local) if local is not None else [])

    def _of_replicas(
        self,
        tables: LookupTables,
        message: Message,
        ids: LookupIds,
        blocks: list[int],
        grad: Tensor,
        axis: Axis,
    ) -> "_Gradient":
        """The gradient of all replicas of these tables, in the form that moved fewer bytes."""
        if axis.size == 1:
            return _Gradient(tables.shaped(grad, ids), ids, None)
        gathering = start_gather(message, grad, axis)
        sizes = gathered_sizes(gathering)
        shapes = [(weight.shape[0], weight.shape[1]) for weight in tables.weights]
        if not tables.is_empty and reduce_bytes(shapes, axis.size) < sizes.gather_bytes():
            own = tables.sparse_grads(tables.shaped(grad, ids), ids, list(range(len(shapes))))
            return _Gradient(grad, ids, reduce_gradients(own, shapes, axis))
        message, grad = finish_gather(gathering, sizes)
        all_blocks = [p * len(blocks) + block for p in range(axis.size) for block in blocks]
        ids = self._input.unpack(message, all_blocks, len(tables.work.routes))
        return _Gradient(tables.shaped(grad, ids), ids, None)


class _Gradient(NamedTuple):
    """The gradient of looked-up rows, or, where ``rows`` is there, of the rows of each rectangle."""

    grad: Tensor
    ids: LookupIds
    rows: list[RowGradients] | None


def _applied(updates: TableUpdates, gradient: _Gradient) -> list[Tensor | None]:
    if gradient.rows is not None:
        return updates.apply_rows(gradient.rows)
    return updates.apply(gradient.grad, gradient.ids)


def _of(
    rules: Sequence[FusedRule | None], replicated: Sequence[bool], wanted: bool
) -> list[FusedRule | None]:
    return [rule if flag == wanted else None for rule, flag in zip(rules, replicated, strict=True)]


class Results:
    """Embeddings on their way back; ``wait`` gives them."""

    def __init__(self, tables: ShardedTables, step: Step, received: Tensor, local: Tensor) -> None:
        self._tables, self.step = tables, step
        self._received, self._local = received, local

    def uses_in_order(self) -> list[int]:
        """For flat results: the uses in the order of their parts."""
        return self._tables.uses_in_order()

    def wait(self) -> Tensor:
        """[B, D] for pooled tables, else flat rows per id."""
        out: Tensor = _receive(self._tables, self.step, self._received, self._local)
        return out


class _Send(torch.autograd.Function):
    """Lookup and departure; in the backward pass arrival and update."""

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, step: Step, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.tables, ctx.step = tables, step
        return tables.send(step)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.tables.receive_grad(ctx.step, grads[1]))


class _Receive(torch.autograd.Function):
    """Arrival and assembly; in the backward pass departure."""

    @staticmethod
    def forward(ctx: Any, tables: ShardedTables, step: Step, received: Tensor, local: Tensor) -> Tensor:
        ctx.tables, ctx.step = tables, step
        ctx.like = received
        return tables.receive(step, local)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        local = ctx.tables.send_grad(ctx.step, grads[0].contiguous())
        # The gradient of what was received travels in the step: it is what the other side's backward waits
        # for.
        return None, None, ctx.like.new_zeros(()).expand_as(ctx.like), local


# Typed here, because torch's own is not.
_send: Any = _Send.apply
_receive: Any = _Receive.apply
