"""Build a recipe's model and optimizers: sharded by a plan, or unsharded in one process."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.checkpoint.random_state import seed_python_and_numpy
from meshrec.comms.wire import CommsPrecision
from meshrec.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from meshrec.model_parallel import DistributedModelParallel, Sharder
from meshrec.models.step_samples import StepSamples
from meshrec.modules.embedding_modules import TableCollection
from meshrec.optim import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)
from meshrec.planner import PlannedShardingPlan
from meshrec.planner.wire_choice import wires_of
from meshrec.tables.initial import init_table
from meshrec.tables.optimizer import UpdateMode
from meshrec.train.planning import make_plan, topology_of
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import DenseOptimizer, Recipe

if TYPE_CHECKING:
    from meshrec.data import Dataset


class BuiltModel(NamedTuple):
    """A model ready to train.

    Attributes:
        model: sharded or unsharded model.
        tables: optimizer of the embedding tables.
        dense: optimizer of the dense part (all other parameters).
        optimizer: both optimizers combined, with gradient clipping if the recipe sets it.
        plan: sharding plan; None if the model is unsharded.
    """

    model: nn.Module
    tables: KeyedOptimizer
    dense: KeyedOptimizer
    optimizer: KeyedOptimizer
    plan: PlannedShardingPlan | None

    def num_parameters(self) -> tuple[int, int]:
        """Return the parameter counts in all tables (on all ranks together), and in the dense part."""
        tables = 0
        for module in self.model.modules():
            # Pooled and unpooled collections name their configurations differently.
            for name in ("embedding_bag_configs", "embedding_configs"):
                if hasattr(module, name):
                    tables += sum(
                        config.num_embeddings * config.embedding_dim for config in getattr(module, name)()
                    )
                    break
        return tables, sum(parameter.numel() for parameter in self.dense.params.values())


def build(recipe: Recipe, dataset: "Dataset", ranks: Ranks) -> BuiltModel:
    """Build a recipe's model and optimizers. Collective.

    Initial weights, random seeds and errors are those of `build_model`.

    Args:
        recipe: the recipe.
        dataset: the dataset, which determines input and table sizes.
        ranks: the ranks, from `join`.
    """
    model, plan = build_model(recipe, dataset, ranks)
    tables: KeyedOptimizer = model.fused_optimizer
    # All parameters but the tables, which the fused optimizer updates.
    parameters = dict(in_backward_optimizer_filter(model.named_parameters()))
    on_cpu = all(parameter.is_cpu for parameter in parameters.values())
    dense = KeyedOptimizerWrapper(parameters, _dense_optimizer_factory(recipe.dense, fused=on_cpu))
    # Table rows are updated in backward or by this optimizer's step; see `_update_mode`.
    optimizer: KeyedOptimizer = CombinedOptimizer([tables, dense])
    limit = recipe.training.clip_norm
    # Around both optimizers, so that the norm covers tables and dense part together.
    if limit is not None:
        optimizer = GradientClippingOptimizer(optimizer, GradientClipping.NORM, max_gradient=limit)
    return BuiltModel(model, tables, dense, optimizer, plan)


def build_model(recipe: Recipe, dataset: "Dataset", ranks: Ranks) -> tuple[Any, PlannedShardingPlan | None]:
    """Build a recipe's model without the dense part's optimizer, such as for scoring. Collective.

    Initial weights depend only on the seed, not on the plan or the number of ranks. While the model is built,
    the generators of Python and NumPy have the same seed on every rank. Afterwards their seeds differ between
    ranks, and depend on ``training.seed`` and the rank.

    Args:
        recipe: the recipe.
        dataset: the dataset, which determines input and table sizes.
        ranks: the ranks, from `join`.

    Returns:
        The model, whose ``fused_optimizer`` updates the tables, and the sharding plan; None if the model is
        unsharded.

    Raises:
        ValueError: no sharding plan fits into memory; raised on every rank.
    """
    # The dense part draws its initial values while the model is built.
    seed = recipe.training.seed
    torch.manual_seed(seed)
    seed_python_and_numpy(seed, "build")
    model = recipe.model.build(dataset)
    for module in model.modules():
        if isinstance(module, StepSamples):
            # In-batch losses use the samples of all ranks in a step as negatives.
            module.join(ranks.env.world)
    plan = None
    if recipe.placement.sharded:
        model, plan = _shard(recipe, model, dataset, ranks)
    else:
        _fuse_tables(recipe, model, ranks)
    seed_python_and_numpy(seed, f"rank {ranks.rank}")
    return model, plan


def _shard(
    recipe: Recipe, model: nn.Module, dataset: "Dataset", ranks: Ranks
) -> tuple[nn.Module, PlannedShardingPlan]:
    """Plan how to shard the tables over the ranks, and shard them. Collective."""
    topology = topology_of(
        recipe, world_size=ranks.size, local_size=ranks.local_size, device=ranks.device.type
    )
    plan = make_plan(recipe, model, dataset, topology, ranks.control)
    update, precision = _update_mode(recipe), CommsPrecision.from_wires(wires_of(plan))
    sharders: list[Sharder] = [
        EmbeddingBagCollectionSharder(recipe.tables, update=update, precision=precision),
        EmbeddingCollectionSharder(recipe.tables, update=update, precision=precision),
    ]
    # Seed again: the planner and the sample batches have drawn an unknown amount of random numbers.
    torch.manual_seed(recipe.training.seed)
    sharded = DistributedModelParallel(
        model,
        env=ranks.env,
        device=ranks.device,
        plan=plan,
        sharders=sharders,
        dense_gradients=recipe.training.dense_gradients,
    )
    return sharded, plan


def _fuse_tables(recipe: Recipe, model: nn.Module, ranks: Ranks) -> None:
    """Allocate full tables in this process, and fuse the table optimizer into the backward pass."""
    from meshrec.modules.fusing import fuse

    for child in model.modules():
        if isinstance(child, TableCollection):
            _allocate(child, ranks.device, recipe.training.seed)
    # After `_allocate`, because tensors on ``meta`` cannot be copied to a device.
    model.to(ranks.device)
    fuse(model, optimizer=recipe.tables, update=_update_mode(recipe))


def _allocate(collection: TableCollection, device: torch.device, seed: int) -> None:
    """Allocate a collection's tables, which are on ``meta``, with the same initial values as when sharded."""
    collection.to_empty(device=device)
    for config, weight in collection.tables().values():
        # Hashed tables start empty. Initial values are computed from the ID.
        if config.keys is None:
            init_table(weight, table=config.name, init_fn=config.init_weight, seed=seed)


def _update_mode(recipe: Recipe) -> UpdateMode:
    """Return when table rows are updated: in the backward pass, or in the optimizer's ``step``.

    Accumulated or clipped gradients are only known after the backward pass, so they need ``step``.
    """
    training = recipe.training
    return "on_step" if training.accumulate > 1 or training.clip_norm is not None else "in_backward"


def _dense_optimizer_factory(
    config: DenseOptimizer, *, fused: bool
) -> Callable[[list[Tensor]], torch.optim.Optimizer]:
    """Return a function that creates the configured torch optimizer for a list of parameters."""
    options: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay}
    # One pass over weights, gradients and state. On a GPU, torch's default is fast enough.
    if fused:
        options["fused"] = True
    kinds: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    return lambda parameters: kinds[config.kind](parameters, **options)
