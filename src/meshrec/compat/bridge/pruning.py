"""TorchRec's row pruning: quantization keeps only the first rows of some tables."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshrec.compat.bridge.table_configs import SettableConfig
from meshrec.modules import BaseEmbeddingConfig, EmbeddingBagCollection, EmbeddingCollection
from meshrec.modules.embedding_modules import TableCollection
from meshrec.quant.quantize import copy_except

# Module attribute that set_pruning_data sets and quantization reads. State dicts do not contain it.
_NUM_ROWS = "_rows_after_pruning"


def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Mark tables for pruning. Quantization then keeps only their first rows.

    Args:
        model: model to mark.
        tables_to_rows_post_pruning: row count to keep, by table.
        module_types: module types to mark (default: EmbeddingBagCollection).

    Returns:
        The model.
    """
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection if module_types is None else tuple(module_types)):
            setattr(module, _NUM_ROWS, dict(tables_to_rows_post_pruning))
    return model


def pruned(module: nn.Module) -> nn.Module:
    """Return ``module``, or a copy with pruned tables if ``set_pruning_data`` marked any."""
    replaced: dict[int, nn.Module] = {}
    for child in module.modules():
        if isinstance(child, TableCollection):
            replaced[id(child)] = _with_num_rows(child, getattr(child, _NUM_ROWS, {}))
    # `_with_num_rows` returns the collection itself if none of its tables is pruned.
    if all(id(replacement) == original for original, replacement in replaced.items()):
        return module
    return replaced.get(id(module)) or copy_except(module, replaced)


def _with_num_rows(collection: TableCollection, num_rows: Mapping[str, int]) -> TableCollection:
    """Return a collection with only the first rows of some tables, as views.

    If the collection has none of these tables, it is returned unchanged.
    """
    configs = [config for config, _ in collection.tables().values()]
    if not any(config.name in num_rows for config in configs):
        return collection
    for config in configs:
        count = num_rows.get(config.name, config.num_embeddings)
        if not 0 < count <= config.num_embeddings:
            raise ValueError(
                f"table {config.name!r} has {config.num_embeddings} rows, of which {count} are to be kept. "
                "Keep at least one, and not more than there are."
            )
    fewer = [
        _with_rows(config, num_rows[config.name]) if config.name in num_rows else config for config in configs
    ]
    result = _like(collection, fewer)
    _, holders = result.table_holders()
    for config, (_, weight) in zip(fewer, collection.tables().values(), strict=True):
        # A view: pruning does not copy the table, and quantization reads it once.
        rows = weight.detach()[: config.num_embeddings]
        holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    return result


def _with_rows(config: BaseEmbeddingConfig, num_rows: int) -> BaseEmbeddingConfig:
    """Return a table config with another number of rows."""
    pruned_rows = {"num_embeddings_post_pruning": num_rows} if isinstance(config, SettableConfig) else {}
    return replace(config, num_embeddings=num_rows, **pruned_rows)  # type: ignore[arg-type]


def _like(collection: TableCollection, configs: list[Any]) -> TableCollection:
    """Return a collection of the same kind with other configs, without memory (on ``meta``)."""
    device = torch.device("meta")
    if isinstance(collection, EmbeddingBagCollection):
        return EmbeddingBagCollection(configs, is_weighted=collection.is_weighted(), device=device)
    return EmbeddingCollection(configs, device=device)
