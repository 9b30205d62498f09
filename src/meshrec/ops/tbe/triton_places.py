"""The places of lookups for the Triton kernels: which bags they read, and where their results go."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.sending import kept_on, sent_to, stream_of
from meshrec.ops.tbe.layout import NONE, Lookups, segment_bounds

# F features, K keys, R blocks, L = R * F lookups


class PlacedLookups(NamedTuple):
    """The lookups of a batch that take part, R per feature that has a table."""

    fields: Tensor
    """int64 [L, 7] on the device: ``triton_kernels.LOOKUP_FIELDS``."""
    features: list[int]
    """The feature of each lookup, [L]."""
    tables: list[int]
    """The table of each lookup, [L]."""
    most_bags: int
    shape: list[int]
    """Shape of the output."""

    def of_tables(self, wanted: set[int]) -> "PlacedLookups":
        """Return the lookups in some tables."""
        chosen = [at for at, table in enumerate(self.tables) if table in wanted]
        if len(chosen) == len(self.tables):
            return self
        return self._replace(
            fields=self.fields[kept_on(self.fields.device, chosen)],
            features=[self.features[at] for at in chosen],
            tables=[self.tables[at] for at in chosen],
        )

    def grid(self, bags: int) -> tuple[int, int]:
        """Return the launch grid: a program for some bags of each lookup."""
        return -(-self.most_bags // bags), len(self.tables)


def placed_lookups(batch: Lookups, size: int | None = None) -> PlacedLookups:
    """Find the place of each lookup's bags and output rows, without reading the device.

    Args:
        batch: The lookups.
        size: The number of elements of a flat output, which depends on the IDs if nothing is pooled.
    """
    offsets, segments, device = batch.offsets, batch.segments, batch.offsets.device
    placed, bounds = _places(
        offsets.numel() - 1,
        None if segments is None else tuple(segments.tolist()),
        batch.num_keys,
        *(tuple(each) for each in (batch.keys, batch.tables, batch.pooling, batch.dims)),
        flat=batch.flat,
        device=device,
        stream=stream_of(device),
    )
    if NONE in batch.pooling:
        fields = placed.fields.clone()
        fields[:, 4] = _first_elements(batch, bounds, fields)
        placed = placed._replace(fields=fields, shape=placed.shape if size is None else [size])
    taking_part = [at for at, table in enumerate(placed.tables) if table >= 0]
    return placed if len(taking_part) == len(placed.tables) else placed.of_tables(set(batch.tables) - {-1})


@functools.lru_cache(maxsize=256)
def _places(
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
) -> tuple[PlacedLookups, Tensor]:
    """Return all lookups and, on the device, the first bag of each segment. Results are cached, because the
    batches of a run have few different forms. Without pooling, the caller sets the places in the output.
    """
    if NONE in pooling and not flat:
        raise ValueError("lookups that are not pooled have a flat output.")
    bounds = torch.tensor(
        segment_bounds(num_bags, None if segments is None else torch.tensor(segments), num_keys)
    )
    chosen = list(keys)
    first_RF, end_RF = bounds[:-1].view(-1, num_keys)[:, chosen], bounds[1:].view(-1, num_keys)[:, chosen]
    bags_RF, width_F, pooling_F = end_RF - first_RF, torch.tensor(dims), torch.tensor(pooling)
    if flat:
        sizes = (bags_RF * width_F).flatten()
        out_RF = (sizes.cumsum(0) - sizes).view_as(bags_RF)
        shape, stride_F = [int(sizes.sum())], width_F
    else:
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
    features = list(range(len(keys))) * len(bags_RF)
    most_bags = int(bags_RF.max()) if bags_RF.numel() else 0
    of_lookups = [tables[feature] for feature in features]
    placed = PlacedLookups(sent_to(fields, device), features, of_lookups, most_bags, shape)
    return placed, sent_to(bounds, device)


def _first_elements(batch: Lookups, bounds: Tensor, fields: Tensor) -> Tensor:
    """Return the first output element of each lookup. Without pooling, a lookup has one row for each ID."""
    starts, keys = batch.offsets[bounds].long(), kept_on(bounds.device, batch.keys)
    num_ids = starts.diff().view(-1, batch.num_keys)[:, keys].flatten()
    sizes = torch.where(fields[:, 6] == NONE, num_ids, fields[:, 3]) * fields[:, 1]
    return sizes.cumsum(0) - sizes
