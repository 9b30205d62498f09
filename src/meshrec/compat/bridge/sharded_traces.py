"""Programs of sharded quantised collections for torch.fx and TorchScript.

A sharded collection routes IDs in Python, which neither of them can record. The recorded program looks up
each part of each table separately, on its device, and puts the results together. The results are the same,
with one lookup after the other.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.embeddings import names_by_table
from meshrec.compat.bridge.quant_lookups import mean_of, rows_within
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedTensor
from meshrec.distributed.build import ModuleParts
from meshrec.distributed.spread_hashed import SpreadHashed
from meshrec.distributed.spread_table import SpreadTable
from meshrec.distributed.table_shards import TableShards
from meshrec.modules.embedding_configs import PoolingType
from meshrec.tables.table import Rectangle

# torch.fx leaves these calls whole where the module that makes them says so.
torch.fx.wrap("rows_within")
torch.fx.wrap("mean_of")

_SUM, _MEAN, _NONE = 0, 1, 2


class _Part(NamedTuple):
    """A rectangle of a table: the parameter that holds it, and its start there."""

    weight: nn.Parameter
    start: int
    shape: tuple[int, int]
    rectangle: Rectangle


class TableProgram:
    """A recorder of the lookup of one feature in one sharded table."""

    def __init__(self, built: ModuleParts, config: Any) -> None:
        shards = built.shards[config.name]
        if built.env.world.group is not None and built.env.world.size > 1:
            raise ValueError(
                f"table {config.name!r} is split over {built.env.world.size} processes, and a program runs "
                "in one. Shard the quantised model over devices of one process (ShardingEnv.from_local, "
                "shard_quant_model), and record that."
            )
        storage = shards.storage
        if storage.is_trainable and any(each.requires_grad for each in shards.parameters()):
            raise ValueError(
                f"table {config.name!r} is trained: only sharded models for inference can be recorded. "
                "Quantise the model first."
            )
        self._config, self._bits = config, storage.bits if not storage.is_trainable else 0
        output = built.options.output_dtype
        self._dtype = torch.float32 if output is None else output.dtype
        by_columns: dict[tuple[int, int], list[_Part]] = {}
        for part in _parts(shards):
            by_columns.setdefault((part.rectangle.c0, part.rectangle.c1), []).append(part)
        self._columns = [by_columns[key] for key in sorted(by_columns)]

    def look_up(self, bag: Any, *, pooled: bool, weighted: bool) -> Any:
        """Return the proxy of [B, D], or of [N, D] if rows are not pooled."""
        pooling = _NONE
        if pooled:
            pooling = _MEAN if self._config.pooling is PoolingType.MEAN else _SUM
        scale = bag.weights() if weighted else None
        blocks = [self._block(parts, bag, scale, pooling) for parts in self._columns]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def _block(self, parts: Sequence[_Part], bag: Any, scale: Any, pooling: int) -> Any:
        is_split = len(parts) > 1
        own = _SUM if is_split and pooling == _MEAN else pooling
        dtype = torch.float32 if is_split else self._dtype
        found: Any = None
        for part in parts:
            r = part.rectangle
            place = [part.start, *part.shape, r.r0, self._config.num_embeddings]
            rows = rows_within(
                part.weight, place, bag.values(), bag.offsets(), scale, self._bits, r.c1 - r.c0, own, dtype
            )
            found = rows if found is None else found + rows
        if is_split and pooling == _MEAN:
            found = mean_of(found, bag.offsets())
        return found.to(self._dtype) if is_split else found


def record_bags(built: ModuleParts, configs: Sequence[Any], features: Any, *, weighted: bool) -> KeyedTensor:
    """Record the lookup of a pooled collection."""
    bags, values, dims = features.to_dict(), [], []
    for config in configs:
        table = TableProgram(built, config)
        for name in config.feature_names:
            values.append(table.look_up(bags[name], pooled=True, weighted=weighted))
            dims.append(config.embedding_dim)
    names = [name for own in names_by_table(configs) for name in own]
    return KeyedTensor(keys=names, length_per_key=dims, values=torch.cat(values, dim=1))


def record_sequences(
    built: ModuleParts, configs: Sequence[Any], features: Any, *, need_indices: bool
) -> dict[str, JaggedTensor]:
    """Record the lookup of a collection that does not pool."""
    bags, result = features.to_dict(), {}
    for config, names in zip(configs, names_by_table(configs), strict=True):
        table = TableProgram(built, config)
        for feature, name in zip(config.feature_names, names, strict=True):
            bag = bags[feature]
            result[name] = JaggedTensor(
                values=table.look_up(bag, pooled=False, weighted=False),
                weights=bag.values() if need_indices else None,
                lengths=bag.lengths(),
            )
    return result


def _parts(shards: TableShards | SpreadTable | SpreadHashed) -> Iterator[_Part]:
    if isinstance(shards, SpreadHashed):
        raise ValueError(
            f"table {shards.storage.name!r} keeps its rows outside of its parameters, and a recorded "
            "program has parameters alone. Export the model with meshrec.export.export."
        )
    if isinstance(shards, TableShards):
        # Not by name: while torch.fx records, an attribute that is a parameter is a proxy.
        weight = shards._parameters["weight"]
        assert weight is not None
        rows, held = weight.detach(), shards.held
        if held is not None and not held.is_fixed:
            raise ValueError(
                f"table {shards.table.name!r} keeps its rows outside of its parameter, and a recorded "
                "program has parameters alone. Export the model with meshrec.export.export."
            )
        views = [rows] if held is None else held.packing.views(rows)
        yield from _placed(weight, views, shards.rectangles)
        return
    for each in shards.held:
        yield from _placed(each.parameter, each.rows(), each.packing.rectangles)


def _placed(
    weight: nn.Parameter, views: Sequence[Tensor], rectangles: Sequence[Rectangle]
) -> Iterator[_Part]:
    for view, rectangle in zip(views, rectangles, strict=True):
        start = int(view.storage_offset() - weight.storage_offset())
        yield _Part(weight, start, (view.shape[0], view.shape[1]), rectangle)
