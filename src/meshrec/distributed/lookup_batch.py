"""Batch state on the way through a sharded module's lookup stages."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from meshrec.comms.collectives import InFlight

# U: uses, Q: routes, R: ranks, K: keys, N: IDs


class Stage(enum.IntEnum):
    """Last completed stage of a batch; see [Note: the stages of a batch] in sharded_tables.py."""

    ROUTED = enum.auto()
    """IDs are packed, and sizes are in flight."""
    EXCHANGED = enum.auto()
    """All ranks know the sizes, and IDs are in flight."""
    ARRIVED = enum.auto()
    """The IDs to look up on this rank have arrived."""
    RESOLVED = enum.auto()
    """Keys are replaced by slots in tables with an index."""
    LOOKED_UP = enum.auto()
    """Rows are in flight to the requesting ranks, or have arrived there."""


class SourceIds(NamedTuple):
    """The caller's IDs on this rank, and ID counts for every route."""

    values: Tensor
    """IDs [N], key by key."""
    offsets: Tensor
    """Bag starts in ``values``, and N."""
    segments: Tensor | None
    """First bag by key, and the bag count, int64 [K + 1]; None if keys have equally many bags."""
    num_keys: int
    keys: list[int]
    """Key number by use, [U]."""
    counts: Tensor
    """IDs sent by route, int64 [Q]: all ranks' routes, then routes for the data-parallel tables. On the
    CPU once ``InputDist.send_ids`` has read the sizes.
    """
    batches: list[int]
    """Bag count by use, [U]."""
    weights: Tensor | None = None
    """Per-sample weights, fp32 [N]."""
    versions: Sequence[int] = ()
    """torch's version counters for ``values``, ``offsets`` and ``weights`` when the IDs were sent."""

    def bag_bounds(self) -> list[int]:
        """Return every key's first bag, and the total bag count, [K + 1]."""
        if self.segments is not None:
            bounds: list[int] = self.segments.tolist()
            return bounds
        num_bags = (self.offsets.numel() - 1) // self.num_keys
        return list(map(num_bags.__mul__, range(self.num_keys + 1)))


class PackedIds(NamedTuple):
    """Messages with IDs, packed by the op ``route_ids``."""

    words: Tensor
    """All messages, one after the other, int32."""
    header: Tensor
    """A row per message, int64 [n, 4] on the CPU: status, words, IDs, bags per route."""
    elements: tuple[int, ...] = ()
    """Row elements requested by every message, [n]; empty if rows are pooled."""


class LookupIds(NamedTuple):
    """IDs to look up on this rank: block by block (source rank), then route by route, then bag by bag."""

    values: Tensor
    """IDs, or slots after ``resolve``."""
    offsets: Tensor
    """Bag starts in ``values``, and the ID count."""
    weights: Tensor | None
    """Per-sample weights."""
    segments: Tensor
    """First bag by (block, route), and the bag count."""
    batches: list[int]
    """Bags per route, by block; -1 if routes differ."""
    ragged: bool
    """Whether routes have different bag counts in some block."""
    elements: tuple[int, ...] = ()
    """Output element count by block; empty if rows are pooled."""
    pins: Sequence[object] = ()
    """Pins keep the slots in ``values`` from being reused, see ``tables.index.Resolved``."""


class Fetch(NamedTuple):
    """Distinct IDs requested by this rank from other nodes, and IDs requested by nodes from this rank."""

    slots: LookupIds
    """This node's IDs, replaced by their indices among the distinct IDs in the band (row interval)."""
    distinct: list[Tensor]
    """Distinct IDs by band, int64 [U]."""
    owned: LookupIds
    """IDs requested by nodes from this rank, node by node."""
    counts: list[list[int]]
    """ID counts in ``owned``, by requesting node and local band, [M, B]."""


class LookupBatch:
    """Batch state, from routing to the update.

    Every stage sets fields read by later stages. Autograd's graph holds the batch until the backward pass.
    The batch must not hold lookup results, because they hold the graph: such a cycle would never be freed.
    """

    stage = Stage.ROUTED
    in_flight: InFlight | None
    """The collective the next stage waits for: sizes, IDs, rows, or row gradients."""

    # Set by ``route``, until the IDs are sent.
    arguments: tuple[Any, ...]
    """Arguments for the op ``route_ids``, kept to find the input error if the op reports one."""
    routed: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """Result from the op ``route_ids``, on the IDs' device, before any value is read on the host:

    - messages to all ranks, then the local message; a GPU may leave unused words at the end;
    - header, int64 [R + 1, 4], or [R + 1, 5] with the elements requested by message;
    - ``SourceIds.counts``;
    - invalid IDs by use, int64 [U].
    """
    error: Exception | None
    """This rank's input error. ``exchange`` raises it on every rank."""

    # Set by ``route``, until the backward pass has ended; unset after an input error.
    source: SourceIds
    sample_weights: Tensor | None
    """fp32 [N]: the caller's per-sample weights, if they require a gradient."""

    # Set by ``exchange``. All ranks know the first two, so all or none take part in collectives during
    # the backward pass.
    trains: bool
    """Whether some rank trains."""
    needs_weight_grads: bool
    """Whether some rank needs the per-sample weight gradient."""
    message: PackedIds
    """IDs for the split tables. The words arrive with ``arrive``."""
    local_message: PackedIds
    """IDs for the data-parallel tables."""

    # Set by ``arrive``.
    ids: list[LookupIds]
    """IDs to look up in the split tables, by rank played in this process. In tables with an index, these are
    keys before ``resolve`` and slots after.
    """
    keys: Tensor
    """``ids[0].values`` before ``resolve``, from which stochastic rounding draws."""
    local_ids: LookupIds | None
    """IDs to look up in the data-parallel tables."""
    batches: list[int]
    """Bags per route, by requesting rank on the shard axis."""
    block_sizes: list[int]
    """Element count in this rank's output, by block."""

    # Set by ``resolve``.
    fetch: Fetch | None = None
    """This node's distinct IDs, if rows cross the network instead of sums."""

    # Set by ``look_up``, until the backward pass. A second lookup replaces these.
    has_rows = False
    """Whether the rows of tables with files have arrived in memory."""
    fetched: Sequence[Tensor]
    """The rows for ``fetch.distinct``."""
    foreign_writes: Sequence[int]
    """User write count by table, at lookup time."""
