"""``meshrec.fuse``: optimizers inside the backward pass, for tables on one device."""

from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor, nn

from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.hashed_holder import HashedHolder
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
    """Attaches optimizers to the embedding tables of a module, in place; no process group is needed.

    Every ``EmbeddingBagCollection`` and ``EmbeddingCollection`` in ``module`` (or ``module`` itself) gets a
    ``fused_optimizer``; a module that contains several gets a ``fused_optimizer`` that combines theirs.
    On CPUs the process keeps freed memory from then on, see ``keep_freed_memory``.

    Args:
        module: a collection, or a model that contains some.
        optimizer: for the tables without a choice of their own (``apply_optimizer_in_backward``); None: those
            keep ordinary gradients.
        update: "in_backward" or "on_step", see ``FusedOptimizer``.
        seed: of the stochastic rounding of fp16 and bf16 tables; 0 rounds to nearest.

    Returns: the module.

    Raises:
        ValueError: if there are no collections or no optimizer for any table, if one is fused already, is on
            ``meta``, or shares a table with another, and for an ``update`` or ``seed`` that is not allowed.
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
    planned = {path: _fused_tables(path, child, optimizer) for path, child in collections.items()}
    if all(table.spec is None for tables in planned.values() for table in tables):
        raise ValueError(
            "no table has an optimizer. Pass optimizer=..., or call apply_optimizer_in_backward first."
        )
    _check_not_shared(planned)
    optimizers: dict[str, KeyedOptimizer] = {}
    for path, child in collections.items():
        if any(table.spec is not None for table in planned[path]):
            updater = WholeTables(planned[path], update=update, seed=seed)
            child.attach(updater)
            optimizers[path] = updater.optimizer
    if module not in collections.values():
        module.fused_optimizer = CombinedOptimizer(list(optimizers.items()))  # type: ignore[assignment]
    if any(child.device.type == "cpu" for child in collections.values()):
        keep_freed_memory()
    return module


def _fused_tables(path: str, child: TableCollection, optimizer: OptimizerSpec | None) -> list[TrainedTable]:
    where = f"the module at {path!r}" if path else "the module"
    if child.is_fused:
        raise ValueError(f"{where} is fused already. A collection takes one fused optimizer.")
    if child.device.type == "meta":
        raise ValueError(f"{where} is on meta. Allocate it first: to_empty(device=...), reset_parameters().")
    tables = child.tables()
    storages = {name: storage_of(config, weight) for name, (config, weight) in tables.items()}
    for name, (config, _) in tables.items():
        if not storages[name].is_trainable:
            raise ValueError(
                f"table {config.name!r} is quantised ({config.data_type}) and cannot be trained. Fuse the "
                "model as it was before meshrec.quant.quantize."
            )
    holders = child.table_holders()[1]._modules
    found = []
    for name, (config, weight) in tables.items():
        spec, holder = in_backward_spec(weight) or optimizer, holders[config.name]
        train = holder.train_with if isinstance(holder, HashedHolder) else None
        found.append(TrainedTable(name, weight, spec, storages[name], train))
    return found


def _check_not_shared(planned: Mapping[str, list[TrainedTable]]) -> None:
    owner: dict[Tensor, str] = {}
    for path, tables in planned.items():
        for table in tables:
            name = f"{path}.{table.name}" if path else table.name
            if table.weight in owner:
                raise ValueError(
                    f"{owner[table.weight]!r} and {name!r} are one parameter. "
                    "A fused table belongs to one collection; let its features share the table instead."
                )
            owner[table.weight] = name
