"""A batch on its path through a sharded module's lookup stages."""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from meshrec.comms.collectives import InFlight

# U: uses, Q: routes, R: ranks, K: keys, N: IDs


class Stage(enum.IntEnum):
    """Last completed stage, see [Note: the stages of a batch] in sharded_tables.py."""

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
    """The caller's IDs, and how many were sent."""

    values: Tensor
    offsets: Tensor
    segments: Tensor | None
    """int64 [K + 1] if batch sizes differ between keys."""
    num_keys: int
    keys: list[int]
    """Key number by use, [U]."""
    counts: Tensor
    """int64 [Q]: IDs sent per route, over all ranks and including local routes. On the CPU once
    ``InputDist.send_ids`` has read the sizes.
    """
    batches: list[int]
    """Bags by use, [U]."""
    weights: Tensor | None = None
    """Per-sample weights, fp32 [N]."""
    versions: Sequence[int] = ()
    """``values``, ``offsets`` and ``weights`` versions at the time of sending."""

    def bag_bounds(self) -> list[int]:
        """Return the first bag by key, and the total number of bags, [K + 1]."""
        if self.segments is not None:
            bounds: list[int] = self.segments.tolist()
            return bounds
        num_bags = (self.offsets.numel() - 1) // self.num_keys
        return list(map(num_bags.__mul__, range(self.num_keys + 1)))


class PackedIds(NamedTuple):
    """IDs packed by ``route_ids``: a message in int32 words per header row."""

    words: Tensor
    header: Tensor
    """int64 [n, 4] on the CPU."""
    elements: tuple[int, ...] = ()
    """Row elements requested by message, [n]; empty if rows are pooled."""


class LookupIds(NamedTuple):
    """IDs to look up on this rank, in block-major bags as the tbe ops read them."""

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    segments: Tensor
    batches: list[int]
    """Bags per route, by block; -1 if routes differ."""
    ragged: bool
    """Whether routes differ in some block."""
    elements: tuple[int, ...] = ()
    """Output elements by block; empty if rows are pooled."""
    pins: Sequence[object] = ()
    """Pins on ``values`` if these are slots, see ``tables.index.Resolved``."""


class Fetch(NamedTuple):
    """A batch's distinct IDs in flight to their owners, and the IDs other nodes request here."""

    slots: LookupIds
    """The node's IDs, as indices into the distinct IDs of the band."""
    distinct: list[Tensor]
    """Distinct IDs by band, int64 [U]."""
    owned: LookupIds
    """IDs to look up here, by node."""
    counts: list[list[int]]
    """IDs requested by node and local band, [M, B]."""


class LookupBatch:
    """State for a single batch, from routing to update.

    Every stage sets the fields for later stages. Autograd's graph holds the batch until the backward pass, so
    the batch must not hold the lookup's results: nothing would free such a cycle.
    """

    stage = Stage.ROUTED
    in_flight: InFlight | None
    """The collective the next stage waits for: sizes, IDs, rows, or row gradients."""

    # Set by ``route``, until the IDs are sent.
    arguments: tuple[Any, ...]
    """``route_ids`` arguments, from which an error can be explained."""
    routed: tuple[Tensor, Tensor, Tensor, Tensor] | None
    """The ``route_ids`` result, on the IDs' device. No rank has read it yet.

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

    # Set by ``exchange``. All ranks know the first two, so all or none take part in the collectives of
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
    """``ids[0].values`` before ``resolve``."""
    local_ids: LookupIds | None
    """IDs to look up in the data-parallel tables."""
    batches: list[int]
    """Bags per route, by shard-axis rank."""
    block_sizes: list[int]
    """Elements in this rank's output, by block."""

    # Set by ``resolve``.
    fetch: Fetch | None = None
    """This node's distinct IDs, if rows cross the network instead of sums."""

    # Set by ``look_up``, until the backward pass. A second lookup replaces these.
    has_rows = False
    """Whether the rows in tables with an index are in memory."""
    fetched: Sequence[Tensor]
    """The rows for ``fetch``."""
    foreign_writes: Sequence[int]
    """External writes by table, counted at lookup time."""
