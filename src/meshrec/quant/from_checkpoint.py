"""Quantization directly from a checkpoint: tables pass through memory in blocks."""

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
from meshrec.quant.collections import converted_blocks, empty_like, rows_by_table
from meshrec.quant.precision import Rounding, check_rounding, encode_rows
from meshrec.quant.quantize import checked_types, copy_except, finish_copy
from meshrec.tables.hashed.table import IDS, HashedRows, is_growable


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
    """Quantize a model whose weights are in a checkpoint, saved under any plan; see ``quantize``.

    Tables are processed in blocks, so in addition to the result this needs only tens of megabytes.

    Args:
        path: checkpoint, or run folder; see ``meshrec.checkpoint.find_checkpoint``.
        model: unsharded model; unchanged. Only tables may be on ``meta``.
        weights: see ``quantize``.
        per_table: see ``quantize``.
        output_dtype: see ``quantize``.
        dense: see ``quantize``.
        rounding: see ``quantize``.
        entry: name of the model's state in the checkpoint.

    Raises:
        ValueError: as in ``quantize``, or a tensor is missing from the checkpoint or has another shape.
        DamagedCheckpointError: damaged data.
    """
    check_rounding(rounding)
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    collections = {name: m for name, m in model.named_modules() if isinstance(m, TableCollection)}
    configs = {where: [config for config, _ in m.tables().values()] for where, m in collections.items()}
    types = checked_types(configs, weights, per_table)
    memo: dict[int, nn.Module] = {
        id(m): empty_like(m, types[where], m.bounds_check, output_dtype or DataType.FP32)
        for where, m in collections.items()
    }
    result = memo.get(id(model)) or copy_except(model, memo)
    tables: set[str] = set()
    for where in collections:
        target_module = result.get_submodule(where)
        assert isinstance(target_module, TableCollection)
        _, holders = target_module.table_holders()
        for name, (config, _) in target_module.tables().items():
            full = f"{where}.{name}" if where else name
            # Table tensor names: the state dict loop below skips them and handles the dense part.
            tables.add(full)
            size = (config.num_embeddings, config.embedding_dim)
            module = target_module.table_modules().get(config.name)
            if module is not None and is_growable(module.storage):
                # The collection is on meta until here.
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
            # Blocks are slices along the first dimension, which a scalar lacks.
            target = tensor.view(1) if tensor.dim() == 0 else tensor
            for block in _blocks(folder, manifest, f"{entry}.{name}", tuple(tensor.shape)):
                target[first : first + len(block)] = block
                first += len(block)
    finish_copy(result, dense)
    return result


def _hashed_blocks(
    folder: Path, manifest: Manifest, name: str, storage: HashedRows
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield hashed table IDs and rows in blocks, by key. A fixed table has row numbers as IDs."""
    record, prefix = manifest.tensors.get(name), name.removesuffix("weight")
    if record is None or len(record.shape) != 2 or not _is_within(record.shape, storage):
        there = "no such tensor" if record is None else f"the shape {list(record.shape)}"
        raise ValueError(
            f"{folder}: {name!r} must have at most {storage.max_rows:,} rows x {storage.dim}, but the "
            f"checkpoint has {there}. Pass the saved model, and its state entry as entry."
        )
    has_ids, first = f"{prefix}{IDS}" in manifest.tensors, 0
    for rows in whole_blocks(folder, manifest, name, record):
        span = (first, first + len(rows))
        ids = read_rows(folder, manifest, f"{prefix}{IDS}", span) if has_ids else torch.arange(*span)
        # load() expects blocks in key order, and a key is the mixed ID.
        order = mix(ids, storage.keys.seed).argsort()
        first = span[1]
        yield ids[order], rows[order]


def _is_within(shape: Sequence[int], storage: HashedRows) -> bool:
    """Return whether a saved table with this shape fits into the hashed table."""
    return shape[0] <= storage.max_rows and shape[1] == storage.dim


def _encode_blocks(config: BaseEmbeddingConfig, blocks: Iterator[Tensor], rounding: Rounding) -> Tensor:
    """Return a whole table in its new data type, given its rows in blocks."""
    storage, first = storage_of(config), 0
    rows = storage.allocate(config.num_embeddings, storage.columns(config.embedding_dim), None)
    for block in blocks:
        coded = encode_rows(block, config.data_type, rounding, config.name, first_row=first)
        rows[first : first + len(block)] = coded
        first += len(block)
    return rows


def _blocks(folder: Path, manifest: Manifest, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    """Return blocks from a saved tensor. Raises ValueError if the checkpoint lacks it or shapes differ."""
    record: TensorRecord | None = manifest.tensors.get(name)
    if record is None or tuple(record.shape) != shape:
        there = "no such tensor" if record is None else f"the shape {list(record.shape)}"
        raise ValueError(
            f"{folder}: {name!r} must have the shape {list(shape)}, but the checkpoint has {there}. Pass "
            "the saved model, and its state entry as entry."
        )
    return whole_blocks(folder, manifest, name, record)


def quantised_about(model: nn.Module, **source: object) -> dict[str, object]:
    """Describe a quantized model for a manifest.

    It has the data type, bytes and padding bits per row of every table, and the ``source`` items, such as
    the model's run and step.
    """
    tables = {}
    for module in model.modules():
        if isinstance(module, TableCollection):
            num_rows = rows_by_table(module)
            for config, weight in module.tables().values():
                storage = storage_of(config, weight)
                used = config.embedding_dim * (config.data_type.bits or 8 * storage.dtype.itemsize)
                tables[config.name] = {
                    "data_type": str(config.data_type),
                    "bytes": storage.num_bytes(num_rows[config.name], config.embedding_dim),
                    "padding_bits": 8 * storage.columns(config.embedding_dim) - used - 32
                    if storage.bits
                    else 0,
                }
    return {"tables": tables, **source}
