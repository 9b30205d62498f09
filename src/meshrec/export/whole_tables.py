"""Convert a model so that torch.export can trace it.

Sharded tables are merged, and hashed tables get a read-only form.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.durable import scratch_folder
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import BaseEmbeddingConfig
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.served_table import ServedRows
from meshrec.modules.table_lookup import storage_for
from meshrec.quant.collections import empty_like
from meshrec.quant.quantize import copy_except
from meshrec.tables.streamed import StreamedPart

_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def with_whole_tables(model: nn.Module) -> nn.Module:
    """Return the model itself or, if tables are sharded, a copy with unsharded tables on the CPU.

    Raises:
        ValueError: tables are split over several processes.
    """
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    sharded = [module for module in inner.modules() if isinstance(module, _SHARDED)]
    if not sharded:
        return inner
    for module in sharded:
        world = module.built.env.world
        # Shards on several devices of this process can be merged here; shards in other processes cannot.
        if world.group is not None and world.size > 1:
            raise ValueError(
                f"the tables are split over {world.size} processes, but one process writes a package. Save "
                "a checkpoint, and export from it: `meshrec export`, or load it into the unsharded model."
            )
    whole: dict[int, nn.Module] = {id(module): _merge_shards(module) for module in sharded}
    result = whole.get(id(inner)) or copy_except(inner, whole)
    return result.to("cpu").train(model.training)


def _merge_shards(module: Any) -> TableCollection:
    """Return an unsharded collection on the CPU with the rows of a sharded collection in this process."""
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    types = {config.name: config.data_type for config in configs()}
    options = module.built.options
    collection = empty_like(module, types, options.bounds_check, options.output_dtype)
    # The collection is on meta. Rows are allocated here, then filled from the shards.
    allocate_rows(collection, configs())
    state = module.state_dict()
    # Streamed parts are read block by block during the load. Split tensors are merged first.
    collection.load_state_dict(
        {
            name: value if isinstance(value, StreamedPart) else getattr(value, "full_tensor", value.clone)()
            for name, value in state.items()
        }
    )
    return collection


def with_served_tables(model: nn.Module) -> tuple[nn.Module, dict[str, ServedRows | Tensor]]:
    """Replace hashed tables by the read-only form used in packages.

    Returns:
        A copy of the model, in which hashed tables have small example tensors for tracing, and the actual
        tensors or row readers by weight name. Without hashed tables, the model itself and no tensors.
    """
    memo: dict[int, nn.Module] = {}
    real: dict[str, ServedRows | Tensor] = {}
    for path, child in model.named_modules():
        if not isinstance(child, TableCollection) or not (hashed := child.hashed_tables()):
            continue
        types = {config.name: config.data_type for config, _ in child.tables().values()}
        memo[id(child)] = served = empty_like(child, types, child.bounds_check, child.output_dtype)
        served.serve()
        prefix, holders = served.table_holders()
        for config, weight in child.tables().values():
            if config.name not in hashed:
                # Fixed tables share the memory of the model.
                holders._modules[config.name].weight = weight
                continue
            rows = ServedRows(hashed[config.name])
            tensors: dict[str, ServedRows | Tensor] = {"weight": rows, **rows.index()}
            where = f"{path}." if path else ""
            real |= {f"{where}{prefix}.{config.name}.{name}": tensor for name, tensor in tensors.items()}
    return memo.get(id(model)) or (copy_except(model, memo) if memo else model), real


def allocate_rows(collection: TableCollection, configs: Iterable[BaseEmbeddingConfig]) -> None:
    """Allocate uninitialized rows on the CPU for a collection's tables on ``meta``.

    A table with rows in a file gets a mapped, unnamed file in the same folder, because it may be larger than
    memory.
    """
    holders = collection.table_holders()[1]._modules
    for config in configs:
        if config.keys is not None:  # hashed tables grow while being loaded
            holders[config.name].to_empty(device="cpu")
            continue
        data_type = collection.tables()[f"{collection.table_holders()[0]}.{config.name}.weight"][0].data_type
        storage = storage_for(data_type)
        shape = (config.num_embeddings, storage.columns(config.embedding_dim))
        if config.storage is None:
            rows = storage.allocate(*shape, torch.device("cpu"))
        else:
            rows = _map_new_file(Path(config.storage.path), shape, storage.dtype)
        holders[config.name].weight = nn.Parameter(rows, requires_grad=False)


def _map_new_file(folder: Path, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor mapped from a new file without a name, whose space is freed with the tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    with scratch_folder("rows", folder) as scratch:
        rows = torch.from_file(f"{scratch}/rows", shared=True, size=shape[0] * shape[1], dtype=dtype)
    return rows.view(shape)
