"""Give optimizers a state dict that is keyed by parameter name instead of parameter index.

Torch optimizers number their parameters. Names are needed because a checkpoint must also load under a plan
under which a rank has other parameters.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from meshrec.tables.module import TableModule


def as_keyed_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> KeyedOptimizer:
    """Return an optimizer as a `KeyedOptimizer`, which names parameters instead of numbering them.

    An optimizer that is a `KeyedOptimizer` already is returned unchanged; any other one is wrapped.

    Raises:
        ValueError: a torch optimizer trains a table split over ranks.
    """
    if isinstance(optimizer, KeyedOptimizer):
        return optimizer
    names = {parameter: name for name, parameter in _parameters(state)}
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # A parameter that is in no module of the state still needs a unique name.
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
    """Create state for the optimizer's parameters that have state in the checkpoint, but no state here yet.

    Torch optimizers create state only in their first step, but a load needs existing tensors to fill.

    Returns:
        A function that removes the created state again, to undo a failed load.
    """
    present = optimizer.state_dict()["state"]
    created = [name for name in content["state"] if name in optimizer.params and name not in present]
    optimizer.create_state(created)
    return lambda: optimizer.drop_state(created)


def select_local_state(content: Any, item: Any, state: Mapping[str, Any]) -> Any:
    """Reduce an optimizer's saved state dict to the parameters trained by this rank.

    A rank of a pipeline stage trains only some parameters, but the checkpoint has the state of all.

    Args:
        content: the optimizer's saved state dict, encoded by ``values.encode``.
        item: optimizer to load.
        state: training state to load, with the modules.

    Returns:
        State dict with the state and the parameter groups of local parameters.
    """
    target = as_keyed_optimizer(item, state)
    # This rank may have fewer groups than the checkpoint.
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
    """Yield pairs (name, parameter) for all parameters of the modules in a training state."""
    for item in state.values():
        if isinstance(item, nn.Module):
            yield from item.named_parameters()


def _split_tables(state: Mapping[str, Any]) -> set[str]:
    """Return the parameter names of tables split over ranks."""
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
