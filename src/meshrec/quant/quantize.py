"""Quantisation of the tables of a trained model."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.hashed_holder import HashedHolder
from meshrec.modules.table_lookup import storage_of
from meshrec.quant.collections import empty_like, encoded_blocks, rows_by_table
from meshrec.quant.dense import in_bfloat16
from meshrec.quant.precision import Rounding, check_rounding, chosen_types, encoded
from meshrec.quant.sharded import configs_of, quantised_shards


def quantize(
    model: nn.Module,
    weights: DataType = DataType.INT8,
    *,
    per_table: Mapping[str, DataType] | None = None,
    output_dtype: DataType | None = None,
    dense: DataType | None = None,
    rounding: Rounding = "minmax",
) -> nn.Module:
    """Return a copy of ``model`` for inference with the rows of its tables quantised. ``model`` does not
    change.

    Every EmbeddingBagCollection and EmbeddingCollection in it is replaced by one that holds the same tables
    in other data types. No table is copied as fp32: a table that keeps its type shares its memory with
    ``model``.

    Args:
        model: a model with embedding collections, fused ones included, or a collection. A
            DistributedModelParallel, passed on all its ranks, gives one under the same plan: each rank
            quantises its own part, and no table is gathered.
        weights: data type of the tables.
        per_table: other data types for some tables, by name.
        output_dtype: data type of the collections' outputs: FP32 (None), FP16 or BF16.
        dense: BF16 computes ``nn.Linear`` layers, and stores their weights, in bf16. None leaves them as they
            are.
        rounding: see ``Rounding``.

    Raises:
        ValueError: the model has no collections; a table does not exist or is quantised already; a data type
            is unknown; or a row contains NaN or infinity (the error names table and row).
    """
    check_rounding(rounding)
    output_dtype = output_dtype or DataType.FP32
    if dense not in (None, DataType.BF16):
        raise ValueError(f"dense must be DataType.BF16 or None, got {dense!r}.")
    if isinstance(model, DistributedModelParallel):
        sharded = model.sharded_modules
        types = checked_types(
            [config for m in sharded.values() for config in configs_of(m)], weights, per_table
        )
        moved = quantised_shards(sharded, types, output_dtype, rounding)
        made = model.with_sharded(
            copied_but_for(model.module, {id(sharded[p]): m for p, m in moved.items()}), moved
        )
        finish(made, dense)
        return made
    collections = {path: m for path, m in model.named_modules() if isinstance(m, TableCollection)}
    if not collections:
        raise ValueError(
            f"{type(model).__name__} contains no EmbeddingBagCollection and no EmbeddingCollection. Pass a "
            "module that does."
        )
    configs = [config for m in collections.values() for config, _ in m.tables().values()]
    types = checked_types(configs, weights, per_table)
    memo: dict[int, nn.Module] = {
        id(m): _quantised(m, types, output_dtype, rounding) for m in collections.values()
    }
    result = memo.get(id(model)) or copied_but_for(model, memo)
    finish(result, dense)
    return result


def checked_types(
    configs: Sequence[BaseEmbeddingConfig], weights: DataType, per_table: Mapping[str, DataType] | None
) -> dict[str, DataType]:
    """Return the data type of each table. ``quantize`` lists the errors."""
    if quantised := [config for config in configs if config.data_type.bits]:
        raise ValueError(
            f"table {quantised[0].name!r} is already quantised ({quantised[0].data_type}). Quantise the "
            "trained model."
        )
    return chosen_types([config.name for config in configs], weights, per_table)


def copied_but_for(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Copy a model deeply, with some modules (by ``id``) replaced.

    Optimizers are left out; ``meshrec.fuse`` keeps them as attributes of modules.
    """
    optimizers = {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.optim.Optimizer) and id(module) not in replaced
    }
    memo: dict[int, Any] = {**replaced, **{id(value): None for value in optimizers.values()}}
    result = copy.deepcopy(model, memo)
    for path, name in optimizers:
        if id(model.get_submodule(path)) not in replaced:
            vars(result.get_submodule(path)).pop(name, None)
    return result


def finish(model: nn.Module, dense: DataType | None) -> None:
    """Finish a copy: convert linear layers to bf16 if asked, and switch to evaluation mode."""
    if dense is DataType.BF16:
        in_bfloat16(model)
    model.eval()


def table_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes of the rows of each table, by the table's name, without optimizer state.

    A hashed table has the rows of the IDs that are alive.
    """
    return {
        config.name: storage_of(config, weight).num_bytes(num_rows[config.name], config.embedding_dim)
        for module in model.modules()
        if isinstance(module, TableCollection)
        for num_rows in [rows_by_table(module)]
        for config, weight in module.tables().values()
    }


def _quantised(
    module: TableCollection,
    types: Mapping[str, DataType],
    output_dtype: DataType | None,
    rounding: Rounding,
) -> TableCollection:
    made = empty_like(module, types, module.bounds_check, output_dtype)
    _, holders = made.table_holders()
    hashed = module.hashed_tables()
    for config, weight in module.tables().values():
        if weight.is_meta:
            continue
        if (table := hashed.get(config.name)) is not None:
            holder = holders._modules[config.name]
            assert isinstance(holder, HashedHolder)
            if holder.storage.form == table.storage.form:
                holder.share(table)
            else:
                holder.to_empty(device="cpu")
                holder.table.load(encoded_blocks(table, holder.storage, types[config.name], rounding))
        else:
            numbers, data_type = weight.detach(), types[config.name]
            rows = encoded(numbers, data_type, rounding, config.name)
            holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    made.train(module.training)
    return made
