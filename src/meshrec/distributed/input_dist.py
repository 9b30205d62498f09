"""The exchange that sends every ID to the ranks that own its row: sizes first, then one packed message per
rank.

Errors that a rank finds in its own input travel with the sizes. So every rank raises the same error, and none
waits for a message that will not come.

[Note: why sizes are read once per forward pass]

The host must know the sizes of messages before it can allocate them and start the exchange of IDs. On a GPU,
sizes are computed on the device, and each read of the device waits for all work that was started on it. So
everything that the host needs (the sizes of all ranks, the counts per route, the status, and the number of
invalid IDs) is collected on the device, and ``send_ids`` copies it to the host in a single read. An
additional ``.item()`` or ``.tolist()`` in the forward pass costs a wait per step; with a pipeline, this one
read happens during the backward pass of the previous batch, and costs nothing.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import InFlight, Splits, all_to_all, gather_objects
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.routing import Routing
from meshrec.modules import BoundsCheckMode
from meshrec.modules.input_checks import (
    check_device,
    inverse_rows,
    key_bounds,
    mixed,
    positions_of,
    sample_weights,
    with_own_keys,
)
from meshrec.ops.dist import naive
from meshrec.ops.sending import read_together
from meshrec.ops.tbe.lookup import BATCH_TENSORS
from meshrec.ops.tbe.reporting import report_clamped
from meshrec.ops.versions import check_unchanged, versions_of
from meshrec.sparse import KeyedJaggedTensor

# U uses, Q routes, R ranks, K keys, N ids

_HEADER = 4  # status, words, ids, bags per route (-1: they differ)
_STATUS, _WORDS = 0, 1
_words_of, _elements_of = operator.itemgetter(_WORDS), operator.itemgetter(_HEADER)
# The bits of a rank's status.
_BAD_INPUT, _TRAINS, _WANTS_WEIGHT_GRADS = 1, 2, 4


class SourceIds(NamedTuple):
    """The IDs as the caller gave them, and the number of those that were sent."""

    values: Tensor
    offsets: Tensor
    segments: Tensor | None
    """int64 [K + 1] when batch sizes differ between keys."""
    num_keys: int
    keys: list[int]
    """[U]: the key that each use reads."""
    counts: Tensor
    """int64 [Q]: the number of IDs sent on each route of all ranks, local ones included. It is on the CPU
    once ``InputDist.send_ids`` has read the sizes.
    """
    batches: list[int]
    """[U]: bags of each use."""
    weights: Tensor | None = None
    """The per-sample weights, fp32 [N]."""
    versions: Sequence[int] = ()
    """Versions of ``values``, ``offsets`` and ``weights`` when they were sent."""

    def check_unchanged(self) -> None:
        """Raise ValueError if the caller has written to the batch since it was sent."""
        check_unchanged(BATCH_TENSORS, (self.values, self.offsets, self.weights), self.versions)

    def bag_bounds(self) -> list[int]:
        """Return the first bag of each key, and the number of bags, [K + 1]."""
        if self.segments is not None:
            bounds: list[int] = self.segments.tolist()
            return bounds
        num_bags = (self.offsets.numel() - 1) // self.num_keys
        return list(map(num_bags.__mul__, range(self.num_keys + 1)))


class PackedIds(NamedTuple):
    """IDs packed by ``route_ids``: one message of int32 words for each row of the header."""

    words: Tensor
    header: Tensor
    """int64 [n, 4] on the CPU."""
    elements: tuple[int, ...] = ()
    """[n]: the number of elements of the rows that each message asks for; empty if rows are pooled."""


class LookupIds(NamedTuple):
    """The IDs to look up on this rank, in block-major bags as the tbe ops read them."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    segments: Tensor
    batches: list[int]
    """Bags per route of each block; -1 if they differ."""
    ragged: bool
    """Whether they differ in some block."""
    elements: tuple[int, ...] = ()
    """Elements of the output for each block; empty if rows are pooled."""
    pins: Sequence[object] = ()
    """The pins of ``values`` if these are slots, see ``tables.index.Resolved``."""


class Wishes(NamedTuple):
    """The tasks of the backward pass. All ranks know them, so that all or none take part in its
    collectives.
    """

    backward: bool
    """Whether some rank trains."""
    weight_grads: bool
    """Whether some rank wants the gradient of its per-sample weights."""


class Arrived(NamedTuple):
    """The result of the input distribution: the caller's IDs, the IDs to look up, and those for data-parallel
    tables.
    """

    source: SourceIds
    message: PackedIds
    local: PackedIds
    weights: Tensor | None
    """fp32 [N]: the caller's per-sample weights, if they require a gradient."""
    wishes: Wishes


class Routed(NamedTuple):
    """The result of ``route_ids``, on the device of the IDs: no rank has read it yet."""

    payload: Tensor
    """The messages to all ranks, then the local one. A GPU may leave unused words behind them."""
    header: Tensor
    """int64 [R + 1, 4], or [R + 1, 5] with the elements that each message asks for."""
    counts: Tensor
    num_bad: Tensor
    """int64 [U]: the IDs of each use that lie outside its table."""


@dataclass
class SizesInFlight:
    """A batch whose sizes are under way."""

    source: SourceIds | None
    arguments: tuple[Any, ...]
    """The arguments of ``route_ids``, from which an error can be explained."""
    routed: Routed
    weights: Tensor | None
    sizes: InFlight
    error: Exception | None


@dataclass
class IdsInFlight:
    """A batch whose packed IDs are under way."""

    source: SourceIds
    local: PackedIds
    weights: Tensor | None
    wishes: Wishes
    header: Tensor
    elements: tuple[int, ...]
    payload: InFlight


class InputDist:
    """The ID routing of one module: ``receive_ids(send_ids(send_sizes(features)))``.

    ``weighted``: whether the caller gives per-sample weights. ``bounds_check``: the handling of IDs outside
    their table. With WARN and OFF, they count as row 0, so a remote rank's memory is never read out of
    bounds.
    """

    def __init__(
        self,
        routing: Routing,
        env: ShardingEnv,
        device: torch.device,
        *,
        weighted: bool,
        sequence: bool,
        bounds_check: BoundsCheckMode,
    ) -> None:
        self._routing, self._env, self.device = routing, env, device
        self._weighted, self._sequence, self._bounds_check = weighted, sequence, bounds_check
        self._num_clamped = torch.zeros((), dtype=torch.int64)
        self.words_per_id = (2 if routing.wide else 1) + weighted
        """Words of a message per ID, with its weight."""
        self._router = routing.router
        self._features = [use.feature for use in routing.uses]
        self._readers = [routing.tables[use.table].name for use in routing.uses]
        self._keys: tuple[Sequence[str], list[int]] | None = None
        seeds = {u: routing.tables[use.table].mix_seed for u, use in enumerate(routing.uses)}
        self._seeds = {u: seed for u, seed in seeds.items() if seed is not None}
        self._own_keys = [use for use in self._seeds if self._features.count(self._features[use]) > 1]
        self._first = env.replicate.rank * env.shard.size
        fields = _HEADER + sequence
        sizes = [fields] * env.world.size
        self._size_splits = Splits(sizes, sizes)
        # A sequence has a row per ID, so the receiver of the rows must be told their number.
        ranks, widths = (torch.tensor(column) for column in routing.route_elements)
        self._route_ranks, self._route_widths = ranks.to(device), widths.to(device)

    @property
    def num_clamped_ids(self) -> int:
        """The number of this rank's IDs that ``BoundsCheckMode.WARN`` has replaced so far."""
        return int(self._num_clamped)

    def send_sizes(self, features: KeyedJaggedTensor, *, trains: bool) -> SizesInFlight:
        """Route the IDs and start to exchange sizes. Invalid input raises in ``send_ids``, on every rank.

        ``trains``: whether this rank has tables to train, and grad mode is on.
        """
        weights = error = source = None
        arguments: tuple[Any, ...] = ()
        try:
            source, weights, arguments = self._checked(features)
            routed = Routed(*torch.ops.meshrec.route_ids.default(*arguments))
            if self._sequence:
                elements = torch.zeros_like(routed.header[:, 0])
                elements.index_add_(0, self._route_ranks, routed.counts * self._route_widths)
                header = torch.cat([routed.header, elements[:, None]], 1)
                routed = Routed(routed.payload, header, routed.counts, routed.num_bad)
            status = (_TRAINS if trains else 0) | (_WANTS_WEIGHT_GRADS if weights is not None else 0)
        except Exception as caught:  # see [Note: how errors reach every rank] in checkpoint/agreement.py
            source, error, status = None, caught, _BAD_INPUT
            routed = self._nothing_routed()
        # On a GPU the op reports bad input in the status, which needs no wait.
        routed.header.select(1, _STATUS).bitwise_or_(status)
        one_group = self._env.replicate.size == 1
        rows = routed.header[:-1].reshape(-1) if one_group else self._world_rows(routed.header)
        sizes = all_to_all(rows, self._size_splits, self._env.world, "sizes of ids")
        try:
            return SizesInFlight(source, arguments, routed, weights, sizes, error)
        finally:
            del error  # a cycle of its traceback and this frame would keep the batch alive

    def send_ids(self, started: SizesInFlight) -> IdsInFlight:
        """Wait for the sizes and start to exchange IDs.

        Raises:
            ValueError: the input of a rank was invalid; raised on every rank.
        """
        routed = started.routed
        # The single read, see [Note: why sizes are read once per forward pass].
        found = read_together((started.sizes.wait(), routed.header.view(-1), routed.counts, routed.num_bad))
        fields = routed.header.shape[1]
        rows, own = found[0].view(-1, fields), found[1].view(-1, fields)
        # Lists, as each look into a tensor takes longer than all of this.
        received, asked = rows.tolist(), own.tolist()
        status = 0
        for each in received:
            status |= each[_STATUS]
        if status & _BAD_INPUT:
            self._raise(started, asked[0][_STATUS])
        assert started.source is not None
        if self._bounds_check is BoundsCheckMode.WARN:
            report_clamped(self._num_clamped, found[3], self._routing.names)
        wants_weight_grads = bool(status & _WANTS_WEIGHT_GRADS)
        wishes = Wishes(wants_weight_grads or bool(status & _TRAINS), wants_weight_grads)
        if self._env.replicate.size > 1:
            peers = slice(self._first, self._first + self._env.shard.size)
            rows, received = rows[peers], received[peers]
        header, own_header = (rows[:, :_HEADER], own[:, :_HEADER]) if self._sequence else (rows, own)
        *sent, local_words = map(_words_of, asked)
        words, local = routed.payload[: sum(sent)], routed.payload[sum(sent) : sum(sent) + local_words]
        payload = all_to_all(words, Splits(sent, list(map(_words_of, received))), self._env.shard, "ids")
        elements: tuple[int, ...] = ()
        local_elements: tuple[int, ...] = ()
        if self._sequence:
            elements, local_elements = tuple(map(_elements_of, received)), (asked[-1][_HEADER],)
        return IdsInFlight(
            started.source._replace(counts=found[2]),
            PackedIds(local, own_header[-1:], local_elements),
            started.weights,
            wishes,
            header,
            elements,
            payload,
        )

    def receive_ids(self, exchanging: IdsInFlight) -> Arrived:
        """Wait for the IDs."""
        message = PackedIds(exchanging.payload.wait(), exchanging.header, exchanging.elements)
        return Arrived(exchanging.source, message, exchanging.local, exchanging.weights, exchanging.wishes)

    def unpack(self, message: PackedIds, blocks: list[int], num_routes: int) -> LookupIds:
        """Return the IDs of a message, with its blocks in the given order."""
        values, offsets, weights, segments = torch.ops.meshrec.unpack_ids.default(
            message.words, message.header, blocks, num_routes, self._weighted, self._routing.wide
        )
        batches = list(map(message.header[:, 3].tolist().__getitem__, blocks))
        elements = tuple(map(message.elements.__getitem__, blocks)) if message.elements else ()
        return LookupIds(
            values,
            offsets,
            weights if self._weighted else None,
            segments,
            batches,
            -1 in batches,
            elements,
        )

    def _checked(self, features: KeyedJaggedTensor) -> tuple[SourceIds, Tensor | None, tuple[Any, ...]]:
        """Return the IDs, the weights if they require a gradient, and the arguments of ``route_ids``."""
        keys = features.keys()
        if self._keys is None or self._keys[0] != keys:
            self._keys = list(keys), positions_of(keys, self._features, self._readers)
        positions = self._keys[1]
        if not self._sequence and features.variable_stride_per_key():
            features = _expanded(features)
        if self._own_keys:
            features, positions = with_own_keys(features, positions, self._own_keys)
            keys = features.keys()
        weights = sample_weights(features, is_weighted=True) if self._weighted else None
        values, offsets = features.values(), features.offsets()
        num_keys = len(keys)
        if self._seeds:
            seeds = {positions[use]: seed for use, seed in self._seeds.items()}
            values = mixed(values, key_bounds(offsets, features.segments_or_none(), num_keys), seeds)
        check_device(values, self._routing.tables[0].name, self.device)
        strides, segments = features.stride_per_key(), features.segments_or_none()
        arguments = (
            values,
            offsets,
            None if weights is None else weights.detach(),
            segments,
            num_keys,
            positions,
            self._router,
            self._env.shard.size + 1,
            self._routing.wide,
            self._bounds_check is BoundsCheckMode.ERROR,
            self._routing.names,
        )
        batches = list(map(strides.__getitem__, positions))
        versions = versions_of((values, offsets) if weights is None else (values, offsets, weights))
        source = SourceIds(
            values, offsets, segments, num_keys, positions, torch.empty(0), batches, weights, versions
        )
        wanted = (
            weights if weights is not None and weights.requires_grad and torch.is_grad_enabled() else None
        )
        return source, wanted, arguments

    def _nothing_routed(self) -> Routed:
        """Return the header of a rank that has found an error in its input."""
        shape = self._env.shard.size + 1, _HEADER + self._sequence
        header = torch.zeros(shape, dtype=torch.int64, device=self.device)
        return Routed(header.new_empty(0, dtype=torch.int32), header, header[:0, 0], header[:0, 0])

    def _world_rows(self, header: Tensor) -> Tensor:
        """Return a row for every rank of the world. Ranks of other replica groups get the status only."""
        rows = header.new_zeros(self._env.world.size, header.shape[1])
        rows[:, _STATUS] = header[0, _STATUS]
        rows[self._first : self._first + self._env.shard.size] = header[:-1]
        return rows.view(-1)

    def _raise(self, started: SizesInFlight, status: int) -> None:
        error, started.error = started.error, None
        if error is None and status & _BAD_INPUT:
            error = _explanation(started.arguments)
        messages = gather_objects(None if error is None else str(error), self._env.world, "input errors")
        causes = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        try:
            if self._env.world.size == 1 and error is not None:
                raise error
            raise ValueError("\n".join(causes)) from error
        finally:
            del error  # as in ``send_sizes``


def _explanation(arguments: tuple[Any, ...]) -> Exception | None:
    """Return the error of an op that could only report invalid input in the header."""
    try:
        naive.route_ids(*arguments)
    except ValueError as error:
        return error
    return None


def _expanded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return one bag per sample and key where equal bags had been dropped, as one result matrix needs.

    Raises:
        ValueError: there are no inverse indices, which map samples to bags.
    """
    keys, firsts = features.keys(), features.lengths_offset_per_key()
    bags = torch.cat(
        [row + first for row, first in zip(inverse_rows(features, keys), firsts[:-1], strict=True)]
    )
    lengths, starts = features.lengths()[bags], features.offsets()[bags].long()
    ends = lengths.long().cumsum(0)
    ids = torch.arange(int(lengths.sum()), device=bags.device)
    ids += torch.repeat_interleave(starts - (ends - lengths), lengths.long())
    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        keys, features.values()[ids], None if weights is None else weights[ids], lengths=lengths
    )
