"""Dist operators in plain torch: the reference for the kernels, and the fallback on other devices.

Terms shared by the operators (U uses, Q routes, K keys, R ranks, N IDs, B bags per use, D width):

- A *use* is a feature read from a table; its IDs belong to key ``keys[u]``. ``values_N``, ``offsets`` and
  ``segments`` (int64 [K + 1] on the CPU: first bag per key; None: equal bag counts per key) describe the
  IDs.
- A *route* sends the IDs from one use that fall into one shard to the shard's rank.
- ``router``: five int64 tensors on the CPU: ``cut_start``, ``cuts``, ``interval_start``,
  ``interval_routes``, ``routes``. The row cuts 0 = c_0 < ... < c_P = row count are, for use u,
  ``cuts[cut_start[u] : cut_start[u + 1]]``. (Hashed keys have cuts from -2^63 to 2^63 - 1, which means
  unbounded: every int64 is inside.) Adjacent cuts delimit an interval; intervals are numbered across all
  uses. The routes taking IDs in interval i are listed in ``interval_routes``, from
  ``interval_start[i]``. ``routes`` [Q, 3]: rank, use, first row; ordered by rank.
- A *message* is a sequence of int32 words: [bags per route, if they differ between uses][lengths, route by
  route][IDs minus the route's first row, as int32, or int64 with ``wide``][weights, fp32]. ``header`` int64
  [R, 4] has per message: status (0), words, IDs, bags per route (-1: they differ).
- ``pieces`` int64 [P, 6]: (source, first source column, width, first result column, whether to add, use whose
  bag lengths divide or -1). Sources are the ranks, with ``dims[r]`` columns; source R is ``local``.
- ``lookups`` int64 [L, 4]: (route, use, first column, width), by rank: row pieces for sequence lookups.
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
    """[U]: row cuts per use."""
    intervals: list[list[int]]
    """[Q]: intervals per route, numbered within the use."""
    routes: list[list[int]]
    """[Q]: rank, use, first row."""

    def num_rows(self, use: int) -> int:
        """Return the row count in the table read by a use."""
        return self.cuts[use][-1]


def _parse_router(router: list[Tensor]) -> _Router:
    """Convert the ``router`` tensors to lists."""
    cut_start, cuts, interval_start, interval_routes, routes = (tensor.tolist() for tensor in router)
    intervals: list[list[int]] = [[] for _ in range(len(routes) // 3)]
    number = 0
    for start, end in pairwise(cut_start):
        for interval in range(end - start - 1):
            for route in interval_routes[interval_start[number] : interval_start[number + 1]]:
                intervals[route].append(interval)
            number += 1
    return _Router(
        [cuts[start:end] for start, end in pairwise(cut_start)],
        intervals,
        [routes[i : i + 3] for i in range(0, len(routes), 3)],
    )


class _UseIds(NamedTuple):
    """IDs for one use."""

    ids: slice
    """The use's IDs in ``values_N``."""
    lengths_B: Tensor
    """IDs per bag, int64."""
    rows: Tensor
    """int64: IDs, with 0 for IDs outside the table."""
    intervals: Tensor
    """int64: interval per ID."""
    bad: Tensor
    """bool: whether an ID is outside the table."""


def _ids_of_use(
    values: Tensor, offsets: Tensor, bounds: list[int], keys: list[int], use: int, router: _Router
) -> _UseIds:
    """Return the IDs for one use, and their intervals.

    Args:
        values: IDs [N].
        offsets: first ID index per bag, followed by N.
        bounds: first bag per key, followed by the bag count.
        keys: key per use.
        use: use number.
        router: row cuts.
    """
    start, end = bounds[keys[use]], bounds[keys[use] + 1]
    offsets_B1 = offsets[start : end + 1].long()
    ids = slice(int(offsets_B1[0]), int(offsets_B1[-1]))
    rows = values[ids].long()
    bad = (rows < router.cuts[use][0]) | (rows >= router.num_rows(use))
    if router.num_rows(use) == _UNBOUNDED:
        bad = torch.zeros_like(bad)
    # Without check_ids, an ID outside the table reads row 0.
    rows = rows.masked_fill(bad, 0)
    cuts = torch.tensor(router.cuts[use][1:-1], dtype=torch.int64, device=values.device)
    return _UseIds(ids, offsets_B1.diff(), rows, torch.searchsorted(cuts, rows, right=True), bad)


class IdsToRoute(NamedTuple):
    r"""Arguments of ``route_ids``: a batch, and the plan by which to route it."""

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
    """Key per use."""
    router: list[Tensor]
    """See the module docstring."""
    num_ranks: int
    wide: bool
    """Whether to send int64 IDs."""
    check_ids: bool
    """Whether to raise for IDs outside the table and NaN weights. If not, such IDs are replaced by row 0."""
    names: Tensor
    r"""UTF-8 bytes of ``"table\tfeature\n"`` per use, uint8, for messages."""


def route_ids(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pack the batch IDs into one message per rank. The arguments are the fields of ``IdsToRoute``.

    Returns:
        Payload (int32), header [R, 4], ID count per route [Q], and count of IDs outside the table per
            use [U].

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
    batches = {ids.lengths_B.numel() for ids in uses}
    batch = batches.pop() if len(batches) == 1 else (-1 if batches else 0)
    header = torch.zeros(num_ranks, 4, dtype=torch.int64)
    header[:, 3] = batch
    counts = torch.zeros(len(plan.routes), dtype=torch.int64)
    payload: list[Tensor] = [torch.empty(0, dtype=torch.int32, device=values.device)]
    for rank in range(num_ranks):
        parts: list[list[Tensor]] = [[], [], [], []]
        for route, (_, use, first_row) in enumerate(plan.routes):
            if plan.routes[route][0] != rank:
                continue
            ids = uses[use]
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
                parts[3].append(weights[ids.ids][taken].view(torch.int32))
        message = [part for group in parts for part in group]
        header[rank, 1] = sum(part.numel() for part in message)
        header[rank, 2] = sum(part.numel() for part in parts[2]) // (2 if wide else 1)
        payload += message
    bad = torch.tensor([int(ids.bad.sum()) for ids in uses], dtype=torch.int64)
    return torch.cat(payload), header, counts, bad


def unpack_ids(
    received: Tensor, header: Tensor, blocks: list[int], num_routes: int, weighted: bool, wide: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Unpack the ID messages received from all ranks into a batch for the TBE operators.

    Args:
        received: words from all messages, int32.
        header: int64 [R, 4].
        blocks: source rank per result block, in order.
        num_routes: routes to this rank.
        weighted: whether messages contain weights.
        wide: whether IDs are int64.

    Returns:
        Values, offsets [bags + 1], weights (empty unless weighted), and segments [blocks * routes + 1].

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
        message, prefix = messages[rank], num_routes if batches[rank] < 0 else 0
        block_bags = message[:prefix].tolist() if prefix else [batches[rank]] * num_routes
        ids_start = prefix + sum(block_bags)
        ids_end = ids_start + num_ids[rank] * (2 if wide else 1)
        bags += block_bags
        lengths.append(message[prefix:ids_start])
        ids = message[ids_start:ids_end]
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
    """Pooled columns from all ranks, and the output they form: arguments of ``gather_pooled`` and
    ``gather_coded``.
    """

    received: Tensor
    """Pooled rows from all ranks, flat."""
    local: Tensor | None
    """Pooled rows from tables on this rank, fp32 [B, columns]."""
    pieces: Tensor
    """See the module docstring."""
    dims: list[int]
    """Column count sent by every rank."""
    batch: int  # B
    out_dim: int
    """Output columns."""
    offsets: Tensor | None
    """First ID index per bag, for mean pooling."""
    segments: Tensor | None
    """First bag index per key."""
    num_keys: int
    keys: list[int]
    """Key per use."""

    @classmethod
    def split(cls, arguments: Sequence[Any]) -> tuple["PooledRows", Sequence[Any]]:
        """Split operator arguments into ``PooledRows`` and the arguments after them."""
        shared = len(cls._fields)
        return cls(*arguments[:shared]), arguments[shared:]


def gather_pooled(*arguments: Any) -> Tensor:
    """Assemble the pooled output from the columns sent by all ranks, fp32 [B, out_dim].

    A piece is copied, or added to earlier pieces if so marked. The arguments are the fields of
    ``PooledRows``, and:

    - ``link``: handle of a ``HostLink``: the compiled kernel reads the other ranks' rows in place
      (comms/host_link.py). ``received`` is then empty, and only gives the dtype.
    - ``exchange``: exchange number on the link.
    """
    rows, _ = PooledRows.split(arguments)
    received, local, pieces, dims, batch, out_dim, offsets, segments, num_keys, keys = rows
    if received.numel() != batch * sum(dims):
        raise ValueError(f"received {received.numel()} elements in place of {batch * sum(dims)}")
    sources = [
        block.view(batch, dim).float()
        for block, dim in zip(received.split([batch * dim for dim in dims]), dims, strict=True)
    ]
    if local is not None:
        sources.append(local)
    out = received.new_empty(batch, out_dim, dtype=torch.float32)
    for source, source_column, width, column, add, mean_use in pieces.tolist():
        part = sources[source][:, source_column : source_column + width]
        if mean_use >= 0:
            part = part * _inverse_lengths(offsets, segments, num_keys, keys[mean_use])
        target = out[:, column : column + width]
        _ = target.add_(part) if add else target.copy_(part)
    return out


def gather_coded(*arguments: Any) -> Tensor:
    """Run ``gather_pooled`` on rows encoded by ``wire_encode``, uint8, with a block per source.

    The fields of ``PooledRows`` are followed by ``starts`` (first column per source, see ``wire_naive``),
    ``widths`` and ``formats`` per column, and by ``link`` and ``exchange``.
    """
    rows, (starts, widths, formats, *_) = PooledRows.split(arguments)
    ops = torch.ops.meshrec
    values = ops.wire_decode(rows.received, [rows.batch] * len(rows.dims), starts, widths, formats)
    out: Tensor = ops.gather_pooled(*rows._replace(received=values))
    return out


class PooledGradient(NamedTuple):
    """Output gradient, and the column layout after the split: arguments of ``scatter_pooled``."""

    grad: Tensor
    """fp32 [B, out_dim]."""
    pieces: Tensor
    """See the module docstring."""
    dims: list[int]
    """Column count to send to every rank."""
    local_dim: int
    """Columns in ``local``."""
    offsets: Tensor | None
    """First ID index per bag, for mean pooling."""
    segments: Tensor | None
    """First bag index per key."""
    num_keys: int
    keys: list[int]
    """Key per use."""
    scale: float
    """Factor by which the gradient is multiplied."""
    dtype: torch.dtype
    """Payload dtype."""


def scatter_pooled(*arguments: Any) -> tuple[Tensor, Tensor]:
    """Split an output gradient into columns for all ranks: the backward pass of ``gather_pooled``.

    The arguments are the fields of ``PooledGradient``.

    Returns:
        Payload to the ranks, 1-D, in the payload dtype; and the local table columns, [B, local_dim].
    """
    gradient = PooledGradient(*arguments)
    grad, pieces, dims, local_dim, offsets, segments, num_keys, keys, scale, dtype = gradient
    batch = grad.shape[0]
    sources = [grad.new_empty(batch, dim) for dim in (*dims, local_dim)]
    for source, source_column, width, column, _, mean_use in pieces.tolist():
        part = grad[:, column : column + width] * scale
        if mean_use >= 0:
            part = part * _inverse_lengths(offsets, segments, num_keys, keys[mean_use])
        sources[source][:, source_column : source_column + width] = part
    return torch.cat([source.view(-1) for source in sources[:-1]]).to(dtype), sources[-1]


class SequenceRows(NamedTuple):
    """A batch, and the rows exchanged for sequence lookups: arguments shared by both sequence operators."""

    values: Tensor
    offsets: Tensor
    segments: Tensor | None
    num_keys: int
    keys: list[int]
    router: list[Tensor]
    lookups: Tensor
    """int64 [L, 4]: route, use, first column and width."""
    counts: Tensor
    """int64 [Q]: ID count per route."""
    dims: list[int]
    """Width per use; 0 for omitted uses."""

    def num_elements(self) -> int:
        """Return the element count exchanged by the rank."""
        return int((self.counts.cpu()[self.lookups[:, 0]] * self.lookups[:, 3]).sum())


def gather_sequence(received: Tensor, *arguments: Any) -> Tensor:
    """Assemble the rows per use from those sent by all ranks: flat fp32, [ids, dims[u]] use by use.

    Uses with width 0 are omitted.
    """
    positions, num_elements, out_elements = _sequence_positions(SequenceRows(*arguments))
    if received.numel() != num_elements:
        raise ValueError(f"received {received.numel()} elements in place of {num_elements}")
    out = received.new_empty(out_elements, dtype=torch.float32)
    for message_slice, elements in positions:
        out[elements] = received[message_slice].float()
    return out


def scatter_sequence(grad: Tensor, *arguments: Any) -> Tensor:
    """Split a row gradient into the payload to all ranks, times ``scale``. Inverts ``gather_sequence``."""
    *shared, scale, dtype = arguments
    positions, num_elements, out_elements = _sequence_positions(SequenceRows(*shared))
    if grad.numel() != out_elements:
        raise ValueError(f"the gradient must be float32 with {out_elements} elements, got {grad.numel()}")
    out = grad.new_empty(num_elements, dtype=dtype)
    for message_slice, elements in positions:
        out[message_slice] = (grad[elements] * scale).to(dtype)
    return out


class WeightGradients(NamedTuple):
    """Per-sample weight gradients received from all ranks: arguments of ``gather_weight_grads``."""

    received: Tensor
    """fp32, one value per ID sent, route by route."""
    values: Tensor
    """IDs [N]."""
    offsets: Tensor
    """First ID index per bag, followed by N."""
    segments: Tensor | None
    """First bag index per key."""
    num_keys: int
    keys: list[int]
    """Key per use."""
    router: list[Tensor]
    """See the module docstring."""
    counts: Tensor
    """ID count per route, int64 [Q]."""


def gather_weight_grads(*arguments: Any) -> Tensor:
    """Return the gradient per sample weight, fp32 [N]: the sum over the routes sending the ID.

    0 for IDs read by no use.

    The arguments are the fields of ``WeightGradients``.
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
        out[ids.ids][torch.isin(ids.intervals, intervals)] += part
    return out


def _sequence_positions(batch: SequenceRows) -> tuple[list[tuple[slice, Tensor]], int, int]:
    """Return, per lookup, the payload slice and element positions; then both total sizes."""
    values, offsets, segments, num_keys, keys, router, lookups, _, dims = batch
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    plan = _parse_router(router)
    uses = [_ids_of_use(values, offsets, bounds, keys, use, plan) for use in range(len(keys))]
    sizes = [ids.rows.numel() * dim for ids, dim in zip(uses, dims, strict=True)]
    starts = list(accumulate(sizes, initial=0))
    positions, element = [], 0
    for route, use, column, width in lookups.tolist():
        intervals = torch.tensor(plan.intervals[route], device=values.device)
        taken = torch.isin(uses[use].intervals, intervals).nonzero()
        columns = torch.arange(column, column + width, device=values.device)
        elements = (starts[use] + taken * dims[use] + columns).view(-1)
        positions.append((slice(element, element + elements.numel()), elements))
        element += elements.numel()
    return positions, element, starts[-1]


def _inverse_lengths(offsets: Tensor | None, segments: Tensor | None, num_keys: int, key: int) -> Tensor:
    """Return 1 / (IDs per bag), fp32 [B, 1]; 0 for empty bags."""
    assert offsets is not None
    bounds = segment_bounds(offsets.numel() - 1, segments, num_keys)
    lengths_B = offsets[bounds[key] : bounds[key + 1] + 1].diff().float()[:, None]
    return torch.where(lengths_B > 0, 1 / lengths_B, torch.zeros_like(lengths_B))


def _check_ids_and_weights(
    ids: _UseIds, use: int, values: Tensor, weights: Tensor | None, num_rows: int, names: Tensor
) -> None:
    """Raise ValueError for the first ID outside the table, or NaN weight."""
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
