"""Embedding collections, and row blocks, with the same tables in other data types."""

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
    """Create an unsharded, frozen collection on ``meta`` with the same tables in other data types.

    Args:
        module: original collection, sharded or not.
        types: new data type by table name.
        bounds_check: how the new collection treats IDs outside a table.
        output_dtype: output data type of the new collection.
    """
    # Sharded and unsharded collections have the same config methods.
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
    """Return the row count by table name.

    A hashed table adds rows as new IDs occur. The result has the number of rows present now, not the maximum.
    """
    # A hashed table's config has the limit, not the present count.
    hashed = module.hashed_tables()
    return {
        config.name: hashed[config.name].num_alive if config.name in hashed else config.num_embeddings
        for config, _ in module.tables().values()
    }


def converted_blocks(
    stored: Iterable[tuple[Tensor, Tensor]], storage: HashedRows, data_type: DataType, rounding: Rounding
) -> Iterator[RowBlock]:
    """Convert the rows of an unsharded hashed table to another data type, block by block.

    The key of a row is the hash of the ID.

    Args:
        stored: a pair per block: IDs, int64 [n], and the rows of these IDs, [n, D]. Both are sorted by key.
        storage: new table's storage.
        data_type: new data type.
        rounding: see ``quantize``.

    Yields:
        A row block for the new table per block in ``stored``.

    Raises:
        ValueError: a value is NaN, infinite or out of range; the error names table and ID.
    """
    for ids, rows in stored:
        converted = encode_rows(rows, data_type, rounding, storage.name, ids=ids)
        yield make_block(converted, mix(ids, storage.keys.seed), storage, (0, storage.dim))


def make_block(rows: Tensor, keys: Tensor, storage: HashedRows, columns: Span) -> RowBlock:
    """Return a row block for a hashed table, given rows that already have the table's memory format.

    Args:
        rows: rows in the memory format of ``storage``, [n, elements per row].
        keys: hash of the ID of every row, int64 [n].
        storage: description of the table's storage.
        columns: first and end (exclusive) table column that ``rows`` contain.
    """
    # Parts without policy values: inference evicts nothing.
    row_format = storage.row_format
    parts = zip(row_format.row_parts, row_format.parts(rows, columns[1] - columns[0]), strict=True)
    return RowBlock(keys, columns, {part.name: values for part, values in parts})


def _with_data_type(config: Any, types: Mapping[str, DataType]) -> Any:
    """Return a copy of the config with the new data type, and with rows in memory instead of a file."""
    assert isinstance(config, BaseEmbeddingConfig)
    keys = config.keys
    if keys is not None:
        # With max_bytes, another row size would change max_rows and so the initial rows.
        keys = replace(keys, max_rows=config.num_embeddings, max_bytes=None)
    return replace(config, data_type=types[config.name], storage=None, keys=keys)
