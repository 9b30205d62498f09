"""torch.fx and TorchScript programs for sharded quantized collections.

A sharded collection routes IDs in Python, which cannot be recorded. The recorded program instead looks up
every table shard separately, on the shard's device, and combines the results. Results are the same, but
lookups run in sequence.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from meshrec.compat.bridge.embeddings import names_by_table
from meshrec.compat.bridge.quant_lookups import mean_of, rows_within
from meshrec.compat.bridge.sparse import JaggedTensor, KeyedTensor
from meshrec.distributed.build import ModuleParts
from meshrec.modules.embedding_configs import PoolingType
from meshrec.tables.module import TableModule
from meshrec.tables.table import Rectangle

# torch.fx records these calls without tracing into them.
torch.fx.wrap("rows_within")
torch.fx.wrap("mean_of")

# Pooling codes, with the numbers of FBGEMM's PoolingMode.
_SUM, _MEAN, _NONE = 0, 1, 2


class _Part(NamedTuple):
    """Shard of a table (a rectangle of rows and columns), and where the shard is stored.

    Attributes:
        weight: parameter that holds the shard, perhaps together with other shards.
        start: index of the shard's first element in the flat parameter.
        shape: number of rows, and elements per stored row.
        rectangle: table rows and columns of the shard.
    """

    weight: nn.Parameter
    start: int
    shape: tuple[int, int]
    rectangle: Rectangle


class TableProgram:
    """Records lookups in one sharded table as a torch.fx program.

    Raises:
        ValueError: the table is split over several processes, or is trainable.
    """

    def __init__(self, built: ModuleParts, config: Any) -> None:
        shards = built.shards[config.name]
        if built.env.world.group is not None and built.env.world.size > 1:
            raise ValueError(
                f"table {config.name!r} is split over {built.env.world.size} processes, and a program runs "
                "in one. Shard the quantised model over devices of one process (ShardingEnv.from_local, "
                "shard_quant_model), and record that."
            )
        storage = shards.storage
        if storage.is_trainable and any(parameter.requires_grad for parameter in shards.parameters()):
            raise ValueError(
                f"table {config.name!r} is trained: only sharded models for inference can be recorded. "
                "Quantise the model first."
            )
        self._config, self._bits = config, storage.bits if not storage.is_trainable else 0
        output = built.options.output_dtype
        self._dtype = torch.float32 if output is None else output.dtype
        # Shards with the same columns split the rows: their results are added. Column blocks are
        # concatenated.
        by_columns: dict[tuple[int, int], list[_Part]] = {}
        for part in parts_of(shards):
            by_columns.setdefault((part.rectangle.c0, part.rectangle.c1), []).append(part)
        self._columns = [by_columns[key] for key in sorted(by_columns)]

    def look_up(self, bag: Any, *, pooled: bool, weighted: bool) -> Any:
        """Record the lookup of a feature, and return the torch.fx proxy for the result.

        The proxy stands for pooled rows [B, D], or for a row per ID [N, D] without pooling.

        Args:
            bag: proxy for the feature's bags.
            pooled: whether to pool.
            weighted: whether per-sample weights scale the rows.
        """
        pooling = _NONE
        if pooled:
            pooling = _MEAN if self._config.pooling is PoolingType.MEAN else _SUM
        scale = bag.weights() if weighted else None
        blocks = [self._block(parts, bag, scale, pooling) for parts in self._columns]
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1)

    def _block(self, parts: Sequence[_Part], bag: Any, scale: Any, pooling: int) -> Any:
        """Record the lookup in a column block of the table, and return the proxy for the result.

        Args:
            scale: proxy for per-sample weights, or None.
            pooling: 0: sum, 1: mean, 2: a row per ID.
        """
        is_split = len(parts) > 1
        # A mean does not add up across row shards. So shards sum in fp32, and the total is divided by the bag
        # length.
        shard_pooling = _SUM if is_split and pooling == _MEAN else pooling
        dtype = torch.float32 if is_split else self._dtype
        total: Any = None
        for part in parts:
            r = part.rectangle
            location = [part.start, *part.shape, r.r0, self._config.num_embeddings]
            rows = rows_within(
                part.weight,
                location,
                bag.values(),
                bag.offsets(),
                scale,
                self._bits,
                r.c1 - r.c0,
                shard_pooling,
                dtype,
            )
            total = rows if total is None else total + rows
        if is_split and pooling == _MEAN:
            total = mean_of(total, bag.offsets())
        return total.to(self._dtype) if is_split else total


def record_bags(built: ModuleParts, configs: Sequence[Any], features: Any, *, weighted: bool) -> KeyedTensor:
    """Record the lookups of a pooled collection.

    Args:
        built: sharded module's parts.
        configs: table configs.
        features: proxy for the input.
        weighted: whether per-sample weights scale the rows.
    """
    bags, values, dims = features.to_dict(), [], []
    for config in configs:
        table = TableProgram(built, config)
        for name in config.feature_names:
            values.append(table.look_up(bags[name], pooled=True, weighted=weighted))
            dims.append(config.embedding_dim)
    names = [name for table_names in names_by_table(configs) for name in table_names]
    return KeyedTensor(keys=names, length_per_key=dims, values=torch.cat(values, dim=1))


def record_sequences(
    built: ModuleParts, configs: Sequence[Any], features: Any, *, need_indices: bool
) -> dict[str, JaggedTensor]:
    """Record the lookups of a collection without pooling.

    Args:
        built: sharded module's parts.
        configs: table configs.
        features: proxy for the input.
        need_indices: whether outputs have the IDs in ``weights``.
    """
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


def parts_of(module: TableModule) -> Iterator[_Part]:
    """Yield this rank's shards of a table, with their positions in the table's parameters.

    Raises:
        ValueError: the table keeps its rows outside of its parameter.
    """
    if not module.storage.rows_in_parameter:
        raise ValueError(
            f"table {module.name!r} keeps its rows outside of its parameter, and a recorded program has "
            "parameters alone. Export the model with meshrec.export.export."
        )
    for number, shard in enumerate(module.local_shards):
        # Not by attribute: under torch.fx tracing, a parameter attribute is a proxy.
        weight = module._parameters[f"part{number}" if module.over_devices else "weight"]
        assert weight is not None
        views = shard.packing.views(weight.detach())
        for view, rectangle in zip(views, shard.packing.rectangles, strict=True):
            start = int(view.storage_offset() - weight.storage_offset())
            yield _Part(weight, start, (view.shape[0], view.shape[1]), rectangle)
