"""Quantisation straight from a checkpoint: tables stream through memory block by block."""

from collections.abc import Iterator, Mapping
from pathlib import Path

from torch import Tensor, nn

from meshrec.checkpoint import find_checkpoint, read_manifest
from meshrec.checkpoint.manifest import Manifest, TensorRecord
from meshrec.checkpoint.tables import whole_blocks
from meshrec.modules import BaseEmbeddingConfig, DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_of
from meshrec.quant.collections import empty_like
from meshrec.quant.precision import Rounding, check_rounding, encoded
from meshrec.quant.quantize import checked_types, copied_but_for, finish


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
    """Quantise a model whose weights are in a checkpoint, saved under any plan; see ``quantize``.

    Tables pass through memory in blocks. Besides the result, this takes some tens of megabytes.

    Args:
        path: a checkpoint, or a run's folder, see ``meshrec.checkpoint.find_checkpoint``.
        model: the unsharded model. Only its tables may be on ``meta``. It does not change.
        weights: see ``quantize``.
        per_table: see ``quantize``.
        output_dtype: see ``quantize``.
        dense: see ``quantize``.
        rounding: see ``quantize``.
        entry: the model's name in the saved state.

    Raises:
        ValueError: as for ``quantize``, or a tensor is missing in the checkpoint or has another shape there.
        DamagedCheckpointError: the data is not what was written.
    """
    check_rounding(rounding)
    folder = find_checkpoint(path)
    manifest = read_manifest(folder)
    collections = {name: m for name, m in model.named_modules() if isinstance(m, TableCollection)}
    configs = [config for m in collections.values() for config, _ in m.tables().values()]
    types = checked_types(configs, weights, per_table)
    memo: dict[int, nn.Module] = {
        id(m): empty_like(m, types, m.bounds_check, output_dtype or DataType.FP32)
        for m in collections.values()
    }
    result = memo.get(id(model)) or copied_but_for(model, memo)
    tables: set[str] = set()
    for where in collections:
        made = result.get_submodule(where)
        assert isinstance(made, TableCollection)
        _, holders = made.table_holders()
        for name, (config, _) in made.tables().items():
            full = f"{where}.{name}" if where else name
            tables.add(full)
            size = (config.num_embeddings, config.embedding_dim)
            blocks = _blocks(folder, manifest, f"{entry}.{full}", size)
            rows = _streamed(config, blocks, rounding)
            holders._modules[config.name].weight = nn.Parameter(rows, requires_grad=False)
    own = {name for name in result.state_dict() if not any(map(name.startswith, tables))}
    for name, tensor in result.state_dict().items():
        if name in own:
            first = 0
            target = tensor.view(1) if tensor.dim() == 0 else tensor
            for block in _blocks(folder, manifest, f"{entry}.{name}", tuple(tensor.shape)):
                target[first : first + len(block)] = block
                first += len(block)
    finish(result, dense)
    return result


def _streamed(config: BaseEmbeddingConfig, blocks: Iterator[Tensor], rounding: Rounding) -> Tensor:
    storage, first = storage_of(config), 0
    rows = storage.allocate(config.num_embeddings, storage.columns(config.embedding_dim), None)
    for block in blocks:
        coded = encoded(block, config.data_type, rounding, config.name, first_row=first)
        rows[first : first + len(block)] = coded
        first += len(block)
    return rows


def _blocks(folder: Path, manifest: Manifest, name: str, shape: tuple[int, ...]) -> Iterator[Tensor]:
    record: TensorRecord | None = manifest.tensors.get(name)
    if record is None or tuple(record.shape) != shape:
        there = "no such tensor" if record is None else f"the shape {list(record.shape)}"
        raise ValueError(
            f"{folder}: {name!r} must have the shape {list(shape)}, the checkpoint has {there}. Give "
            "the model that was saved, and entry, its name in the saved state."
        )
    return whole_blocks(folder, manifest, name, record)


def quantised_about(model: nn.Module, **source: object) -> dict[str, object]:
    """Return the description of a quantised model for a manifest.

    It holds the data type, the bytes, and the padding bits per row of each table, and ``source``, such as the
    run and the step that the model was made from.
    """
    tables = {}
    for module in model.modules():
        if isinstance(module, TableCollection):
            for config, weight in module.tables().values():
                storage = storage_of(config, weight)
                used = config.embedding_dim * (config.data_type.bits or 8 * storage.dtype.itemsize)
                tables[config.name] = {
                    "data_type": str(config.data_type),
                    "bytes": storage.num_bytes(config.num_embeddings, config.embedding_dim),
                    "padding_bits": 8 * storage.columns(config.embedding_dim) - used - 32
                    if storage.bits
                    else 0,
                }
    return {"tables": tables, **source}
