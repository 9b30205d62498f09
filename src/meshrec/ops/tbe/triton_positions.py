"""Positions of bags and output rows, computed on the device for the Triton kernels."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.device_copies import cached_on_device, copy_to_device, stream_of
from meshrec.ops.tbe.layout import NONE, Lookups, segment_bounds

# Shape legend: F features, K keys, R blocks, L = R * F lookups (a feature in a block).


class PositionedLookups(NamedTuple):
    """The lookups in a batch, with the positions of their bags and output rows.

    A lookup is a feature in a block. A batch has R blocks, so there are R lookups per feature.
    `position_lookups` leaves out lookups whose feature has no table (table -1).
    """

    fields: Tensor
    """A row per lookup, with the columns in ``triton_kernels.LOOKUP_FIELDS``; int64 [L, 7] on the device."""
    features: list[int]
    """Feature number per lookup; [L]."""
    tables: list[int]
    """Table number per lookup; [L]."""
    max_bags: int
    """Number of bags in the lookup with the most bags."""
    shape: list[int]
    """Shape of the lookup output."""

    def of_tables(self, selected: set[int]) -> "PositionedLookups":
        """Return only the lookups that read a selected table. The output shape stays the same."""
        positions = [at for at, table in enumerate(self.tables) if table in selected]
        if len(positions) == len(self.tables):
            return self
        return self._replace(
            fields=self.fields[cached_on_device(self.fields.device, positions)],
            features=[self.features[at] for at in positions],
            tables=[self.tables[at] for at in positions],
        )

    def grid(self, bags: int) -> tuple[int, int]:
        """Return the launch grid for a kernel in which a program handles ``bags`` bags in a lookup."""
        return -(-self.max_bags // bags), len(self.tables)


def position_lookups(batch: Lookups, size: int | None = None) -> PositionedLookups:
    """Compute the bag range and the output position for each lookup, without synchronizing with the device.

    Args:
        size: element count in a flat output. Features without pooling have an output row per ID, and the IDs
            are counted on the device, so the caller must know the size.
    """
    offsets, segments, device = batch.offsets, batch.segments, batch.offsets.device
    # Tuples and numbers, which can be cache keys. segments is on the CPU, so reading it does not synchronize.
    positioned, bounds = _lookups_for_shape(
        offsets.numel() - 1,
        None if segments is None else tuple(segments.tolist()),
        batch.num_keys,
        *map(tuple, (batch.keys, batch.tables, batch.pooling, batch.dims)),
        flat=batch.flat,
        device=device,
        stream=stream_of(device),
    )
    if NONE in batch.pooling:
        # The cached positions are shared between batches, so write to a copy.
        fields = positioned.fields.clone()
        # On the device, because reading the offsets would synchronize.
        fields[:, 4] = _first_elements(batch, bounds, fields)
        positioned = positioned._replace(fields=fields, shape=positioned.shape if size is None else [size])
    # Features with table -1 are dropped. They still occupy columns of the output.
    with_table = [at for at, table in enumerate(positioned.tables) if table >= 0]
    return (
        positioned
        if len(with_table) == len(positioned.tables)
        else positioned.of_tables(set(batch.tables) - {-1})
    )


@functools.lru_cache(maxsize=256)
def _lookups_for_shape(
    num_bags: int,
    segments: tuple[int, ...] | None,
    num_keys: int,
    keys: tuple[int, ...],
    tables: tuple[int, ...],
    pooling: tuple[int, ...],
    dims: tuple[int, ...],
    *,
    flat: bool,
    device: torch.device,
    stream: int,
) -> tuple[PositionedLookups, Tensor]:
    """Return the positioned lookups of all batches with a shape, and the first bag index of every segment.

    The results are on the device, and cached, because a run has few different batch shapes. For features
    without pooling, the output positions depend on the IDs, so the caller sets them.
    """
    if NONE in pooling and not flat:
        raise ValueError("lookups that are not pooled have a flat output.")
    bounds = torch.tensor(
        segment_bounds(num_bags, None if segments is None else torch.tensor(segments), num_keys)
    )
    feature_keys = list(keys)
    # R blocks by F features: first bag of the key that the feature reads, and the bag after its last bag.
    first_RF, end_RF = (
        bounds[:-1].view(-1, num_keys)[:, feature_keys],
        bounds[1:].view(-1, num_keys)[:, feature_keys],
    )
    bags_RF, width_F, pooling_F = end_RF - first_RF, torch.tensor(dims), torch.tensor(pooling)
    if flat:
        # Flat output: one [bags, width] matrix after another.
        sizes = (bags_RF * width_F).flatten()
        out_RF = (sizes.cumsum(0) - sizes).view_as(bags_RF)
        shape, stride_F = [int(sizes.sum())], width_F
    else:
        # 2-D output: a block's rows follow those of the previous block, and features are adjacent columns.
        block_R = bounds.diff().view(-1, num_keys)[:, 0]
        if bool((bags_RF != block_R[:, None]).any()):
            raise ValueError(
                "features have different batch sizes; one output matrix needs one. Ask for a flat output."
            )
        shape = [int(block_R.sum()), sum(dims)]
        out_RF = (block_R.cumsum(0) - block_R)[:, None] * shape[1] + (width_F.cumsum(0) - width_F)
        stride_F = torch.full_like(width_F, shape[1])
    columns = (torch.tensor(tables), width_F, first_RF, bags_RF, out_RF, stride_F, pooling_F)
    fields = torch.stack([column.expand(bags_RF.shape).flatten() for column in columns], 1)
    # In the order of the rows in fields: block by block, then by feature.
    features = list(range(len(keys))) * len(bags_RF)
    max_bags = int(bags_RF.max()) if bags_RF.numel() else 0
    table_of_lookup = [tables[feature] for feature in features]
    # The stream is part of the cache key, because the copy is only ordered before kernels on this stream.
    positioned = PositionedLookups(copy_to_device(fields, device), features, table_of_lookup, max_bags, shape)
    return positioned, copy_to_device(bounds, device)


def _first_elements(batch: Lookups, bounds: Tensor, fields: Tensor) -> Tensor:
    """Return the index where each lookup's output starts, on the device: int64 [L].

    A lookup without pooling has an output row per ID instead of a row per bag.
    """
    starts, keys = batch.offsets[bounds].long(), cached_on_device(bounds.device, batch.keys)
    num_ids = starts.diff().view(-1, batch.num_keys)[:, keys].flatten()
    # Columns of LOOKUP_FIELDS: 1 is the width, 3 the bag count, 6 the pooling mode.
    sizes = torch.where(fields[:, 6] == NONE, num_ids, fields[:, 3]) * fields[:, 1]
    return sizes.cumsum(0) - sizes
