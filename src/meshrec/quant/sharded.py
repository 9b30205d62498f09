"""Quantization of sharded tables. The plan stays the same, and every rank quantizes local shards."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.comms.agreement import together
from meshrec.comms.collectives import all_gather, gather_objects
from meshrec.comms.mesh import ShardingEnv
from meshrec.distributed.build import Blueprint, Contents, ModuleParts, assemble, check_cuts
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.distributed.routing import Routing
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.table_lookup import storage_for
from meshrec.ops import nbit
from meshrec.quant.collections import empty_like, make_block
from meshrec.quant.precision import Rounding, check_rows, encode_rows
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.keys import key_at
from meshrec.tables.hashed.table import HashedRows, HashedTable, has_growable_rows, is_growable
from meshrec.tables.local_shards import LocalShard, LocalShards, parameter_shard, table_shard
from meshrec.tables.packing import Packing
from meshrec.tables.storage import RowStorage
from meshrec.tables.table import RowBlock, Table

# Shape legend: R rows in a block.

# Rows for which the ranks exchange minima and maxima at once, which bounds the size of messages.
_BLOCK_ROWS = 1 << 18
_NAME = "quantising"
"""Name of the collectives in messages."""

Sharded = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


def configs_of(module: Any) -> list[BaseEmbeddingConfig]:
    """Return the configs of the tables in a sharded embedding module."""
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    result: list[BaseEmbeddingConfig] = configs()
    return result


def quantised_shards(
    modules: Mapping[str, Any],
    types: Mapping[str, Mapping[str, DataType]],
    output_dtype: DataType | None,
    rounding: Rounding,
) -> dict[str, Any]:
    """Build copies of sharded embedding modules with tables in other data types. Collective.

    Args:
        modules: sharded modules by path in the model.
        types: new data type by path and table name.
        output_dtype: output data type of the new modules.
        rounding: see ``quantize``.

    Returns:
        The new modules by path.

    Raises:
        ValueError: a row cannot be quantized; "search" is requested for a table split by columns; the plan
            splits a table at a column that does not start at a byte in the new data type; or the model is
            split over several devices of one process. Errors are raised on every rank.
    """
    for path, module in modules.items():
        if module.built.env.devices:
            raise ValueError(
                "the model is split over several devices of one process. Quantize it first, then shard it."
            )
        # Both checks depend only on arguments that are equal on all ranks. So all ranks raise the same error,
        # before any collective.
        check_cuts(_storages(module, types[path]), module.plan)
        _check_search(module, types[path], rounding)
    return {
        path: _build_module(
            module, _QuantizedTables(module.built, types[path], rounding), types[path], output_dtype
        )
        for path, module in modules.items()
    }


class _QuantizedTables:
    """This rank's table shards of an embedding module, converted to new data types.

    The constructor converts them. It is collective: all ranks must call it.

    Args:
        built: the original module's tables, routing and ranks.
        types: new data type by table name.
        rounding: see ``quantize``.

    Attributes:
        storages: new row storage per table.
        split: new shards of tables that are split over ranks.
        local: new shards of all other tables.
    """

    def __init__(self, built: ModuleParts, types: Mapping[str, DataType], rounding: Rounding) -> None:
        self._types, self._rounding, self._built = types, rounding, built
        self.storages = [
            _storage(types[table.name], storage)
            for table, storage in zip(built.routing.tables, built.storages, strict=True)
        ]
        split, local = built.tables.split.shards, built.tables.local.shards
        # Scale and bias belong to whole rows, so if columns are split, the ranks must agree on them first.
        # All ranks treat the same tables in the same order, because the treatment is collective.
        cut = [t for t, is_cut in enumerate(_cut_by_columns(built.routing)) if is_cut]
        # Scales and biases by table number, for split hashed tables (here) and split fixed tables
        # (``params``).
        self._by_key: dict[int, _RowParams] = {}
        params = {}
        for t in cut:
            storage = self.storages[t]
            if storage.bits and is_growable(storage):
                here = split.of_table(t)
                tables = [] if here is None else here.tables
                self._by_key[t] = _params_by_key(tables, storage, built.env)
            elif storage.bits:
                params[t] = self._params_of_whole_rows(split, t)
        # Raise an error on all ranks if any rank fails. Otherwise the others would wait in the next
        # collective.
        with together(built.env.world, _NAME):
            self.split, self.local = self._convert(split, params), self._convert(local, {})

    def _params_of_whole_rows(self, shards: LocalShards, table: int) -> Tensor:
        """Compute scale and bias for whole rows in a fixed table, from the columns on all ranks. Collective.

        A fixed table has no hash index: an ID is a row number.

        Returns:
            Scale and bias of every row in the table, fp16 [rows, 2].
        """
        env, num_rows = self._built.env, self._built.routing.tables[table].num_rows
        here = shards.of_table(table)
        tables = [] if here is None else here.tables
        blocks = [
            _extremes(tables, first, min(first + _BLOCK_ROWS, num_rows), env)
            for first in range(0, num_rows, _BLOCK_ROWS)
        ]
        least, greatest = torch.cat(blocks, 1)
        return nbit.params_of(least, greatest, self.storages[table].bits)

    def _convert(self, shards: LocalShards, params: Mapping[int, Tensor]) -> LocalShards:
        """Convert shards to the new data types.

        Args:
            params: scale and bias of every whole row, fp16 [rows, 2], by table number. It has the fixed
                tables that are split by columns. Other tables compute both from their own rows.
        """
        converted: list[LocalShard] = []
        for shard in shards.shards:
            storage = self.storages[shard.packing.table]
            if is_growable(storage):
                converted.append(self._convert_hashed(shard, storage))
                continue
            packing = Packing(shard.packing.rectangles, storage)
            rows = storage.allocate(*packing.shape, shard.parameter.device)
            for table, target in zip(shard.tables, packing.views(rows), strict=True):
                for block in table.stream():
                    assert isinstance(block.keys, range)
                    first = block.keys.start - table.rectangle.r0
                    target[first : first + len(block.keys)] = self._encode_block(
                        table.rectangle.table, block, params
                    )
            # Quantized rows are not trained, so they have no optimizer state.
            no_state: list[list[Tensor]] = [[] for _ in packing.rectangles]
            converted.append(
                parameter_shard(nn.Parameter(rows, requires_grad=False), packing, no_state, None)
            )
        return LocalShards(converted)

    def _convert_hashed(self, shard: LocalShard, storage: HashedRows) -> LocalShard:
        """Convert the shard of a hashed table to the new data type."""
        packing = Packing(shard.packing.rectangles, storage)
        rows = storage.allocate(0, packing.shape[1], None)
        tables = [storage.table(rectangle, None, None) for rectangle in packing.rectangles]
        for source, target in zip(shard.tables, tables, strict=True):
            assert has_growable_rows(source)
            target.load(self._converted_blocks(source, storage))
        return table_shard(nn.Parameter(rows, requires_grad=False), packing, tables)

    def _converted_blocks(self, table: HashedTable, storage: HashedRows) -> Iterator[RowBlock]:
        """Convert the rows of a hashed table to the new data type, and yield them in blocks.

        ``table`` is a rectangle: the part of the whole table with a range of rows and columns on this rank.
        """
        data_type, columns = self._types[storage.name], table.rectangle.columns
        if table.storage.row_format == storage.row_format:
            # The format stays: pass the rows through, but without optimizer state.
            names = {"waiting", *(part.name for part in storage.row_parts)}
            for block in table.stream():
                yield block._replace(parts={n: part for n, part in block.parts.items() if n in names})
            return
        for block in table.stream():
            # Blocks without weights have counts of waiting IDs, which a table that is not trained ignores.
            if "weight" not in block.parts:
                continue
            assert isinstance(block.keys, Tensor)
            weights, ids = block.parts["weight"], table.ids_of(block.keys)
            by_key = self._by_key.get(table.rectangle.table)
            # ``by_key`` exists only if columns are split. Otherwise the rows here are whole.
            if by_key is None:
                rows = encode_rows(weights, data_type, self._rounding, storage.name, ids=ids)
            else:
                row_params = by_key.params[torch.searchsorted(by_key.keys, block.keys)]
                for checked in (weights.half(), row_params):
                    check_rows(checked, data_type, storage.name, ids=ids)
                rows = nbit.quantize(weights, storage.bits, row_params)
            yield make_block(rows, block.keys, storage, columns)

    def _encode_block(self, table: int, block: RowBlock, params: Mapping[int, Tensor]) -> Tensor:
        """Convert the rows in a block of a fixed table to the new data type."""
        assert isinstance(block.keys, range)
        weights, first = block.parts["weight"], block.keys.start
        name = self._built.routing.tables[table].name
        data_type = self._types[name]
        # ``params`` has only tables split by columns. In other tables the rows here are whole.
        if table not in params:
            return encode_rows(weights, data_type, self._rounding, name, first_row=first)
        row_params = params[table][first : block.keys.stop]
        check_rows(weights.half(), data_type, name, first_row=first)
        check_rows(row_params, data_type, name, first_row=first)
        return nbit.quantize(weights, self.storages[table].bits, row_params)


class _RowParams(NamedTuple):
    """Scale and bias of whole rows in a hashed table, for the rows on this rank."""

    keys: Tensor
    """Row keys, ascending, int64 [n]."""
    params: Tensor
    """Scale and bias per row, fp16 [n, 2]."""


def _params_by_key(tables: Sequence[Table], storage: HashedRows, env: ShardingEnv) -> _RowParams:
    """Compute the scale and bias of whole rows in a hashed table split by columns. Collective.

    Returns:
        Scale and bias of every row on this rank, by row key.
    """
    with together(env.world, _NAME):
        extremes = [(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0))]
        for table in tables:
            for block in table.stream():
                if "weight" in block.parts:
                    assert isinstance(block.keys, Tensor)
                    rows = block.parts["weight"].float()
                    extremes.append((block.keys, rows.amin(1), rows.amax(1)))
        # A rank may hold several column shards of the same rows.
        keys, least, greatest = _merge_extremes(extremes)
    # Exchange minima and maxima for an interval of keys at once, so messages stay small.
    for first in range(0, storage.max_rows, _BLOCK_ROWS):
        span = [key_at(min(row, storage.max_rows), storage.max_rows) for row in (first, first + _BLOCK_ROWS)]
        inside = in_span(keys, (span[0], span[1]))
        # The interval bounds depend only on ``max_rows``, so all ranks exchange the same intervals in the
        # same number of rounds.
        local = keys[inside], least[inside], greatest[inside]
        all_keys, low, high = _merge_extremes(gather_objects(local, env.shard, _NAME))
        # Exact matches: ``all_keys`` has every local key, because this rank has sent them.
        positions = torch.searchsorted(all_keys, local[0])
        least[inside], greatest[inside] = low[positions], high[positions]
    return _RowParams(keys, nbit.params_of(least, greatest, storage.bits))


def _merge_extremes(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Merge lists of keys with a minimum and a maximum per key, such as those of several ranks.

    Returns:
        Distinct keys, ascending, int64 [n]; minimum and maximum per key, fp32 [n].
    """
    keys, least, greatest = (torch.cat(part) for part in zip(*parts, strict=True))
    distinct, inverse = torch.unique(keys, return_inverse=True)
    low = torch.full((len(distinct),), torch.inf).scatter_reduce_(0, inverse, least, "amin")
    high = torch.full((len(distinct),), -torch.inf).scatter_reduce_(0, inverse, greatest, "amax")
    return distinct, low, high


def _extremes(tables: Sequence[Table], first: int, end: int, env: ShardingEnv) -> Tensor:
    """Return the minimum and maximum of whole rows in a fixed table split by columns. Collective.

    Returns:
        Minimum (index 0) and maximum (index 1) of every row over the columns on all ranks, fp32 [2, R].
    """
    with together(env.world, _NAME):
        # Infinities stand for rows that are not on this rank, and lose against every value.
        local = torch.stack([torch.full((end - first,), torch.inf), torch.full((end - first,), -torch.inf)])
        for table in tables:
            for block in table.stream(keys=(first, end)):
                assert isinstance(block.keys, range)
                rows = block.parts["weight"].float()
                span = slice(block.keys.start - first, block.keys.stop - first)
                local[0, span] = torch.minimum(local[0, span], rows.amin(1))
                local[1, span] = torch.maximum(local[1, span], rows.amax(1))
    # Outside ``together``, whose block must not contain collectives.
    everywhere = all_gather(local, env.shard, _NAME).wait().view(-1, *local.shape)
    return torch.stack([everywhere[:, 0].amin(0), everywhere[:, 1].amax(0)])


def _build_module(
    module: Sharded, quantised: _QuantizedTables, types: Mapping[str, DataType], output_dtype: DataType | None
) -> Sharded:
    """Build a copy of a sharded module with tables in the new data types. Collective."""
    old = module.built
    # Inference: no optimizer, and the ranks and routes stay.
    options = replace(old.options, optimizer=None, optimizer_tables=None, output_dtype=output_dtype)
    num_tables = len(quantised.storages)
    # The same plan and routes as before, with new storages and without update rules.
    blueprint = Blueprint(
        plan=old.plan,
        routing=old.routing,
        rules=[None] * num_tables,
        storages=quantised.storages,
        env=old.env,
        device=old.device,
        options=options,
    )
    contents = Contents(
        split=[quantised.split],
        local=quantised.local,
        steps=[0] * num_tables,
        trained=[False] * num_tables,
    )
    parts = assemble(blueprint, contents)
    # Collective: counts hashed rows over all ranks.
    parts.tables.recount()
    return type(module)(empty_like(module, types, options.bounds_check, output_dtype), parts)  # type: ignore[arg-type]


def _storages(module: Any, types: Mapping[str, DataType]) -> dict[str, RowStorage]:
    """Return the new row storage by table name."""
    built = module.built
    return {
        table.name: _storage(types[table.name], storage)
        for table, storage in zip(built.routing.tables, built.storages, strict=True)
    }


def _storage(data_type: DataType, before: RowStorage) -> RowStorage:
    """Return the row storage of a table in the new data type. Rows in a file move to memory."""
    # Rows in a file come to memory.
    if is_growable(before):
        return replace(before, dtype=data_type.dtype, bits=data_type.bits, file=None)
    stays = before.dtype == data_type.dtype and before.rows_in_parameter
    return before if stays else storage_for(data_type)


def _check_search(module: Any, types: Mapping[str, DataType], rounding: Rounding) -> None:
    """Check that "search" is not requested for a table split by columns: a rank would need whole rows."""
    for table, is_cut in zip(module.built.routing.tables, _cut_by_columns(module.built.routing), strict=True):
        if is_cut and rounding == "search" and types[table.name].bits:
            raise ValueError(
                f"table {table.name!r} is split by columns, and rounding='search' needs whole rows. Reshard "
                "the model to a plan without column splits, or use rounding='minmax'."
            )


def _cut_by_columns(routing: Routing) -> list[bool]:
    """Return per table whether it is split by columns, that is, whether a rank has only a part of a row."""
    # All ranks have the routing of all ranks, so they agree without a message.
    cut = [False] * len(routing.tables)
    for work in routing.work:
        for rectangle in work.rectangles:
            cut[rectangle.table] |= rectangle.c1 - rectangle.c0 < routing.tables[rectangle.table].dim
    return cut
