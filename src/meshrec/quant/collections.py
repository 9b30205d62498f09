"""Collections with the same tables in other data types."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from meshrec.modules import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from meshrec.modules.embedding_modules import TableCollection


def empty_like(
    module: Any, types: Mapping[str, DataType], bounds_check: BoundsCheckMode, output_dtype: DataType | None
) -> TableCollection:
    """Return an unsharded collection on ``meta`` with the tables of ``module`` in other types, in memory."""
    if hasattr(module, "embedding_bag_configs"):
        made: TableCollection = EmbeddingBagCollection(
            tables=[_retyped(config, types) for config in module.embedding_bag_configs()],
            is_weighted=module.is_weighted(),
            device="meta",
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
    else:
        made = EmbeddingCollection(
            tables=[_retyped(config, types) for config in module.embedding_configs()],
            device="meta",
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
    return made.requires_grad_(False)


def _retyped(config: Any, types: Mapping[str, DataType]) -> Any:
    assert isinstance(config, BaseEmbeddingConfig)
    keys = config.keys
    if keys is not None:  # a number of bytes would give another number of rows, and so other first rows
        keys = replace(keys, max_rows=config.num_embeddings, max_bytes=None)
    return replace(config, data_type=types[config.name], storage=None, keys=keys)
