"""``meshrec.fuse``: let the backward pass update the embedding tables, for tables on a single device."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from meshrec.modules.embedding_modules import TableCollection, seed_by_path
from meshrec.modules.table_lookup import storage_of
from meshrec.ops.memory import keep_freed_memory
from meshrec.optim.in_backward import in_backward_spec
from meshrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec
from meshrec.tables.fused import TrainedTable, WholeTables
from meshrec.tables.optimizer import UpdateMode

_M = TypeVar("_M", bound=nn.Module)


def fuse(
    module: _M,
    *,
    optimizer: OptimizerSpec | None = None,
    update: UpdateMode = "in_backward",
    seed: int = DEFAULT_SEED,
) -> _M:
    """Attach optimizers to the embedding tables of a module: from then on, ``backward()`` updates the tables.

    Changes the module in place. Needs no process group.

    Each ``EmbeddingBagCollection`` and ``EmbeddingCollection`` in ``module`` (or ``module`` itself) gets an
    attribute ``fused_optimizer``. If ``module`` contains collections, it gets a ``fused_optimizer`` that
    combines theirs. On CPUs the process keeps freed memory from then on; see ``keep_freed_memory``.

    Args:
        module: A collection, or a model with collections.
        optimizer: Optimizer spec for tables which ``apply_optimizer_in_backward`` has not marked. None: those
            tables keep ordinary gradients.
        update: "in_backward": the backward pass updates the tables. "on_step": it collects gradients, and
            ``fused_optimizer.step()`` updates the tables.
        seed: Seed for stochastic rounding in fp16 and bf16 tables; 0 rounds to nearest.

    Returns:
        ``module``.

    Raises:
        ValueError: The module has no collection, no table has an optimizer, a collection is already fused
            or on ``meta``, tables are shared between collections, or ``update`` or ``seed`` is invalid.

    Example::

        >>> from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
        >>> from meshrec.optim import RowWiseAdagrad
        >>> config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["item"])
        >>> collection = fuse(EmbeddingBagCollection([config]), optimizer=RowWiseAdagrad(lr=0.02))
        >>> collection.is_fused
        True
    """
    if optimizer is not None and not isinstance(optimizer, OptimizerSpec):
        raise ValueError(
            f"optimizer must be a spec such as meshrec.optim.RowWiseAdagrad(lr=0.02), got {optimizer!r}."
        )
    collections = {
        path: child for path, child in module.named_modules() if isinstance(child, TableCollection)
    }
    if not collections:
        raise ValueError(
            f"{type(module).__name__} contains no EmbeddingBagCollection and no EmbeddingCollection. "
            "Pass a module that does."
        )
    trained_tables = {path: _fused_tables(path, child, optimizer) for path, child in collections.items()}
    if all(table.spec is None for tables in trained_tables.values() for table in tables):
        raise ValueError(
            "no table has an optimizer. Pass optimizer=..., or call apply_optimizer_in_backward first."
        )
    # All checks come before any change, so an error leaves the module as it was.
    _check_not_shared(trained_tables)
    # Before the updaters, which build hashed tables with the seeds that are set at that time.
    seed_by_path(collections)
    optimizers: dict[str, KeyedOptimizer] = {}
    for path, child in collections.items():
        # A collection whose tables all keep ordinary gradients needs no updater.
        if any(table.spec is not None for table in trained_tables[path]):
            updater = WholeTables(trained_tables[path], update=update, seed=seed)
            child.attach(updater)
            optimizers[path] = updater.optimizer
    if module not in collections.values():
        module.fused_optimizer = CombinedOptimizer(list(optimizers.items()))  # type: ignore[assignment]
    # Large gradients and outputs are freed and allocated every step; returning them to the system costs page
    # faults.
    if any(child.device.type == "cpu" for child in collections.values()):
        keep_freed_memory()
    return module


def _fused_tables(path: str, child: TableCollection, optimizer: OptimizerSpec | None) -> list[TrainedTable]:
    """Return the tables of a collection, together with their optimizer specs.

    Args:
        optimizer: Spec for tables which ``apply_optimizer_in_backward`` has not marked, or None.
    """
    owner = f"the module at {path!r}" if path else "the module"
    if child.is_fused:
        raise ValueError(f"{owner} is fused already. A collection takes one fused optimizer.")
    if child.device.type == "meta":
        raise ValueError(f"{owner} is on meta. Allocate it first: to_empty(device=...), reset_parameters().")
    tables = child.tables()
    storages = {name: storage_of(config, weight) for name, (config, weight) in tables.items()}
    for name, (config, _) in tables.items():
        if not storages[name].is_trainable:
            raise ValueError(
                f"table {config.name!r} is quantised ({config.data_type}) and cannot be trained. Fuse the "
                "model as it was before meshrec.quant.quantize."
            )
    modules = child.table_modules()
    trained_tables = []
    for name, (config, weight) in tables.items():
        # An optimizer attached by apply_optimizer_in_backward takes precedence.
        spec = in_backward_spec(weight) or optimizer
        # A growable table stores optimizer state with its rows, so it must be told the optimizer.
        train = modules[config.name].train_with if storages[name].is_growable else None
        trained_tables.append(TrainedTable(name, weight, spec, storages[name], train))
    return trained_tables


def _check_not_shared(trained_tables: Mapping[str, list[TrainedTable]]) -> None:
    """Raise ValueError if two collections share a parameter, because both would update it."""
    # Tensors hash by identity, so this finds shared parameters, not equal ones.
    owner: dict[Tensor, str] = {}
    for path, tables in trained_tables.items():
        for table in tables:
            name = f"{path}.{table.name}" if path else table.name
            if table.weight in owner:
                raise ValueError(
                    f"{owner[table.weight]!r} and {name!r} are the same parameter. "
                    "A fused table belongs to one collection; let its features share the table instead."
                )
            owner[table.weight] = name
