"""Quantisation of sharded tables under the same plan: each rank quantises its own part."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

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
from meshrec.quant.collections import empty_like
from meshrec.quant.precision import Rounding, check_rows, encoded
from meshrec.tables.holdings import Held, Holdings, in_parameter
from meshrec.tables.packing import Packing
from meshrec.tables.storage import RowStorage, SideRows
from meshrec.tables.table import RowBlock, TableRows

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
        params = {
            t: self._params_of_whole_rows(split, t)
            for t, is_cut in enumerate(_cut_by_columns(built.routing))
            if is_cut and self.storages[t].bits
        }
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
    return type(module)(empty_like(module, types, options.bounds_check, output_dtype), made)  # type: ignore[arg-type]


def _storages(module: Any, types: Mapping[str, DataType]) -> dict[str, RowStorage]:
    built = module.built
    return {
        table.name: _storage(types[table.name], storage)
        for table, storage in zip(built.routing.tables, built.storages, strict=True)
    }


def _storage(data_type: DataType, before: RowStorage) -> RowStorage:
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
