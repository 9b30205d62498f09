"""Quantization directly from a checkpoint.

Tables pass through memory in blocks, so they never need to fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from meshrec.checkpoint import find_checkpoint, read_manifest
from meshrec.checkpoint.manifest import Manifest, TensorRecord
from meshrec.checkpoint.reading import read_rows
from meshrec.checkpoint.tables import whole_blocks
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.ops.index import mix
from meshrec.optim.table_names import full_names
from meshrec.quant.collections import converted_blocks, empty_like, rows_by_table
from meshrec.quant.precision import Rounding, check_rounding, encode_rows
from meshrec.quant.quantize import checked_types, copy_except, finish_copy
from meshrec.tables.hashed.key_ordered import IDS
from meshrec.tables.hashed.table import HashedRows, is_growable


def quantize_checkpoint(
    path: str | Path,
    model: nn.Module,
    weights: DataType = DataType.INT8,
    *,
    per_table: Mapping[str, DataType] | None = None,
    output_dtype: DataType | None = None,
    dense: DataType | None = None,
    rounding: Rounding = "minmax",
    entry: str = "model",
) -> nn.Module:
    """Build a quantized copy of a model with weights from a checkpoint; see ``quantize``.

    The checkpoint may have been saved under any plan. Tables are read in blocks, so in addition to the result
    this needs only tens of megabytes of memory.

    Args:
        path: checkpoint, or run folder; see ``meshrec.checkpoint.find_checkpoint``.
        model: unsharded model, which is not changed. Tables may be on ``meta``; other modules must not be.
        weights, per_table, output_dtype, dense, rounding: see ``quantize``.
        entry: name under which the checkpoint has the model's state dict.

    Raises:
        ValueError: as in ``quantize``, or the checkpoint lacks a tensor or has it in another shape.
        DamagedCheckpointError: the data is damaged.
    """
    # Check all arguments before reading the checkpoint.
    check_rounding(rounding)
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    collections = {name: m for name, m in model.named_modules() if isinstance(m, TableCollection)}
    configs = {where: [config for config, _ in m.tables().values()] for where, m in collections.items()}
    types = checked_types(configs, weights, per_table)
    # Empty quantized collections by ``id`` of the originals, to be filled from the checkpoint.
    memo: dict[int, nn.Module] = {
        id(m): empty_like(m, types[where], m.bounds_check, output_dtype or DataType.FP32)
        for where, m in collections.items()
    }
    # The model may itself be a collection.
    result = memo.get(id(model)) or copy_except(model, memo)
    tables: set[str] = set()
    for where in collections:
        target_module = result.get_submodule(where)
        assert isinstance(target_module, TableCollection)
        _, holders = target_module.table_holders()
        for name, (config, _) in target_module.tables().items():
            full = f"{where}.{name}" if where else name
            # The loop over the state dict below treats the dense part, and skips these names.
            tables.add(full)
            size = (config.num_embeddings, config.embedding_dim)
            module = target_module.table_modules().get(config.name)
            if module is not None and is_growable(module.storage):
                # ``empty_like`` has built the collection on meta.
                module.to_empty(device="cpu")
                stored = _hashed_blocks(folder, manifest, f"{entry}.{full}", module.storage)
                module.tables[0].load(converted_blocks(stored, module.storage, config.data_type, rounding))
                continue
            blocks = _blocks(folder, manifest, f"{entry}.{full}", size)
            rows = _encode_blocks(config, blocks, rounding)
            holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    other_names = {name for name in result.state_dict() if not any(map(name.startswith, tables))}
    for name, tensor in result.state_dict().items():
        if name in other_names:
            first = 0
            # Blocks are slices along the first dimension. A scalar lacks this dimension, so view it as [1].
            target = tensor.view(1) if tensor.dim() == 0 else tensor
            # Written in place: the state dict's tensors share memory with the module.
            for block in _blocks(folder, manifest, f"{entry}.{name}", tuple(tensor.shape)):
                target[first : first + len(block)] = block
                first += len(block)
    finish_copy(result, dense)
    return result


def _hashed_blocks(
    folder: Path, manifest: Manifest, name: str, storage: HashedRows
) -> Iterator[tuple[Tensor, Tensor]]:
    """Read the rows for a hashed table from a checkpoint, in blocks.

    The checkpoint may instead contain a fixed table (one without a hash index, in which an ID is a row
    number). The row numbers are then used as IDs.

    Yields:
        IDs, int64 [n], and the rows of these IDs, [n, D], block by block. Within a block, both are sorted by
            key (the hash of the ID).
    """
    record, prefix = manifest.tensors.get(name), name.removesuffix("weight")
    if record is None or len(record.shape) != 2 or not _is_within(record.shape, storage):
        there = "no such tensor" if record is None else f"the shape {list(record.shape)}"
        raise ValueError(
            f"{folder}: {name!r} must have at most {storage.max_rows:,} rows x {storage.dim}, but the "
            f"checkpoint has {there}. Pass the saved model, and its state entry as entry."
        )
    # Without IDs, the checkpoint has a fixed table.
    has_ids, first = f"{prefix}{IDS}" in manifest.tensors, 0
    for rows in whole_blocks(folder, manifest, name, record):
        span = (first, first + len(rows))
        ids = read_rows(folder, manifest, f"{prefix}{IDS}", span) if has_ids else torch.arange(*span)
        # HashedTable.load expects blocks with ascending keys, and a key is the hash of the ID.
        order = mix(ids, storage.keys.seed).argsort()
        first = span[1]
        yield ids[order], rows[order]


def _is_within(shape: Sequence[int], storage: HashedRows) -> bool:
    """Return whether a saved table with this shape (rows, columns) fits into a hashed table."""
    return shape[0] <= storage.max_rows and shape[1] == storage.dim


def _encode_blocks(config: BaseEmbeddingConfig, blocks: Iterator[Tensor], rounding: Rounding) -> Tensor:
    """Convert the rows of a fixed table (one without a hash index) to a new data type, block by block."""
    # Allocate the result once, and fill it block by block: only a block of original rows is in memory.
    storage, first = storage_of(config), 0
    rows = storage.allocate(config.num_embeddings, storage.columns(config.embedding_dim), None)
    for block in blocks:
        coded = encode_rows(block, config.data_type, rounding, config.name, first_row=first)
        rows[first : first + len(block)] = coded
        first += len(block)
    return rows


def _blocks(folder: Path, manifest: Manifest, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Read a tensor from a checkpoint in blocks of consecutive rows."""
    record: TensorRecord | None = manifest.tensors.get(name)
    if record is None or tuple(record.shape) != shape:
        there = "no such tensor" if record is None else f"the shape {list(record.shape)}"
        raise ValueError(
            f"{folder}: {name!r} must have the shape {list(shape)}, but the checkpoint has {there}. Pass "
            "the saved model, and its state entry as entry."
        )
    return whole_blocks(folder, manifest, name, record)


def quantised_about(model: nn.Module, **source: object) -> dict[str, object]:
    """Describe a quantized model, for the manifest of a package.

    Args:
        model: quantized model.
        source: further entries, such as the run and step that the model comes from.

    Returns:
        A dict with the entry ``tables``, followed by the entries from ``source``. ``tables`` has a dict per
            table name, as in `table_bytes`, with ``data_type``, ``bytes`` (of all rows) and
            ``padding_bits`` (per row).
    """
    tables = {}
    collections = {path: m for path, m in model.named_modules() if isinstance(m, TableCollection)}
    names = full_names({path: [c.name for c, _ in m.tables().values()] for path, m in collections.items()})
    for path, module in collections.items():
        num_rows = rows_by_table(module)
        for config, weight in module.tables().values():
            storage = storage_of(config, weight)
            # 32 bits below: scale and bias, fp16.
            used = config.embedding_dim * (config.data_type.bits or 8 * storage.dtype.itemsize)
            tables[names[path, config.name]] = {
                "data_type": str(config.data_type),
                "bytes": storage.num_bytes(num_rows[config.name], config.embedding_dim),
                "padding_bits": 8 * storage.columns(config.embedding_dim) - used - 32 if storage.bits else 0,
            }
    return {"tables": tables, **source}
