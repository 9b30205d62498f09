"""A model with its tables quantised, made from a trained one."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.quant.collections import empty_like
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
    """A copy of ``model`` for inference, with the rows of its tables quantised; ``model`` stays as it is.

    Every EmbeddingBagCollection and EmbeddingCollection in it is replaced by one with the same tables in
    other data types. No table is copied in fp32: one that keeps its type shares its memory with ``model``.

    Args:
        model: with embedding collections, also fused ones; or a collection itself. From a
            DistributedModelParallel, on all of its ranks, comes one under the same plan: each rank quantises
            what it holds, and no table is put together.
        weights: the data type of the tables.
        per_table: other data types for some tables, by name.
        output_dtype: of what the collections give: FP32 (None), FP16 or BF16.
        dense: BF16: the weights of ``nn.Linear`` layers, and their products, in bf16; None: as they are.
        rounding: see ``Rounding``.

    Raises:
        ValueError: for a model without collections, a table that is not there or is quantised already, an
            unknown data type, and a row with a NaN or an infinity: names table and row.
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
    """The data type of each table; see ``quantize`` for what is refused."""
    if quantised := [config for config in configs if config.data_type.bits]:
        raise ValueError(
            f"table {quantised[0].name!r} is quantised already ({quantised[0].data_type}). Quantise the "
            "model that was trained."
        )
    return chosen_types([config.name for config in configs], weights, per_table)


def copied_but_for(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """A deep copy with other modules in the place of some (by ``id``), and without what trains the model,
    which ``meshrec.fuse`` keeps in attributes.
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
    """What is left to do with a copy: linear layers in bf16, and evaluation mode."""
    if dense is DataType.BF16:
        in_bfloat16(model)
    model.eval()


def table_bytes(model: nn.Module) -> dict[str, int]:
    """What the rows of each table of a model take, by the table's name, without optimizer state."""
    return {
        config.name: storage_of(config, weight).num_bytes(config.num_embeddings, config.embedding_dim)
        for module in model.modules()
        if isinstance(module, TableCollection)
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
    for config, weight in module.tables().values():
        if not weight.is_meta:
            numbers, data_type = weight.detach(), types[config.name]
            rows = encoded(numbers, data_type, rounding, config.name)
            holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    made.train(module.training)
    return made
