"""Sends every id to the ranks that own its row: sizes first, then one packed message to each rank.

Errors that one rank finds in its own input travel with the sizes, so that every rank raises the same error
and none waits for a message that will not come.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import meshrec.ops.dist  # noqa: F401 - the ops must exist
from meshrec.comms.collectives import InFlight, Splits, all_to_all, gather_objects
from meshrec.distributed.routing import Routing
from meshrec.modules import BoundsCheckMode
from meshrec.modules.input_checks import check_device, inverse_rows, positions_of, sample_weights
from meshrec.ops.tbe.lookup import BATCH_TENSORS
from meshrec.ops.tbe.reporting import report_clamped
from meshrec.ops.versions import check_unchanged, versions_of
from meshrec.plan.mesh import ShardingEnv
from meshrec.sparse import KeyedJaggedTensor

# U uses, Q routes, R ranks, K keys, N ids

_HEADER = 4  # status, words, ids, bags per route (-1: they differ)
# What a rank says of itself in the status, as bits.
_BAD_INPUT, _TRAINS, _WANTS_WEIGHT_GRADS = 1, 2, 4


class SourceIds(NamedTuple):
    """The ids as the caller gave them, and what was sent of them."""

    values: Tensor
    offsets: Tensor
    segments: Tensor | None
    """int64 [K + 1] when batch sizes differ between keys."""
    num_keys: int
    keys: list[int]
    """[U] the key that each use reads."""
    counts: Tensor
    """int64 [Q] the ids sent on each route of all ranks, local ones included."""
    batches: list[int]
    """[U] bags of each use."""
    weights: Tensor | None = None
    """The per-sample weights, fp32 [N]."""
    versions: Sequence[int] = ()
    """Versions of ``values``, ``offsets`` and ``weights`` when they were sent."""

    def check_unchanged(self) -> None:
        """Raise ValueError if the caller has written to the batch since it was sent."""
        check_unchanged(BATCH_TENSORS, (self.values, self.offsets, self.weights), self.versions)

    def bag_bounds(self) -> list[int]:
        """[K + 1] the first bag of each key, and the number of bags."""
        if self.segments is not None:
            bounds: list[int] = self.segments.tolist()
            return bounds
        num_bags = (self.offsets.numel() - 1) // self.num_keys
        return list(map(num_bags.__mul__, range(self.num_keys + 1)))


class PackedIds(NamedTuple):
    """Ids packed by ``route_ids``: one message of int32 words for each row of the header [n, 4]."""

    words: Tensor
    header: Tensor


class LookupIds(NamedTuple):
    """Ids to look up here: block-major bags as the tbe ops read them."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    segments: Tensor
    batches: list[int]
    """Bags per route of each block, -1 where they differ."""
    ragged: bool
    """Whether they differ in some block."""


class Wishes(NamedTuple):
    """What the backward pass is to do. All ranks know, so that all take part in its collectives or none."""

    backward: bool
    """Whether some rank trains."""
    weight_grads: bool
    """Whether some rank wants the gradient of its per-sample weights."""


class Arrived(NamedTuple):
    """After the input distribution: what the caller gave, what is to be looked up, what every rank holds."""

    source: SourceIds
    message: PackedIds
    local: PackedIds
    weights: Tensor | None
    """fp32 [N] the caller's per-sample weights, where they require grad."""
    wishes: Wishes


@dataclass
class SizesInFlight:
    """Sizes are under way."""

    source: SourceIds | None
    message: PackedIds
    local: PackedIds
    weights: Tensor | None
    sizes: InFlight
    error: Exception | None


@dataclass
class Exchanging:
    """The packed ids are under way."""

    source: SourceIds
    local: PackedIds
    weights: Tensor | None
    wishes: Wishes
    header: Tensor
    payload: InFlight


class InputDist:
    """The id routing of one module: ``finish(exchange(start(features)))``.

    ``weighted``: whether the caller gives per-sample weights. ``bounds_check``: what happens to ids outside
    their table; with WARN and OFF they count as row 0 (a remote rank's memory is never read out of bounds).
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
        """Of a message, with the id's weight."""
        self._router = routing.router
        self._features = [use.feature for use in routing.uses]
        self._readers = [routing.tables[use.table].name for use in routing.uses]
        self._keys: tuple[Sequence[str], list[int]] | None = None
        self._first = env.replicate.rank * env.shard.size
        sizes = [_HEADER] * env.world.size
        self._size_splits = Splits(sizes, sizes)

    @property
    def num_clamped_ids(self) -> int:
        """How many ids ``BoundsCheckMode.WARN`` replaced so far, of this rank's input."""
        return int(self._num_clamped)

    def start(self, features: KeyedJaggedTensor, *, trains: bool) -> SizesInFlight:
        """Routes the ids and starts to exchange sizes. Never raises for bad input: ``exchange`` does,
        everywhere.

        ``trains``: whether this rank has tables to train, under grad mode.
        """
        num_ranks = self._env.shard.size
        weights = error = None
        try:
            source, weights, payload, header = self._route(features)
            status = (_TRAINS if trains else 0) | (_WANTS_WEIGHT_GRADS if weights is not None else 0)
        except Exception as caught:  # every error must reach the other ranks
            source, error, status = None, caught, _BAD_INPUT
            payload = torch.empty(0, dtype=torch.int32)
            header = torch.zeros(num_ranks + 1, _HEADER, dtype=torch.int64)
        header[:, 0] = status
        rows = header[:-1].reshape(-1) if self._env.replicate.size == 1 else self._world_rows(header)
        sizes = all_to_all(rows, self._size_splits, self._env.world, "sizes of ids")
        own = payload.numel() - int(header[-1, 1])
        message, local = PackedIds(payload[:own], header[:-1]), PackedIds(payload[own:], header[-1:])
        try:
            return SizesInFlight(source, message, local, weights, sizes, error)
        finally:
            del error  # in a circle of its traceback and this frame it would keep the batch

    def exchange(self, started: SizesInFlight) -> Exchanging:
        """Waits for the sizes and starts to exchange ids.

        Raises:
            ValueError: on every rank, when the input of any rank was bad.
        """
        rows = started.sizes.wait().cpu().view(-1, _HEADER)
        status = 0
        for each in rows[:, 0].tolist():
            status |= each
        if status & _BAD_INPUT:
            self._raise(started)
        assert started.source is not None
        wants_weight_grads = bool(status & _WANTS_WEIGHT_GRADS)
        wishes = Wishes(wants_weight_grads or bool(status & _TRAINS), wants_weight_grads)
        header = rows[self._first : self._first + self._env.shard.size]
        splits = Splits(started.message.header[:, 1].tolist(), header[:, 1].tolist())
        payload = all_to_all(started.message.words, splits, self._env.shard, "ids")
        return Exchanging(started.source, started.local, started.weights, wishes, header, payload)

    def finish(self, exchanging: Exchanging) -> Arrived:
        """Waits for the ids."""
        message = PackedIds(exchanging.payload.wait(), exchanging.header)
        return Arrived(exchanging.source, message, exchanging.local, exchanging.weights, exchanging.wishes)

    def unpack(self, message: PackedIds, blocks: list[int], num_routes: int) -> LookupIds:
        """The ids of a message, its blocks in the given order."""
        values, offsets, weights, segments = torch.ops.meshrec.unpack_ids.default(
            message.words, message.header, blocks, num_routes, self._weighted, self._routing.wide
        )
        batches = message.header[blocks, 3].tolist()
        return LookupIds(
            values, offsets, weights if self._weighted else None, segments, batches, -1 in batches
        )

    def _route(self, features: KeyedJaggedTensor) -> tuple[SourceIds, Tensor | None, Tensor, Tensor]:
        keys = features.keys()
        if self._keys is None or self._keys[0] != keys:
            self._keys = list(keys), positions_of(keys, self._features, self._readers)
        positions = self._keys[1]
        if not self._sequence and features.variable_stride_per_key():
            features = _expanded(features)
        weights = sample_weights(features, is_weighted=True) if self._weighted else None
        values, offsets = features.values(), features.offsets()
        check_device(values, self._routing.tables[0].name, self.device)
        strides, segments = features.stride_per_key(), features.segments_or_none()
        payload, header, counts, bad = torch.ops.meshrec.route_ids.default(
            values,
            offsets,
            None if weights is None else weights.detach(),
            segments,
            len(keys),
            positions,
            self._router,
            self._env.shard.size + 1,
            self._routing.wide,
            self._bounds_check is BoundsCheckMode.ERROR,
            self._routing.names,
        )
        if self._bounds_check is BoundsCheckMode.WARN:
            report_clamped(self._num_clamped, bad, self._routing.names)
        batches = list(map(strides.__getitem__, positions))
        versions = versions_of((values, offsets) if weights is None else (values, offsets, weights))
        source = SourceIds(
            values, offsets, segments, len(keys), positions, counts, batches, weights, versions
        )
        wanted = (
            weights if weights is not None and weights.requires_grad and torch.is_grad_enabled() else None
        )
        return source, wanted, payload, header

    def _world_rows(self, header: Tensor) -> Tensor:
        """A row for every rank of the world: ranks of other replica groups learn the status only."""
        rows = torch.zeros(self._env.world.size, _HEADER, dtype=torch.int64)
        rows[:, 0] = header[0, 0]
        rows[self._first : self._first + self._env.shard.size] = header[:-1]
        return rows.view(-1)

    def _raise(self, started: SizesInFlight) -> None:
        error, started.error = started.error, None
        messages = gather_objects(None if error is None else str(error), self._env.world, "input errors")
        causes = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        try:
            if self._env.world.size == 1 and error is not None:
                raise error
            raise ValueError("\n".join(causes)) from error
        finally:
            del error  # as in ``start``


def _expanded(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """One bag per sample and key, where equal bags had been dropped: what one result matrix needs.

    Raises:
        ValueError: without inverse indices, which say which bag each sample takes.
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
