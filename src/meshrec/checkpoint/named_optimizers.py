"""Optimizers in a state, keyed by the parameter names in the state's modules."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from meshrec.tables.module import TableModule


def keyed(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> KeyedOptimizer:
    """Return ``optimizer`` as a `KeyedOptimizer`, with parameter names from the modules in ``state``.

    Raises:
        ValueError: the optimizer trains a table split over ranks.
    """
    if isinstance(optimizer, KeyedOptimizer):
        return optimizer
    names = {parameter: name for name, parameter in _parameters(state)}
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            named[names.get(parameter, f"parameter_{len(named)}")] = parameter
    split = [name for name in named if name in _split_tables(state)]
    if split:
        raise ValueError(
            f"table {split[0]!r} is split over ranks and trained by {type(optimizer).__name__}, whose "
            "state only has the shape of this rank's shard. Give the table an optimizer fused into "
            "backward (the sharder's fused_params, or apply_optimizer_in_backward)."
        )
    return KeyedOptimizerWrapper(named, lambda _: optimizer)


def create_state(optimizer: KeyedOptimizer, content: Any) -> Callable[[], None]:
    """Create optimizer state which exists in the checkpoint but not yet here; return a function which removes
    it.
    """
    present = optimizer.state_dict()["state"]
    created = [name for name in content["state"] if name in optimizer.params and name not in present]
    optimizer.create_state(created)
    return lambda: optimizer.drop_state(created)


def local_part(content: Any, item: Any, state: Mapping[str, Any]) -> Any:
    """Select the saved optimizer content for parameters on this rank.

    Args:
        content: optimizer entry's saved content.
        item: optimizer to load.
        state: state being loaded, with the modules.
    """
    target = keyed(item, state)
    groups = content.get("param_groups", [])[: len(target.param_groups)]
    return {
        **content,
        "state": {name: slots for name, slots in content["state"].items() if name in target.params},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in target.params]}
            for group in groups
        ],
    }


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    for item in state.values():
        if isinstance(item, nn.Module):
            yield from item.named_parameters()


def _split_tables(state: Mapping[str, Any]) -> set[str]:
    return {
        f"{path}.{name}"
        for item in state.values()
        if isinstance(item, nn.Module)
        for path, module in (
            item.module if isinstance(item, DistributedModelParallel) else item
        ).named_modules()
        if isinstance(module, TableModule) and module.is_split
        for name, _ in module.named_parameters()
    }
