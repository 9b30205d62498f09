"""The unsharded form of a sharded model, which torch.export can trace."""

from typing import Any

import torch
from torch import nn

from meshrec.distributed import ShardedEmbeddingBagCollection, ShardedEmbeddingCollection
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules.embedding_modules import TableCollection
from meshrec.quant.collections import empty_like
from meshrec.quant.quantize import copied_but_for

_SHARDED = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)


def with_whole_tables(model: nn.Module) -> nn.Module:
    """Return the model itself, or if its tables are sharded, a copy with each table in one piece on the CPU.

    Raises:
        ValueError: the tables are split over several processes.
    """
    inner = model.module if isinstance(model, DistributedModelParallel) else model
    sharded = [module for module in inner.modules() if isinstance(module, _SHARDED)]
    if not sharded:
        return inner
    for module in sharded:
        world = module.built.env.world
        if world.group is not None and world.size > 1:
            raise ValueError(
                f"the tables are split over {world.size} processes, and one process writes a package. Save a "
                "checkpoint, and export from it: `meshrec export`, or load it into the unsharded model."
            )
    whole: dict[int, nn.Module] = {id(module): _whole(module) for module in sharded}
    made = whole.get(id(inner)) or copied_but_for(inner, whole)
    return made.to("cpu").train(model.training)


def _whole(module: Any) -> TableCollection:
    configs = getattr(module, "embedding_bag_configs", None) or module.embedding_configs
    types = {config.name: config.data_type for config in configs()}
    options = module.built.options
    made = empty_like(module, types, options.bounds_check, options.output_dtype)
    made.to_empty(device=torch.device("cpu"))
    state = module.state_dict()
    made.load_state_dict({name: getattr(each, "full_tensor", each.clone)() for name, each in state.items()})
    return made
