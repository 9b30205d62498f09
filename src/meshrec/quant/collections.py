"""Embedding collections with the same tables in other data types."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from meshrec.modules import (
    BaseEmbeddingConfig,
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from meshrec.modules.embedding_modules import TableCollection
from meshrec.ops.index import mix
from meshrec.quant.precision import Rounding, encode_rows
from meshrec.tables.hashed.table import HashedRows
from meshrec.tables.table import RowBlock, Span


def empty_like(
    module: Any, types: Mapping[str, DataType], bounds_check: BoundsCheckMode, output_dtype: DataType | None
) -> TableCollection:
    """Create an unsharded collection on ``meta`` with the ``module`` tables in other data types.

    Args:
        module: collection, sharded or not.
        types: data type by table name.
        bounds_check: what happens to IDs outside a table.
        output_dtype: output data type.
    """
    if hasattr(module, "embedding_bag_configs"):
        collection: TableCollection = EmbeddingBagCollection(
            tables=[_with_data_type(config, types) for config in module.embedding_bag_configs()],
            is_weighted=module.is_weighted(),
            device="meta",
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
    else:
        collection = EmbeddingCollection(
            tables=[_with_data_type(config, types) for config in module.embedding_configs()],
            device="meta",
            bounds_check=bounds_check,
            output_dtype=output_dtype,
        )
    return collection.requires_grad_(False)


def rows_by_table(module: TableCollection) -> dict[str, int]:
    """Return row counts by table; for a hashed table, the present count."""
    hashed = module.hashed_tables()
    return {
        config.name: hashed[config.name].num_alive if config.name in hashed else config.num_embeddings
        for config, _ in module.tables().values()
    }


def converted_blocks(
    stored: Iterable[tuple[Tensor, Tensor]], storage: HashedRows, data_type: DataType, rounding: Rounding
) -> Iterator[RowBlock]:
    """Yield unsharded hashed table rows in another data type, block by block.

    Args:
        stored: IDs [n] and rows [n, D], in key order.
        storage: target table storage.
        data_type: target data type.
        rounding: see ``quantize``.

    Raises:
        ValueError: a value is NaN, infinite or out of range; the error names table and ID.
    """
    for ids, rows in stored:
        converted = encode_rows(rows, data_type, rounding, storage.name, ids=ids)
        yield make_block(converted, mix(ids, storage.keys.seed), storage, (0, storage.dim))


def make_block(rows: Tensor, keys: Tensor, storage: HashedRows, columns: Span) -> RowBlock:
    """Return a row block, given rows already in the ``storage`` memory format.

    Args:
        rows: rows [n, ...].
        keys: keys, int64 [n].
        storage: target table storage.
        columns: table columns in ``rows``, start and end.
    """
    form = storage.form
    parts = zip(form.row_parts, form.parts(rows, columns[1] - columns[0]), strict=True)
    return RowBlock(keys, columns, {part.name: values for part, values in parts})


def _with_data_type(config: Any, types: Mapping[str, DataType]) -> Any:
    """Return the config with the table's new data type, in memory."""
    assert isinstance(config, BaseEmbeddingConfig)
    keys = config.keys
    if keys is not None:  # with max_bytes, another row size would change max_rows and the initial rows
        keys = replace(keys, max_rows=config.num_embeddings, max_bytes=None)
    return replace(config, data_type=types[config.name], storage=None, keys=keys)
