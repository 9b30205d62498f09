"""Quantisation of sharded tables under the same plan: each rank quantises its own part."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.comms.collectives import all_gather, gather_objects
from meshrec.comms.mesh import Axis
from meshrec.distributed.build import Blueprint, Contents, ModuleParts, assemble, check_cuts
from meshrec.distributed.embedding_modules import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.distributed.routing import Routing
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.table_lookup import storage_for
from meshrec.ops import nbit
from meshrec.quant.collections import block_of, empty_like
from meshrec.quant.precision import Rounding, check_rows, encoded
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.holdings import Held, Holdings, in_parameter, in_table
from meshrec.tables.key_space import key_at
from meshrec.tables.packing import Packing
from meshrec.tables.storage import RowStorage, SideRows
from meshrec.tables.table import RowBlock, TableRows
from meshrec.tables.waiting import in_span

# R rows of a block

_BLOCK_ROWS = 1 << 18

Sharded = ShardedEmbeddingBagCollection | ShardedEmbeddingCollection


def configs_of(module: Any) -> list[BaseEmbeddingConfig]:
    """Return the configs of a sharded module's tables."""
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    result: list[BaseEmbeddingConfig] = configs()
    return result


def quantised_shards(
    modules: Mapping[str, Any],
    types: Mapping[str, DataType],
    output_dtype: DataType | None,
    rounding: Rounding,
) -> dict[str, Any]:
    """Return quantised sharded modules, by path, for sharded modules. Collective.

    Raises:
        ValueError: a row cannot be quantised, or the plan cuts columns within a byte. It is raised on every
            rank.
    """
    for module in modules.values():
        if module.built.env.devices:
            raise ValueError(
                "the model is split over several devices of one process. Quantise it first, then shard it."
            )
        check_cuts(_storages(module, types), module.plan)
        _check_search(module, types, rounding)
    made, error = {}, None
    for path, module in modules.items():
        quantised = _Quantised(module.built, types, rounding)
        made[path] = _sharded(module, quantised, types, output_dtype) if quantised.error is None else None
        error = error or quantised.error
    world = next(iter(modules.values())).built.env.world
    if reasons := [reason for reason in gather_objects(error, world, "quantising") if reason is not None]:
        raise ValueError(reasons[0])
    return made


class _Quantised:
    """The quantised tables of one module on this rank; ``error`` says why a row could not be quantised."""

    def __init__(self, built: ModuleParts, types: Mapping[str, DataType], rounding: Rounding) -> None:
        self._types, self._rounding, self._built = types, rounding, built
        self.storages = [
            _storage(types[table.name], storage)
            for table, storage in zip(built.routing.tables, built.storages, strict=True)
        ]
        self.error: str | None = None
        split, local = built.tables.split.held, built.tables.local.held
        cut = [t for t, is_cut in enumerate(_cut_by_columns(built.routing)) if is_cut]
        self._by_key: dict[int, _RowParams] = {}
        params = {}
        for t in cut:
            storage = self.storages[t]
            if storage.bits and isinstance(storage, HashedRows):
                here = split.of_table(t)
                self._by_key[t] = _params_by_key(
                    [] if here is None else here.tables, storage, self._built.env.shard
                )
            elif storage.bits:
                params[t] = self._params_of_whole_rows(split, t)
        self.split, self.local = self._converted(split, params), self._converted(local, {})

    def _params_of_whole_rows(self, held: Holdings, table: int) -> Tensor:
        """Return the scale and bias of whole rows, fp16 [rows, 2], from the columns on all ranks.
        Collective.
        """
        axis, num_rows = self._built.env.shard, self._built.routing.tables[table].num_rows
        here = held.of_table(table)
        tables = [] if here is None else here.tables
        blocks = [
            _extremes(tables, first, min(first + _BLOCK_ROWS, num_rows), axis)
            for first in range(0, num_rows, _BLOCK_ROWS)
        ]
        least, greatest = torch.cat(blocks, 1)
        return nbit.params_of(least, greatest, self.storages[table].bits)

    def _converted(self, held: Holdings, params: Mapping[int, Tensor]) -> Holdings:
        converted: list[Held] = []
        for each in held.held:
            storage = self.storages[each.packing.table]
            if isinstance(storage, HashedRows):
                converted.append(self._hashed(each, storage))
                continue
            made = Packing(each.packing.rectangles, storage)
            rows = storage.allocate(*made.shape, each.parameter.device)
            for table, target in zip(each.tables, made.views(rows), strict=True):
                for block in table.stream():
                    assert isinstance(block.keys, range)
                    first = block.keys.start - table.rectangle.r0
                    try:
                        target[first : first + len(block.keys)] = self._encoded(
                            table.rectangle.table, block, params
                        )
                    except ValueError as error:
                        self.error = self.error or str(error)
            no_state: list[list[Tensor]] = [[] for _ in made.rectangles]
            converted.append(in_parameter(nn.Parameter(rows, requires_grad=False), made, no_state, None))
        return Holdings(converted)

    def _hashed(self, held: Held, storage: HashedRows) -> Held:
        packing = Packing(held.packing.rectangles, storage)
        rows = storage.allocate(0, packing.shape[1], None)
        made = [storage.table(rectangle, None, None) for rectangle in packing.rectangles]
        for source, target in zip(held.tables, made, strict=True):
            assert isinstance(source, HashedTable)
            try:
                target.load(self._blocks_of(source, storage))
            except ValueError as error:
                self.error = self.error or str(error)
        return in_table(nn.Parameter(rows, requires_grad=False), packing, made)

    def _blocks_of(self, table: HashedTable, storage: HashedRows) -> Iterator[RowBlock]:
        data_type, columns = self._types[storage.name], table.rectangle.columns
        if table.storage.form == storage.form:
            names = {"waiting", *(part.name for part in storage.row_parts)}
            for block in table.stream():
                yield block._replace(parts={n: part for n, part in block.parts.items() if n in names})
            return
        for block in table.stream():
            if "weight" not in block.parts:
                continue
            assert isinstance(block.keys, Tensor)
            numbers, ids = block.parts["weight"], table.ids_of(block.keys)
            by_key = self._by_key.get(table.rectangle.table)
            if by_key is None:
                rows = encoded(numbers, data_type, self._rounding, storage.name, ids=ids)
            else:
                own = by_key.params[torch.searchsorted(by_key.keys, block.keys)]
                for values in (numbers.half(), own):
                    check_rows(values, data_type, storage.name, ids=ids)
                rows = nbit.quantize(numbers, storage.bits, own)
            yield block_of(rows, block.keys, storage, columns)

    def _encoded(self, table: int, block: RowBlock, params: Mapping[int, Tensor]) -> Tensor:
        assert isinstance(block.keys, range)
        numbers, first = block.parts["weight"], block.keys.start
        name = self._built.routing.tables[table].name
        data_type = self._types[name]
        if table not in params:
            return encoded(numbers, data_type, self._rounding, name, first_row=first)
        own = params[table][first : block.keys.stop]
        check_rows(numbers.half(), data_type, name, first_row=first)
        check_rows(own, data_type, name, first_row=first)
        return nbit.quantize(numbers, self.storages[table].bits, own)


class _RowParams(NamedTuple):
    """The scales and biases of whole rows, fp16 [n, 2], by key, int64 [n] ascending."""

    keys: Tensor
    params: Tensor


def _params_by_key(tables: Sequence[TableRows], storage: HashedRows, axis: Axis) -> _RowParams:
    """Return the scale and bias of the whole rows of which this rank has columns. Collective."""
    found = [(torch.empty(0, dtype=torch.int64), torch.empty(0), torch.empty(0))]
    for table in tables:
        for block in table.stream():
            if "weight" in block.parts:
                assert isinstance(block.keys, Tensor)
                rows = block.parts["weight"].float()
                found.append((block.keys, rows.amin(1), rows.amax(1)))
    keys, least, greatest = _by_key(found)
    for first in range(0, storage.max_rows, _BLOCK_ROWS):
        span = [key_at(min(row, storage.max_rows), storage.max_rows) for row in (first, first + _BLOCK_ROWS)]
        inside = in_span(keys, (span[0], span[1]))
        own = keys[inside], least[inside], greatest[inside]
        others, low, high = _by_key(gather_objects(own, axis, "quantising"))
        place = torch.searchsorted(others, own[0])
        least[inside], greatest[inside] = low[place], high[place]
    return _RowParams(keys, nbit.params_of(least, greatest, storage.bits))


def _by_key(parts: Sequence[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Join keys, and the minimum and maximum of the rows of each."""
    keys, least, greatest = (torch.cat(each) for each in zip(*parts, strict=True))
    distinct, inverse = torch.unique(keys, return_inverse=True)
    low = torch.full((len(distinct),), torch.inf).scatter_reduce_(0, inverse, least, "amin")
    high = torch.full((len(distinct),), -torch.inf).scatter_reduce_(0, inverse, greatest, "amax")
    return distinct, low, high


def _extremes(tables: Sequence[TableRows], first: int, end: int, axis: Axis) -> Tensor:
    """Return the minimum and maximum of each row in [first, end) over all ranks, fp32 [2, R]."""
    own = torch.stack([torch.full((end - first,), torch.inf), torch.full((end - first,), -torch.inf)])
    for table in tables:
        for block in table.stream(keys=(first, end)):
            assert isinstance(block.keys, range)
            rows = block.parts["weight"].float()
            place = slice(block.keys.start - first, block.keys.stop - first)
            own[0, place] = torch.minimum(own[0, place], rows.amin(1))
            own[1, place] = torch.maximum(own[1, place], rows.amax(1))
    everywhere = all_gather(own, axis, "quantising").wait().view(-1, *own.shape)
    return torch.stack([everywhere[:, 0].amin(0), everywhere[:, 1].amax(0)])


def _sharded(
    module: Sharded, quantised: _Quantised, types: Mapping[str, DataType], output_dtype: DataType | None
) -> Sharded:
    old = module.built
    options = replace(old.options, optimizer=None, optimizer_tables=None, output_dtype=output_dtype)
    num_tables = len(quantised.storages)
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
    made = assemble(blueprint, contents)
    made.tables.recount()
    return type(module)(empty_like(module, types, options.bounds_check, output_dtype), made)  # type: ignore[arg-type]


def _storages(module: Any, types: Mapping[str, DataType]) -> dict[str, RowStorage]:
    built = module.built
    return {
        table.name: _storage(types[table.name], storage)
        for table, storage in zip(built.routing.tables, built.storages, strict=True)
    }


def _storage(data_type: DataType, before: RowStorage) -> RowStorage:
    if isinstance(before, HashedRows):
        return replace(before, dtype=data_type.dtype, bits=data_type.bits)
    stays = before.dtype == data_type.dtype and not isinstance(before, SideRows)
    return before if stays else storage_for(data_type)


def _check_search(module: Any, types: Mapping[str, DataType], rounding: Rounding) -> None:
    for table, is_cut in zip(module.built.routing.tables, _cut_by_columns(module.built.routing), strict=True):
        if is_cut and rounding == "search" and types[table.name].bits:
            raise ValueError(
                f"table {table.name!r} is split by columns, and rounding='search' needs whole rows. Reshard "
                "the model to a plan without column splits, or use rounding='minmax'."
            )


def _cut_by_columns(routing: Routing) -> list[bool]:
    """Return, for each table, whether some rank holds only a part of a row."""
    cut = [False] * len(routing.tables)
    for work in routing.work:
        for rectangle in work.rectangles:
            cut[rectangle.table] |= rectangle.c1 - rectangle.c0 < routing.tables[rectangle.table].dim
    return cut
