"""The state of a batch on the way through the stages of a sharded lookup.

A use is a feature looked up in a table. A route is the part of a use's IDs which goes to one rank together.
See [Note: how a plan becomes routes] in ``routing.py``, and [Note: the stages of a batch] in
``sharded_tables.py``.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from meshrec.comms.collectives import InFlight

# U: uses, Q: routes, R: ranks, K: keys, N: IDs


class Stage(enum.IntEnum):
    """The last stage which a batch has completed; see [Note: the stages of a batch] in sharded_tables.py."""

    ROUTED = enum.auto()
    """This rank's IDs are packed, and the size exchange has started."""
    EXCHANGED = enum.auto()
    """All ranks know the message sizes, and the ID exchange has started."""
    ARRIVED = enum.auto()
    """The IDs to look up on this rank have arrived."""
    RESOLVED = enum.auto()
    """In tables with an index, keys have been replaced by slots (positions of rows in memory)."""
    LOOKED_UP = enum.auto()
    """Rows have been looked up, and their exchange has started or ended."""


class SourceIds(NamedTuple):
    """The IDs with which the module was called on this rank, as in the KeyedJaggedTensor.

    N is the number of IDs, and K the number of keys (features). U is the number of uses, which are features
    looked up in a table. Q is the number of routes, which are groups of IDs sent to a rank together.
    """

    values: Tensor
    """IDs [N], key by key and bag by bag."""
    offsets: Tensor
    """Start of every bag in ``values``, followed by N."""
    segments: Tensor | None
    """First bag of every key, followed by the number of bags, int64 [K + 1]. None if all keys have the same
    bag count.
    """
    num_keys: int
    keys: list[int]
    """Number of the key which each use reads, [U]."""
    counts: Tensor
    """Number of IDs sent on each route, int64 [Q]: routes to all ranks, then routes for the data-parallel
    tables. On the CPU once ``InputDist.send_ids`` has read the sizes.
    """
    batches: list[int]
    """Number of bags in each use, [U]."""
    weights: Tensor | None = None
    """Per-sample weights, fp32 [N]."""
    versions: Sequence[int] = ()
    """torch's version counters for ``values``, ``offsets`` and ``weights`` when the IDs were sent."""

    def bag_bounds(self) -> list[int]:
        """Return the first bag of every key, followed by the number of bags, [K + 1]."""
        if self.segments is not None:
            bounds: list[int] = self.segments.tolist()
            return bounds
        num_bags = (self.offsets.numel() - 1) // self.num_keys
        return list(map(num_bags.__mul__, range(self.num_keys + 1)))


class PackedIds(NamedTuple):
    """Messages with IDs, packed by the op ``route_ids``: n messages, from or to n ranks."""

    words: Tensor
    """All messages, one after the other, int32."""
    header: Tensor
    """A row per message, int64 [n, 4] on the CPU: status bits, number of int32 words, number of IDs, number
    of bags per route. The last is -1 if routes have different numbers of bags.
    """
    elements: tuple[int, ...] = ()
    """Number of embedding values requested by each message, [n]; empty if rows are pooled."""


class LookupIds(NamedTuple):
    """The IDs to look up on this rank, sent by all ranks.

    The IDs from a rank form a block. A route is a group of IDs for the same table, feature and row interval.
    IDs are ordered block by block, then route by route, then bag by bag.
    """

    values: Tensor
    """IDs, or after ``resolve`` slots."""
    offsets: Tensor
    """Start of every bag in ``values``, followed by the number of IDs."""
    weights: Tensor | None
    """Per-sample weights, fp32; None if the module has none."""
    segments: Tensor
    """First bag of every (block, route), followed by the number of bags."""
    batches: list[int]
    """Number of bags per route in each block; -1 if routes in the block have different numbers of bags."""
    ragged: bool
    """Whether routes have different numbers of bags in some block."""
    elements: tuple[int, ...] = ()
    """Number of output values for each block; empty if rows are pooled."""
    pins: Sequence[object] = ()
    """Objects which reserve the slots in ``values``. While a pin exists and is not released, its slots are
    not given to other rows; see ``tables.index.Resolved``.
    """


class Fetch(NamedTuple):
    """Rows which this rank fetches from other nodes, and rows which other nodes fetch from this rank.

    A band is a row interval of a table. See [Note: two levels] in ``node_rows.py``.
    """

    slots: LookupIds
    """The IDs from this node's ranks. Every ID is replaced by its index in the ``distinct`` IDs of its band.
    """
    distinct: list[Tensor]
    """Distinct IDs in each band, int64 [U]. This rank fetches their rows."""
    owned: LookupIds
    """IDs which the nodes request from this rank, node by node."""
    counts: list[list[int]]
    """``counts[node][band]`` is the number of IDs in ``owned`` which a node requests in a band of this
    rank.
    """


class LookupBatch:
    """The state of a batch, from routing its IDs to updating the tables.

    Every stage sets fields that later stages read. The autograd graph keeps the batch alive until the
    backward pass. The batch must not contain lookup results, because lookup results keep the graph alive:
    graph and batch would then be a cycle that is never freed.
    """

    # The last completed stage, set by `ShardedTables`.
    stage = Stage.ROUTED
    in_flight: InFlight | None
    """The running collective for which the next stage waits: sizes, IDs, rows, or row gradients."""

    # Set by ``route``, until the IDs are sent.
    arguments: tuple[Any, ...]
    """Arguments for the op ``route_ids``, kept to find the input error if the op reports one."""
    routed: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Result of the op ``route_ids``, on the device of the IDs, before any value is read on the host:

    - messages to all ranks, then the message for the data-parallel tables; a GPU may leave unused words at
      the end;
    - headers, int64 [R + 1, 4], or [R + 1, 5] with the number of values requested by each message;
    - ``SourceIds.counts``;
    - number of invalid IDs in each use, int64 [U].
    """
    error: Exception | None
    """Error in this rank's input. ``InputDist.send_ids`` raises it on every rank."""

    # Set by ``route``, until the backward pass has ended; unset after an input error.
    source: SourceIds
    sample_weights: Tensor | None
    """The caller's per-sample weights, fp32 [N], if they require a gradient; else None."""

    # Set in stage EXCHANGED. All ranks have the same values in the first two fields, so either all ranks take
    # part in the collectives of the backward pass, or none.
    trains: bool
    """Whether tables are trained on some rank, or per-sample weights need gradients."""
    needs_weight_grads: bool
    """Whether some rank needs the gradient for per-sample weights."""
    message: PackedIds
    """IDs for the tables split over ranks. The words are empty until stage ARRIVED."""
    local_message: PackedIds
    """IDs for the data-parallel tables."""

    # Set in stage ARRIVED.
    ids: list[LookupIds]
    """IDs to look up in the tables split over ranks. An entry for this rank, or with ``env.devices`` for each
    rank. In tables with an index, these are keys until stage RESOLVED, and then slots.
    """
    keys: Tensor
    """``ids[0].values`` before stage RESOLVED. Stochastic rounding derives random numbers from the keys."""
    local_ids: LookupIds | None
    """IDs to look up in the data-parallel tables."""
    batches: list[int]
    """Bags per route from each rank on the shard axis."""
    block_sizes: list[int]
    """Number of values in this rank's output for each block, that is, for each requesting rank."""

    # Set in stage RESOLVED.
    fetch: Fetch | None = None
    """The rows exchanged between nodes, if nodes exchange rows instead of sums; else None."""

    # Set by ``look_up``, until the backward pass. A second lookup replaces these.
    has_rows = False
    """Whether all rows which must be read from files are in memory."""
    fetched: Sequence[Tensor]
    """The fetched rows for ``fetch.distinct``."""
    foreign_writes: Sequence[int]
    """For every fused table, the number of in-place writes to the weights before the lookup, not counting
    updates.
    """
