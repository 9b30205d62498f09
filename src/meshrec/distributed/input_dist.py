"""Sends every id to the ranks that own its row: sizes first, then one packed message to each rank.

Errors that one rank finds in its own input travel with the sizes, so that every rank raises the same error and none
waits for a message that will not come.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.distributed.collectives import InFlight, Splits, all_to_all, gather_objects
from meshrec.distributed.mesh import ShardingEnv
from meshrec.distributed.routing import Routing
import meshrec.ops.dist.naive  # noqa: F401 - the ops must exist

# U uses, Q routes, R ranks, K keys, N ids

_logger = logging.getLogger("meshrec")
_HEADER = 4  # status, words, ids, bags per route (-1: they differ)
_NO_BAGS = -1


class Features(Protocol):
    """What is read of a KeyedJaggedTensor."""

    def keys(self) -> Sequence[str]: ...
    def values(self) -> Tensor: ...
    def offsets(self) -> Tensor: ...
    def weights_or_none(self) -> Tensor | None: ...
    def stride_per_key(self) -> Sequence[int]: ...


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


class Message(NamedTuple):
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


class Arrived(NamedTuple):
    """After the input distribution: what the caller gave, what is to be looked up, what every rank holds."""

    source: SourceIds
    message: Message
    local: Message


@dataclass
class Started:
    """Sizes are under way."""

    source: SourceIds | None
    message: Message
    local: Message
    sizes: InFlight
    error: Exception | None


@dataclass
class Exchanging:
    """The packed ids are under way."""

    source: SourceIds
    local: Message
    header: Tensor
    payload: InFlight


class InputDist:
    """The id routing of one module: ``finish(exchange(start(features)))``.

    ``weighted``: whether the caller gives per-sample weights. ``check_ids``: ids outside a table raise; without it
    they count as row 0, and with ``warn`` the log says so once.
    """

    def __init__(
        self, routing: Routing, env: ShardingEnv, *, weighted: bool, check_ids: bool = True, warn: bool = False
    ) -> None:
        self._routing, self._env = routing, env
        self._weighted, self._check_ids, self._warn = weighted, check_ids, warn
        self._router = routing.router
        self._features = [use.feature for use in routing.uses]
        self._keys: tuple[Sequence[str], list[int]] | None = None
        self._first = env.replicate.rank * env.shard.size

    def start(self, features: Features) -> Started:
        """Routes the ids and starts to exchange sizes. Never raises for bad input: ``exchange`` does, everywhere."""
        num_ranks = self._env.shard.size
        try:
            source, payload, header = self._route(features)
            error = None
        except Exception as caught:  # every error must reach the other ranks
            source, error = None, caught
            payload = torch.empty(0, dtype=torch.int32)
            header = torch.zeros(num_ranks + 1, _HEADER, dtype=torch.int64)
            header[:, 0] = 1
        sizes = all_to_all(
            self._world_rows(header), self._size_splits(), self._env.world, "sizes of ids"
        )
        own = payload.numel() - int(header[-1, 1])
        return Started(
            source,
            Message(payload[:own], header[:-1]),
            Message(payload[own:], header[-1:]),
            sizes,
            error,
        )

    def exchange(self, started: Started) -> Exchanging:
        """Waits for the sizes and starts to exchange ids.

        Raises:
            ValueError: on every rank, when the input of any rank was bad.
        """
        rows = started.sizes.wait().cpu().view(-1, _HEADER)
        if bool(rows[:, 0].any()):
            self._raise(started.error)
        assert started.source is not None
        header = rows[self._first : self._first + self._env.shard.size]
        splits = Splits(started.message.header[:, 1].tolist(), header[:, 1].tolist())
        payload = all_to_all(started.message.words, splits, self._env.shard, "ids")
        return Exchanging(started.source, started.local, header, payload)

    def finish(self, exchanging: Exchanging) -> Arrived:
        """Waits for the ids."""
        message = Message(exchanging.payload.wait(), exchanging.header)
        return Arrived(exchanging.source, message, exchanging.local)

    def unpack(self, message: Message, blocks: list[int], num_routes: int) -> LookupIds:
        """The ids of a message, its blocks in the given order."""
        values, offsets, weights, segments = torch.ops.meshrec.unpack_ids(
            message.words, message.header, blocks, num_routes, self._weighted, self._routing.wide
        )
        batches = message.header[:, 3].tolist()
        return LookupIds(
            values,
            offsets,
            weights if self._weighted else None,
            segments,
            [batches[block] for block in blocks],
        )

    def _route(self, features: Features) -> tuple[SourceIds, Tensor, Tensor]:
        keys = features.keys()
        if self._keys is None or self._keys[0] != keys:
            self._keys = list(keys), self._positions(keys)
        positions = self._keys[1]
        weights = features.weights_or_none()
        if self._weighted and weights is None:
            raise ValueError(
                "this collection is weighted (is_weighted=True), but the features carry no weights. "
                "Give weights, or build the collection with is_weighted=False."
            )
        strides = features.stride_per_key()
        segments = None
        if any(stride != strides[0] for stride in strides):
            segments = torch.tensor([0, *strides]).cumsum(0)
        values, offsets = features.values(), features.offsets()
        payload, header, counts, bad = torch.ops.meshrec.route_ids(
            values,
            offsets,
            weights.float() if self._weighted and weights is not None else None,
            segments,
            len(keys),
            positions,
            self._router,
            self._env.shard.size + 1,
            self._routing.wide,
            self._check_ids,
            self._routing.names,
        )
        if self._warn and bool(bad.any()):
            self._report(bad.tolist())
        batches = [strides[key] for key in positions]
        return SourceIds(values, offsets, segments, len(keys), positions, counts, batches), payload, header

    def _positions(self, keys: Sequence[str]) -> list[int]:
        place = {key: position for position, key in enumerate(keys)}
        if missing := [feature for feature in self._features if feature not in place]:
            raise ValueError(
                f"feature {missing[0]!r} is missing: the features are {list(keys)}, the tables read "
                f"{sorted(set(self._features))}. Give every feature, empty ones too."
            )
        return [place[feature] for feature in self._features]

    def _report(self, bad: list[int]) -> None:
        self._warn = False
        for use, count in zip(self._routing.uses, bad, strict=True):
            if count:
                _logger.warning(
                    "table %r: %d ids of feature %r are outside [0, %d) and count as row 0 "
                    "(further warnings of this collection are left out)",
                    self._routing.tables[use.table].name,
                    count,
                    use.feature,
                    self._routing.tables[use.table].num_rows,
                )

    def _world_rows(self, header: Tensor) -> Tensor:
        """A row for every rank of the world: ranks of other replica groups learn the status only."""
        if self._env.replicate.size == 1:
            return header[:-1].reshape(-1)
        rows = torch.zeros(self._env.world.size, _HEADER, dtype=torch.int64)
        rows[:, 0] = header[0, 0]
        rows[self._first : self._first + self._env.shard.size] = header[:-1]
        return rows.view(-1)

    def _size_splits(self) -> Splits:
        splits = [_HEADER] * self._env.world.size
        return Splits(splits, splits)

    def _raise(self, error: Exception | None) -> None:
        messages = gather_objects(None if error is None else str(error), self._env.world, "input errors")
        causes = [f"rank {rank}: {message}" for rank, message in enumerate(messages) if message is not None]
        if self._env.world.size == 1 and error is not None:
            raise error
        raise ValueError("\n".join(causes)) from error
