"""Quantization for embedding tables in a trained model, for inference."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.optim.table_names import full_names
from meshrec.quant.collections import converted_blocks, empty_like, rows_by_table
from meshrec.quant.precision import Rounding, check_rounding, encode_rows, types_by_table
from meshrec.quant.sharded import configs_of, quantised_shards
from meshrec.tables.hashed.table import HashedTable, is_growable


def quantize(
    model: nn.Module,
    weights: DataType = DataType.INT8,
    *,
    per_table: Mapping[str, DataType] | None = None,
    output_dtype: DataType | None = None,
    dense: DataType | None = None,
    rounding: Rounding = "minmax",
) -> nn.Module:
    """Return a copy of a trained model for inference, with quantized embedding tables.

    The copy has the same EmbeddingBagCollections and EmbeddingCollections, with tables in other data types. A
    table with unchanged type is not copied, but shares memory with ``model``.

    Args:
        model: a model with embedding collections (fused or not), a collection, or a
            DistributedModelParallel. A DistributedModelParallel must be passed on all ranks: every rank
            quantizes the local shards without gathering, and the copy keeps the plan.
        weights: data type for tables not in ``per_table``.
        per_table: data types for some tables, by table name, or by ``path.name`` if tables in several modules
            have the same name.
        output_dtype: data type of the collections' outputs: FP32, FP16 or BF16. None: FP32.
        dense: BF16 stores and computes ``nn.Linear`` layers in bf16; None leaves them unchanged.
        rounding: how the scale and bias of a row are chosen; see ``Rounding``.

    Raises:
        ValueError: the model has no collection; a table is unknown or already quantized; a data type is
            unknown; or a row has NaN or infinity (the message names table and row).
    """
    check_rounding(rounding)
    output_dtype = output_dtype or DataType.FP32
    # Check all arguments before the first table is converted, which may take minutes.
    if dense not in (None, DataType.BF16):
        raise ValueError(f"dense must be DataType.BF16 or None, got {dense!r}.")
    if isinstance(model, DistributedModelParallel):
        sharded = model.sharded_modules
        types = checked_types({path: configs_of(m) for path, m in sharded.items()}, weights, per_table)
        # Collective, and the checks above are the same on all ranks: either all ranks reach it, or none.
        moved = quantised_shards(sharded, types, output_dtype, rounding)
        quantised = model.with_sharded(
            copy_except(model.module, {id(sharded[p]): m for p, m in moved.items()}), moved
        )
        finish_copy(quantised, dense)
        return quantised
    collections = {path: m for path, m in model.named_modules() if isinstance(m, TableCollection)}
    if not collections:
        raise ValueError(
            f"{type(model).__name__} contains no EmbeddingBagCollection and no EmbeddingCollection. Pass a "
            "module that does."
        )
    configs = {path: [config for config, _ in m.tables().values()] for path, m in collections.items()}
    types = checked_types(configs, weights, per_table)
    memo: dict[int, nn.Module] = {
        id(m): _quantize_collection(m, types[path], output_dtype, rounding) for path, m in collections.items()
    }
    # The model may itself be a collection.
    result = memo.get(id(model)) or copy_except(model, memo)
    finish_copy(result, dense)
    return result


def checked_types(
    configs: Mapping[str, Sequence[BaseEmbeddingConfig]],
    weights: DataType,
    per_table: Mapping[str, DataType] | None,
) -> dict[str, dict[str, DataType]]:
    """Check the ``quantize`` arguments, and return the new data type by module path and table name.

    Args:
        configs: configs of the original tables by module path.
        weights, per_table: see ``quantize``.

    Raises:
        ValueError: a table is already quantized, or see ``types_by_table``.
    """
    if quantised := [
        config for module_configs in configs.values() for config in module_configs if config.data_type.bits
    ]:
        raise ValueError(
            f"table {quantised[0].name!r} is already quantised ({quantised[0].data_type}). Quantise the "
            "trained model."
        )
    names = {path: [config.name for config in module_configs] for path, module_configs in configs.items()}
    return types_by_table(names, weights, per_table)


def copy_except(model: nn.Module, replaced: Mapping[int, nn.Module]) -> nn.Module:
    """Return a deep copy of a model, but put given replacements where some of the modules were.

    Optimizers, which ``meshrec.fuse`` stores as module attributes, are left out.

    Args:
        model: model to copy.
        replaced: maps ``id(module)`` of an original module to the replacement, which is used without a copy.
    """
    optimizers = {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.optim.Optimizer) and id(module) not in replaced
    }
    # deepcopy takes objects that it finds here by id, instead of copying them.
    memo: dict[int, Any] = {**replaced, **{id(value): None for value in optimizers.values()}}
    result = copy.deepcopy(model, memo)
    for path, name in optimizers:
        if id(model.get_submodule(path)) not in replaced:
            vars(result.get_submodule(path)).pop(name, None)
    return result


class BFloat16Linear(nn.Linear):
    """Linear layer with bf16 weights and arithmetic. The output has the input's dtype."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.to(torch.bfloat16)).to(input.dtype)


def in_bfloat16(model: nn.Module) -> None:
    """Replace every ``nn.Linear`` inside a model by a ``BFloat16Linear`` with the same weights, in place."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            # Not subclasses, which may compute something else.
            if type(child) is nn.Linear:
                # Build it on meta: the weights are replaced below, and initializing them would draw random
                # numbers.
                replacement = BFloat16Linear(child.in_features, child.out_features, device="meta")
                replacement._parameters.update(
                    {
                        parameter_name: None if p is None else nn.Parameter(p.detach().to(torch.bfloat16))
                        for parameter_name, p in child._parameters.items()
                    }
                )
                setattr(module, name, replacement)


def finish_copy(model: nn.Module, dense: DataType | None) -> None:
    """Finish the result of ``quantize``: convert linear layers to bf16 if requested, and call ``eval()``."""
    if dense is DataType.BF16:
        in_bfloat16(model)
    model.eval()


def table_bytes(model: nn.Module) -> dict[str, int]:
    """Return the bytes that the rows of each table take, without optimizer state.

    For a hashed table, which adds rows as new IDs occur, only the rows present now count.

    Args:
        model: model with embedding collections, quantized or not.

    Returns:
        Bytes by table name, or by ``path.name`` if tables in several modules have the same name.
    """
    collections = {path: m for path, m in model.named_modules() if isinstance(m, TableCollection)}
    tables = {path: [config.name for config, _ in m.tables().values()] for path, m in collections.items()}
    names = full_names(tables)
    return {
        names[path, config.name]: storage_of(config, weight).num_bytes(
            num_rows[config.name], config.embedding_dim
        )
        for path, module in collections.items()
        for num_rows in [rows_by_table(module)]
        for config, weight in module.tables().values()
    }


def _quantize_collection(
    module: TableCollection,
    types: Mapping[str, DataType],
    output_dtype: DataType | None,
    rounding: Rounding,
) -> TableCollection:
    """Return a copy of a collection with tables in other data types."""
    collection = empty_like(module, types, module.bounds_check, output_dtype)
    _, holders = collection.table_holders()
    hashed = module.hashed_tables()
    for config, weight in module.tables().values():
        # A table on meta has no rows to convert; the copy stays on meta, too.
        if weight.is_meta:
            continue
        if (table := hashed.get(config.name)) is not None:
            target = collection.table_modules()[config.name]
            assert is_growable(target.storage)
            # Same row format: use the original's rows without a copy.
            if target.storage.row_format == table.storage.row_format:
                target.share(table)
            else:
                target.to_empty(device="cpu")
                stored = _rows_with_ids(table)
                blocks = converted_blocks(stored, target.storage, types[config.name], rounding)
                target.tables[0].load(blocks)
        else:
            values, data_type = weight.detach(), types[config.name]
            rows = encode_rows(values, data_type, rounding, config.name)
            holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    # The copy keeps the mode of the original until finish_copy() switches to evaluation mode.
    collection.train(module.training)
    return collection


def _rows_with_ids(table: HashedTable) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the IDs, int64 [n], and rows, [n, D], of a hashed table in blocks, sorted by key."""
    for block in table.stream():
        # Blocks without weights have counts of IDs waiting for admission, which inference does not need.
        if "weight" in block.parts:
            assert isinstance(block.keys, Tensor)
            yield table.ids_of(block.keys), block.parts["weight"]
