"""Dist operators in plain torch: the reference for the kernels, and the fallback on other devices.

These operators run before and after the all-to-alls of sharded tables. A rank packs its IDs into a message
for every rank, receives messages in return, looks up the rows of its shards, sends them back, and assembles
the rows that it gets. Terms that the operators share (U uses, Q routes, K keys, R ranks, N IDs, B bags per
use, D width):

- A *use* is a pair of a feature and the table that it reads. Use u reads the IDs of key ``keys[u]``. The IDs
  are given by ``values_N``, ``offsets`` and ``segments`` (first bag index per key, followed by the
  bag count, int64 [K + 1] on the CPU; None: equal bag counts for all keys).
- A *route* connects a use to a table shard. It sends the IDs that fall into the shard to the shard's rank.
- ``router`` is the plan as five int64 tensors on the CPU: ``cut_start``, ``cuts``, ``interval_start``,
  ``interval_routes``, ``routes``. The rows of a table are divided into intervals at the cuts 0 = c_0 < ... <
  c_P = row count. The cuts for use u are ``cuts[cut_start[u] : cut_start[u + 1]]``. (Hashed keys have cuts
  from -2^63 to 2^63 - 1, which means unbounded: every int64 is inside.) Intervals are numbered across all
  uses. The routes that take the IDs in interval i are listed in ``interval_routes``, starting at
  ``interval_start[i]``. ``routes`` [Q, 3] holds the rank, the use and the first row of each route, and is
  ordered by rank.
- A *message* is a sequence of int32 words: [bags per route, if they differ between uses] [bag lengths, route
  by route] [IDs minus the route's first row, as int32, or as int64 with ``wide``] [weights, fp32]. ``header``
  int64 [R, 4] holds for each message: status (0), number of words, number of IDs, bags per route (-1: they
  differ).
- ``pieces`` int64 [P, 6] says where the columns of a pooled output come from: (source, first column in the
  source, width, first column in the output, whether to add, use). Sources are the ranks, with ``dims[r]``
  columns from rank r; source R is ``local``. If the use is not -1, the piece is divided by the bag lengths of
  that use.
- ``lookups`` int64 [L, 4] says where the rows of sequence lookups come from, ordered by rank: (route, use,
  first column, width).
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.tbe.layout import check_offsets, segment_bounds

_UNBOUNDED = (1 << 63) - 1  # last cut for a use with hashed keys


class _Router(NamedTuple):
    """The ``router`` tensors as nested lists."""

    cuts: list[list[int]]
    """Row cuts per use; [U]."""
    intervals: list[list[int]]
    """Intervals whose IDs each route takes, numbered within the use; [Q]."""
    routes: list[list[int]]
    """Rank, use and first row per route; [Q]."""

    def num_rows(self, use: int) -> int:
        """Return a table's row count, given the number of a use (a pair of feature and table)."""
        return self.cuts[use][-1]


def _parse_router(router: list[Tensor]) -> _Router:
    """Convert the ``router`` tensors to lists."""
    cut_start, cuts, interval_start, interval_routes, routes = (tensor.tolist() for tensor in router)
    intervals: list[list[int]] = [[] for _ in range(len(routes) // 3)]
    number = 0
    for start, end in pairwise(cut_start):
        for interval in range(end - start - 1):
            for route in interval_routes[interval_start[number] : interval_start[number + 1]]:
                # Numbered within the use, as searchsorted in _ids_of_use numbers them.
                intervals[route].append(interval)
            number += 1
    return _Router(
        [cuts[start:end] for start, end in pairwise(cut_start)],
        intervals,
        [routes[i : i + 3] for i in range(0, len(routes), 3)],
    )


class _FeatureIds(NamedTuple):
    """The IDs that a feature reads from a table (a *use*, see the module docstring)."""

    ids: slice
    """Range of the IDs in ``values_N``."""
    lengths_B: Tensor
    """IDs per bag, int64."""
    rows: Tensor
    """The IDs as table rows, int64. An ID outside the table becomes row 0."""
    intervals: Tensor
    """Interval that each ID falls into, int64."""
    bad: Tensor
    """Whether an ID is outside the table, bool."""


def _ids_of_use(
    values: Tensor, offsets: Tensor, bounds: list[int], keys: list[int], use: int, router: _Router
) -> _FeatureIds:
    """Find the IDs that a use (a pair of feature and table) reads, and the row interval of every ID.

    The plan cuts the rows of a table into intervals. All IDs in an interval go to the same shards.

    Args:
        offsets: first ID index per bag, followed by N.
        bounds: first bag index per key, followed by the bag count.
    """
    start, end = bounds[keys[use]], bounds[keys[use] + 1]
    offsets_B1 = offsets[start : end + 1].long()
    ids = slice(int(offsets_B1[0]), int(offsets_B1[-1]))
    rows = values[ids].long()
    # The first cut is 0, or -2^63 for hashed keys.
    bad = (rows < router.cuts[use][0]) | (rows >= router.num_rows(use))
    if router.num_rows(use) == _UNBOUNDED:
        # Hashed keys may be any int64, including the one that stands for the end.
        bad = torch.zeros_like(bad)
    # Without check_ids, an ID outside the table reads row 0.
    rows = rows.masked_fill(bad, 0)
    # Only inner cuts: the first and the last interval have no outer bound here.
    cuts = torch.tensor(router.cuts[use][1:-1], dtype=torch.int64, device=values.device)
    # right=True: a row at a cut belongs to the interval after the cut.
    return _FeatureIds(ids, offsets_B1.diff(), rows, torch.searchsorted(cuts, rows, right=True), bad)


class IdsToRoute(NamedTuple):
    r"""Arguments for ``route_ids``: a batch, and the plan by which to route it."""

    values: Tensor
    """IDs, int32 or int64 [N]."""
    offsets: Tensor
    """First ID index per bag, followed by N."""
    weights: Tensor | None
    """Per-sample weights, fp32 [N]."""
    segments: Tensor | None
    """First bag index per key, followed by the bag count."""
    num_keys: int
    keys: list[int]
    """Key per use; [U]."""
    router: list[Tensor]
    """The plan, see the module docstring."""
    num_ranks: int
    wide: bool
    """Whether to send IDs as int64 instead of int32."""
    check_ids: bool
    """Whether to raise for IDs outside the table and for NaN weights. If not, such IDs read row 0."""
    names: Tensor
    r"""UTF-8 bytes of ``"table\tfeature\n"`` per use, uint8, for messages."""


def route_ids(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack the IDs of a batch into a message for every rank. The arguments are the fields of ``IdsToRoute``.

    A use is a pair of a feature and the table that it reads. A route connects a use to a table shard.

    Returns:
        - All messages, end to end in rank order, int32; see the module docstring.
        - Header per message, int64 [R, 4].
        - Number of IDs per route, int64 [Q].
        - Number of IDs outside the table per use, int64 [U].

    Raises:
        ValueError: invalid offsets; or, with ``check_ids``, an ID outside the table or a NaN weight.
    """
    values, offsets, weights, segments, num_keys, keys, router, num_ranks, wide, check_ids, names = (
        IdsToRoute(*arguments)
    )
    check_offsets(offsets, values.numel())
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    plan = _parse_router(router)
    uses = [_ids_of_use(values, offsets, bounds, keys, use, plan) for use in range(len(keys))]
    if check_ids:
        for use, ids in enumerate(uses):
            _check_ids_and_weights(ids, use, values, weights, plan.num_rows(use), names)
    # If all uses have the same bag count, the header holds it. Otherwise each message starts with the counts.
    batches = {ids.lengths_B.numel() for ids in uses}
    batch = batches.pop() if len(batches) == 1 else (-1 if batches else 0)
    # Status 0: this version raises errors instead.
    header = torch.zeros(num_ranks, 4, dtype=torch.int64)
    header[:, 3] = batch
    counts = torch.zeros(len(plan.routes), dtype=torch.int64)
    payload: list[Tensor] = [torch.empty(0, dtype=torch.int32, device=values.device)]
    # In rank order, as the all-to-all sends them.
    for rank in range(num_ranks):
        # Bag counts, lengths, IDs, weights.
        parts: list[list[Tensor]] = [[], [], [], []]
        for route, (_, use, first_row) in enumerate(plan.routes):
            if plan.routes[route][0] != rank:
                continue
            ids = uses[use]
            # Several routes may take the same interval: shards that hold other columns of the same rows.
            taken = torch.isin(ids.intervals, torch.tensor(plan.intervals[route], device=values.device))
            bags = torch.repeat_interleave(ids.lengths_B)[taken]
            local = ids.rows[taken] - first_row
            counts[route] = local.numel()
            if batch < 0:
                parts[0].append(torch.tensor([ids.lengths_B.numel()], device=values.device).int())
            parts[1].append(torch.bincount(bags, minlength=ids.lengths_B.numel()).int())
            # The receiver knows only local rows: send positions within the shard.
            parts[2].append(local.view(torch.int32) if wide else local.int())
            if weights is not None:
                # A message has a single dtype, so send the float bits.
                parts[3].append(weights[ids.ids][taken].view(torch.int32))
        message = [part for group in parts for part in group]
        header[rank, 1] = sum(part.numel() for part in message)
        # parts[2] counts words, of which a wide ID has two.
        header[rank, 2] = sum(part.numel() for part in parts[2]) // (2 if wide else 1)
        payload += message
    bad = torch.tensor([int(ids.bad.sum()) for ids in uses], dtype=torch.int64)
    return torch.cat(payload), header, counts, bad


def unpack_ids(
    received: Tensor, header: Tensor, blocks: list[int], num_routes: int, weighted: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack the messages received from all ranks into a batch for the TBE operators.

    The TBE operators see a batch with a block per message, and with a key per route to this rank. A route
    connects a use (a pair of feature and table) to a shard.

    Args:
        header: header per message, int64 [R, 4].
        wide: whether IDs are int64.

    Returns:
        - IDs, int32, or int64 if ``wide``.
        - First ID index per bag, followed by the number of IDs, int64 [bags + 1].
        - Weight per ID, fp32; empty unless ``weighted``.
        - First bag index per block and route, followed by the bag count, int64 [blocks * routes + 1].

    Raises:
        ValueError: the header does not match the received words.
    """
    words, num_ids, batches = header[:, 1].tolist(), header[:, 2].tolist(), header[:, 3].tolist()
    if sum(words) != received.numel():
        raise ValueError(f"header speaks of {sum(words)} words, {received.numel()} were received")
    messages = received.split(words)
    lengths, values, weights = [], [], []
    bags: list[int] = []
    for rank in blocks:
        # A message starts with bag counts only if these differ between uses.
        message, prefix = messages[rank], num_routes if batches[rank] < 0 else 0
        block_bags = message[:prefix].tolist() if prefix else [batches[rank]] * num_routes
        ids_start = prefix + sum(block_bags)
        ids_end = ids_start + num_ids[rank] * (2 if wide else 1)
        bags += block_bags
        lengths.append(message[prefix:ids_start])
        ids = message[ids_start:ids_end]
        # clone() aligns the words: a message may start at an odd word, which cannot be viewed as int64.
        values.append(ids.clone().view(torch.int64) if wide else ids)
        weights.append(message[ids_end:].clone().view(torch.float32))
        if int(lengths[-1].sum()) != num_ids[rank]:
            raise ValueError(f"lengths do not sum to the number of ids in the message of rank {rank}")
    offsets = torch.cat([received.new_zeros(1, dtype=torch.int64), torch.cat(lengths).long().cumsum(0)])
    # On the CPU, where the TBE operators read them without synchronization.
    segments = torch.tensor(list(accumulate(bags, initial=0)), dtype=torch.int64)
    empty = received.new_empty(0, dtype=torch.float32)
    return torch.cat(values), offsets, torch.cat(weights) if weighted else empty, segments


class PooledRows(NamedTuple):
    """Arguments for ``gather_pooled`` and ``gather_coded``: pooled rows, and where their columns go."""

    received: Tensor
    """Pooled rows from all ranks, end to end: a matrix [B, dims[r]] from rank r."""
    local: Tensor | None
    """Pooled rows from tables that this rank holds itself, fp32 [B, columns]."""
    pieces: Tensor
    """Positions of columns, see the module docstring."""
    dims: list[int]
    """Columns per rank; [R]."""
    batch: int
    """B, the number of samples."""
    out_dim: int
    """Output column count."""
    offsets: Tensor | None
    """First ID index per bag, followed by N; needed for mean pooling."""
    segments: Tensor | None
    """First bag index per key, followed by the bag count."""
    num_keys: int
    keys: list[int]
    """Key per use; [U]."""

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple["PooledRows", Sequence[Any]]:
        """Split the arguments of an operator into the ``PooledRows`` fields and the remaining arguments."""
        shared = len(cls._fields)
        return cls(*arguments[:shared]), arguments[shared:]


def gather_pooled(*arguments: Any) -> Tensor:
    """Assemble the pooled output from the columns that all ranks sent, fp32 [B, out_dim].

    A piece is a range of columns that a rank sent; see ``pieces`` in the module docstring. A piece is copied
    to the output, or if its "add" field is set, added to the output of earlier pieces. The arguments are the
    fields of ``PooledRows``, followed by:

    - ``link``: handle of a ``HostLink``, through which the compiled kernel reads the rows of the other ranks
      from their memory (comms/host_link.py). ``received`` is then empty, and only gives the dtype. 0: no
      link.
    - ``exchange``: number of this exchange on the link, equal on all ranks.
    """
    rows, _ = PooledRows.split(arguments)
    received, local, pieces, dims, batch, out_dim, offsets, segments, num_keys, keys = rows
    if received.numel() != batch * sum(dims):
        raise ValueError(f"received {received.numel()} elements in place of {batch * sum(dims)}")
    # The rows from rank r are a matrix [batch, dims[r]].
    sources = [
        block.view(batch, dim).float()
        for block, dim in zip(received.split([batch * dim for dim in dims]), dims, strict=True)
    ]
    if local is not None:
        # The last source, with the number R.
        sources.append(local)
    # The pieces cover all columns, so nothing needs zeroing.
    out = received.new_empty(batch, out_dim, dtype=torch.float32)
    for source, source_column, width, column, add, mean_use in pieces.tolist():
        part = sources[source][:, source_column : source_column + width]
        if mean_use >= 0:
            part = part * _inverse_lengths(offsets, segments, num_keys, keys[mean_use])
        target = out[:, column : column + width]
        _ = target.add_(part) if add else target.copy_(part)
    return out


def gather_coded(*arguments: Any) -> Tensor:
    """Assemble the pooled output like ``gather_pooled``, from rows encoded by ``wire_encode`` (uint8).

    The rows from a rank are a block in the encoding. The arguments are the fields of ``PooledRows``, followed
    by ``starts`` (number of each rank's first column, see ``wire_naive``), ``widths`` and ``formats`` (per
    column), ``link`` and ``exchange``.
    """
    rows, (starts, widths, formats, *_) = PooledRows.split(arguments)
    ops = torch.ops.meshrec
    # Through the dispatcher, which selects a kernel if there is one.
    values = ops.wire_decode(rows.received, [rows.batch] * len(rows.dims), starts, widths, formats)
    out: Tensor = ops.gather_pooled(*rows._replace(received=values))
    return out


class PooledGradient(NamedTuple):
    """Arguments for ``scatter_pooled``: the gradient of a pooled output, and where its columns go."""

    grad: Tensor
    """Output gradient, fp32 [B, out_dim]."""
    pieces: Tensor
    """Positions of columns, see the module docstring."""
    dims: list[int]
    """Columns to send per rank; [R]."""
    local_dim: int
    """Columns for tables on this rank."""
    offsets: Tensor | None
    """First ID index per bag, followed by N; needed for mean pooling."""
    segments: Tensor | None
    """First bag index per key, followed by the bag count."""
    num_keys: int
    keys: list[int]
    """Key per use; [U]."""
    scale: float
    """Factor to multiply the gradient by."""
    dtype: torch.dtype
    """Dtype in which to send the gradient."""


def scatter_pooled(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Split an output gradient into the columns for all ranks: the backward pass of ``gather_pooled``.

    The arguments are the fields of ``PooledGradient``.

    Returns:
        - Gradients to send, in ``dtype``, 1-D. It has a matrix [B, dims[r]] for every rank r, end to end.
        - Gradient for tables on this rank, fp32 [B, local_dim].
    """
    gradient = PooledGradient(*arguments)
    grad, pieces, dims, local_dim, offsets, segments, num_keys, keys, scale, dtype = gradient
    batch = grad.shape[0]
    sources = [grad.new_empty(batch, dim) for dim in (*dims, local_dim)]
    for source, source_column, width, column, _, mean_use in pieces.tolist():
        # A piece that the forward pass added to others gets the whole gradient.
        part = grad[:, column : column + width] * scale
        if mean_use >= 0:
            part = part * _inverse_lengths(offsets, segments, num_keys, keys[mean_use])
        sources[source][:, source_column : source_column + width] = part
    # The last source stays on this rank, in fp32.
    return torch.cat([source.view(-1) for source in sources[:-1]]).to(dtype), sources[-1]


class SequenceRows(NamedTuple):
    """Arguments that both sequence operators share: a batch, and where the exchanged rows come from."""

    values: Tensor
    """IDs, int32 or int64 [N]."""
    offsets: Tensor
    """First ID index per bag, followed by N."""
    segments: Tensor | None
    """First bag index per key, followed by the bag count."""
    num_keys: int
    keys: list[int]
    """Key per use; [U]."""
    router: list[Tensor]
    """The plan, see the module docstring."""
    lookups: Tensor
    """Route, use, first column and width of each part of a row; int64 [L, 4]."""
    counts: Tensor
    """ID count per route, sent by this rank, int64 [Q]."""
    dims: list[int]
    """Row width per use; 0 for a use that is left out; [U]."""

    def num_elements(self) -> int:
        """Return the number of elements in the message with the rows for the IDs that this rank sent."""
        return int((self.counts.cpu()[self.lookups[:, 0]] * self.lookups[:, 3]).sum())


def gather_sequence(received: Tensor, *arguments: Any) -> Tensor:
    """Assemble the rows of sequence lookups from the parts that all ranks sent.

    A use is a pair of a feature and the table that it reads. The arguments after ``received`` are the fields
    of ``SequenceRows``.

    Returns:
        A 1-D fp32 tensor with a matrix [number of IDs, dims[u]] for every use u, end to end. A use with width
            0 has no elements.
    """
    positions, num_elements, out_elements = _sequence_positions(SequenceRows(*arguments))
    if received.numel() != num_elements:
        raise ValueError(f"received {received.numel()} elements in place of {num_elements}")
    out = received.new_empty(out_elements, dtype=torch.float32)
    for message_slice, elements in positions:
        out[elements] = received[message_slice].float()
    return out


def scatter_sequence(grad: Tensor, *arguments: Any) -> Tensor:
    """Split the gradient of sequence lookups into parts for all ranks. Inverse of ``gather_sequence``.

    The arguments after ``grad`` are the fields of ``SequenceRows``, then ``scale`` (a factor for the
    gradient), and the dtype in which to send the gradient.
    """
    *shared, scale, dtype = arguments
    positions, num_elements, out_elements = _sequence_positions(SequenceRows(*shared))
    if grad.numel() != out_elements:
        raise ValueError(f"the gradient must be float32 with {out_elements} elements, got {grad.numel()}")
    out = grad.new_empty(num_elements, dtype=dtype)
    for message_slice, elements in positions:
        out[message_slice] = (grad[elements] * scale).to(dtype)
    return out


class WeightGradients(NamedTuple):
    """Arguments for ``gather_weight_grads``: per-sample weight gradients received from all ranks."""

    received: Tensor
    """A value for each ID sent, route by route, fp32."""
    values: Tensor
    """IDs [N]."""
    offsets: Tensor
    """First ID index per bag, followed by N."""
    segments: Tensor | None
    """First bag index per key, followed by the bag count."""
    num_keys: int
    keys: list[int]
    """Key per use; [U]."""
    router: list[Tensor]
    """The plan, see the module docstring."""
    counts: Tensor
    """ID count per route, int64 [Q]."""


def gather_weight_grads(*arguments: Any) -> Tensor:
    """Return the gradient of the per-sample weights, fp32 [N].

    A use is a pair of a feature and the table that it reads. A route connects a use to a table shard. Every
    route over which this rank sent an ID returns a gradient for the weight of the ID, and these gradients are
    added. An ID that no use reads gets 0. The arguments are the fields of ``WeightGradients``.
    """
    received, values, offsets, segments, num_keys, keys, router, counts = WeightGradients(*arguments)
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    plan = _parse_router(router)
    if received.numel() != int(counts.sum()):
        raise ValueError(f"received {received.numel()} elements in place of {int(counts.sum())}")
    uses = [_ids_of_use(values, offsets, bounds, keys, use, plan) for use in range(len(keys))]
    out = received.new_zeros(values.numel(), dtype=torch.float32)
    for route, part in enumerate(received.split(counts.tolist())):
        ids = uses[plan.routes[route][1]]
        intervals = torch.tensor(plan.intervals[route], device=values.device)
        # The slice is a view of ``out``, so this adds in place.
        out[ids.ids][torch.isin(ids.intervals, intervals)] += part
    return out


def _sequence_positions(batch: SequenceRows) -> tuple[list[tuple[slice, Tensor]], int, int]:
    """Compute where the rows of every sequence lookup are in the message and in the result.

    Returns:
        - Pairs, one per lookup. A pair has a slice of the message, and the positions of the same elements in
          the result, int64.
        - Number of elements in the message.
        - Number of elements in the result.
    """
    values, offsets, segments, num_keys, keys, router, lookups, _, dims = batch
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    plan = _parse_router(router)
    uses = [_ids_of_use(values, offsets, bounds, keys, use, plan) for use in range(len(keys))]
    # A use that is left out has width 0, so it takes no elements.
    sizes = [ids.rows.numel() * dim for ids, dim in zip(uses, dims, strict=True)]
    starts = list(accumulate(sizes, initial=0))
    positions, element = [], 0
    # Lookups are ordered by rank, like the rows in the message.
    for route, use, column, width in lookups.tolist():
        intervals = torch.tensor(plan.intervals[route], device=values.device)
        # A column vector, which broadcasts against the columns.
        taken = torch.isin(uses[use].intervals, intervals).nonzero()
        columns = torch.arange(column, column + width, device=values.device)
        elements = (starts[use] + taken * dims[use] + columns).view(-1)
        positions.append((slice(element, element + elements.numel()), elements))
        element += elements.numel()
    return positions, element, starts[-1]


def _inverse_lengths(offsets: Tensor | None, segments: Tensor | None, num_keys: int, key: int) -> Tensor:
    """Return 1 / (number of IDs) for each bag of a key, fp32 [B, 1]; 0 for empty bags."""
    assert offsets is not None
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    lengths_B = offsets[bounds[key] : bounds[key + 1] + 1].diff().float()[:, None]
    # A mean divides by the length of the whole bag, also if its rows are spread over several ranks.
    return torch.where(lengths_B > 0, 1 / lengths_B, torch.zeros_like(lengths_B))


def _check_ids_and_weights(
    ids: _FeatureIds, use: int, values: Tensor, weights: Tensor | None, num_rows: int, names: Tensor
) -> None:
    """Raise ValueError for the first ID outside the table, or for the first NaN weight."""
    nan = weights[ids.ids].isnan() if weights is not None else torch.zeros_like(ids.bad)
    for bad, kind in ((ids.bad, "outside"), (nan, "nan")):
        if not bool(bad.any()):
            continue
        position = int(bad.nonzero()[0])
        table, feature = bytes(names.tolist()).decode().split("\n")[use].split("\t")
        id, sample = int(values[ids.ids][position]), int(torch.repeat_interleave(ids.lengths_B)[position])
        if kind == "outside":
            raise ValueError(
                f"table '{table}': id {id} of feature '{feature}' (sample {sample}) is outside [0, "
                f"{num_rows}). Raise num_embeddings, or hash the ids."
            )
        raise ValueError(
            f"table '{table}': the weight of id {id} of feature '{feature}' (sample {sample}) is nan. "
            "Weights must be numbers; check the input."
        )


implement(
    [
        route_ids,
        unpack_ids,
        gather_pooled,
        gather_coded,
        scatter_pooled,
        gather_sequence,
        scatter_sequence,
        gather_weight_grads,
    ]
)
