"""The optimizer inside the backward pass, and ``fuse``, which attaches it."""

import dataclasses
import operator
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import TableUpdater
from meshrec.ops import tbe
from meshrec.ops.memory import keep_freed_memory, use_huge_pages
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward
from meshrec.optim.keyed import Closure, CombinedOptimizer, KeyedOptimizer
from meshrec.optim.optimizers import DEFAULT_SEED, HyperOfSteps, OptimizerSpec, check_seed

# T tables, U touched rows, D width

UpdateMode = Literal["in_backward", "on_step"]
_M = TypeVar("_M", bound=nn.Module)


class FusedTable(NamedTuple):
    """A table and how it is trained."""

    name: str
    """The parameter's name."""
    weight: nn.Parameter
    spec: OptimizerSpec | None
    """None: ordinary gradients."""


class _Group:
    """The tables that one kernel call updates: they share the spec.

    Every step reads it when the tables' rows have filled the caches: what a step can find ready is ready.
    """

    def __init__(self, spec: OptimizerSpec, tables: list[int], params: list[nn.Parameter], seed: int) -> None:
        self.tables = tables
        self.spec = spec
        """With the numbers of the last step."""
        self.slot_names = [slot.name for slot in spec.state_slots()]
        numbers = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        self.options: dict[str, Any] = {"params": params, **numbers}
        """torch's param_group: the tables' parameters and the spec's numbers as they are now."""
        self._read = operator.itemgetter(*numbers)
        self._numbers = tuple(numbers.values())
        self._seed = seed
        self.hyper = HyperOfSteps(spec, seed)

    def refresh(self) -> None:
        """Takes over the numbers that the param_group holds now."""
        now = self._read(self.options)
        if now != self._numbers:
            numbers: list[Any] = [number.item() if isinstance(number, Tensor) else number for number in now]
            names = [field.name for field in dataclasses.fields(self.spec)]
            self.spec = dataclasses.replace(self.spec, **dict(zip(names, numbers, strict=True)))
            self.hyper = HyperOfSteps(self.spec, self._seed)
            self._numbers = tuple(numbers)


class FusedOptimizer(KeyedOptimizer, TableUpdater):
    """Updates embedding tables from the gradient of their lookup, without materialising table gradients.

    It is a ``KeyedOptimizer``: the state is keyed by the parameters' names, with one tensor per state slot of
    the spec (``[rows]`` or ``[rows, D]``, fp32) and ``step``, the number of updates. ``param_groups`` holds
    one group per spec; its numbers (``lr``, ``weight_decay``, ...) are read at every update, so learning rate
    schedulers work.

    Args:
        tables: in the order in which the module's lookup counts them.
        update: "in_backward": the backward pass updates the rows and ``step`` does nothing.
            "on_step": the backward pass adds up sparse gradients in ``parameter.grad``, and ``step`` applies
            them; accumulation, clipping and gradient scaling work as with any torch optimizer.
        seed: of the stochastic rounding of fp16 and bf16 tables; 0 rounds to nearest.
    """

    def __init__(
        self, tables: list[FusedTable], *, update: UpdateMode = "in_backward", seed: int = DEFAULT_SEED
    ) -> None:
        if update not in ("in_backward", "on_step"):
            raise ValueError(f"update must be 'in_backward' or 'on_step', got {update!r}.")
        check_seed(seed)
        self._tables = tables
        self._update: UpdateMode = update
        self._has_taken = False
        self.seed = seed
        self.plain_tables = [index for index, table in enumerate(tables) if table.spec is None]
        by_spec: dict[OptimizerSpec, list[int]] = {}
        for index, table in enumerate(tables):
            if table.spec is not None:
                by_spec.setdefault(table.spec, []).append(index)
        self._weights = [table.weight for table in tables]
        self._groups = [
            _Group(spec, members, [self._weights[index] for index in members], seed)
            for spec, members in by_spec.items()
        ]
        state: dict[Tensor, dict[str, Any]] = {}
        for group in self._groups:
            for index in group.tables:
                state[tables[index].weight] = _new_state(group.spec, tables[index].weight)
                mark_in_backward(tables[index].weight, group.spec)
        trained = {table.name: table.weight for table in tables if table.spec is not None}
        # By table: a step looks for them in no dict of tensors, whose hashes are made in Python.
        self._slots = [state.get(table.weight, {}) for table in tables]
        super().__init__(trained, state, [group.options for group in self._groups])
        self.defaults = {}

    @property
    def updates_in_backward(self) -> bool:
        """Whether the backward pass updates the tables (``update="in_backward"``)."""
        return self._update == "in_backward"

    def take(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        """Uses the gradient of a lookup: updates the tables, or keeps sparse gradients for ``step``.

        Tables that do not require a gradient (now, not when they were fused) are left alone.
        """
        if not self._has_taken:
            for weight in self.params.values():
                in_backward_spec(weight)  # torch may have attached another one since
            self._has_taken = True
        trained = [
            [index for index in group.tables if self._weights[index].requires_grad] for group in self._groups
        ]
        # All read before any is used: a number out of its range must not leave half of the tables updated.
        for group in self._groups:
            group.refresh()
        for group, tables in zip(self._groups, trained, strict=True):
            if self._update == "in_backward":
                self._apply(group, tables, grad, lookups)
            else:
                self._collect(tables, grad, lookups)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Applies the collected gradients (``update="on_step"``); otherwise does nothing."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._update == "on_step":
            for group in self._groups:
                group.refresh()
            for group in self._groups:
                self._apply_collected(group)
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: tables join by ``meshrec.fuse``.

        Raises:
            ValueError: always.
        """
        raise ValueError("a fused optimizer takes no parameters afterwards. Fuse the module that holds them.")

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Nothing to do: the state is there from the beginning."""

    def _apply(self, group: _Group, tables: list[int], grad: Tensor, lookups: tbe.Lookups) -> None:
        """One step of some of the group's tables."""
        by_step: dict[int, list[int]] = {}
        for table in tables:
            by_step.setdefault(self._slots[table]["step"] + 1, []).append(table)
        for step, members in by_step.items():
            weights = [self._weights[table] for table in members]
            members_slots = [self._slots[table] for table in members]
            state = [slots[name] for name in group.slot_names for slots in members_slots]
            chosen = lookups if len(members) == len(self._weights) else lookups.of_tables(members)
            hyper = group.hyper.at(step)
            tbe.update(grad, *chosen, weights, state, group.spec.code, hyper, None, [])
            increment_version(weights)
            for slots in members_slots:
                slots["step"] = step

    def _collect(self, tables: list[int], grad: Tensor, lookups: tbe.Lookups) -> None:
        num_rows = [self._tables[table].weight.shape[0] for table in tables]
        gradients = tbe.sparse_grad(grad, lookups.of_tables(tables), num_rows)
        for table, (rows_U, grads_UD) in zip(tables, gradients, strict=True):
            weight = self._tables[table].weight
            new = torch.sparse_coo_tensor(
                rows_U[None],
                grads_UD.to(weight.dtype),
                weight.shape,
                is_coalesced=True,
                check_invariants=False,
            )
            weight.grad = new if weight.grad is None else weight.grad + new

    def _apply_collected(self, group: _Group) -> None:
        tables = [table for table in group.tables if self._tables[table].weight.grad is not None]
        if not tables:
            return
        rows, grads = [], []
        for table in tables:
            gradient = self._tables[table].weight.grad
            assert gradient is not None
            if not gradient.is_sparse:
                raise ValueError(
                    f"the gradient of {self._tables[table].name!r} is dense; a fused optimizer applies the "
                    "sparse gradients that its backward pass collected. Leave parameter.grad to it."
                )
            rows.append(gradient._indices()[0])
            grads.append(gradient._values().float())
        lookups = rows_as_lookups(rows, [grad.shape[1] for grad in grads], tables)
        self._apply(group, tables, torch.cat([grad.reshape(-1) for grad in grads]), lookups)


def rows_as_lookups(rows: list[Tensor], dims: list[int], tables: list[int]) -> tbe.Lookups:
    """Sparse gradients in the form of lookups: every row is looked up once, unpooled.

    Args: rows: per table int64 [U], repeated rows are added up. dims: the tables' widths. tables: their
        indices. The gradient that belongs to it is the tables' ``[U, D]`` flattened, one after the other.
    """
    counts = torch.tensor([0, *(len(rows_U) for rows_U in rows)], dtype=torch.int64)
    num_tables = len(tables)
    return tbe.Lookups(
        values=torch.cat(rows),
        offsets=counts.cumsum(0).to(rows[0].device),
        per_sample_weights=None,
        segments=None,
        num_keys=num_tables,
        keys=list(range(num_tables)),
        tables=tables,
        pooling=[2] * num_tables,
        flat=True,
        dims=dims,
    )


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
            fused = FusedOptimizer(planned[path], update=update, seed=seed)
            child.attach(fused)
            optimizers[path] = fused
    if module not in collections.values():
        module.fused_optimizer = CombinedOptimizer(list(optimizers.items()))  # type: ignore[assignment]
    if any(child.device.type == "cpu" for child in collections.values()):
        keep_freed_memory()
    return module


def _fused_tables(path: str, child: TableCollection, optimizer: OptimizerSpec | None) -> list[FusedTable]:
    where = f"the module at {path!r}" if path else "the module"
    if child.is_fused:
        raise ValueError(f"{where} is fused already. A collection takes one fused optimizer.")
    if child.device.type == "meta":
        raise ValueError(f"{where} is on meta. Allocate it first: to_empty(device=...), reset_parameters().")
    return [
        FusedTable(name, weight, in_backward_spec(weight) or optimizer)
        for name, (_, weight) in child.tables().items()
    ]


def _check_not_shared(planned: Mapping[str, list[FusedTable]]) -> None:
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


def _new_state(spec: OptimizerSpec, weight: Tensor) -> dict[str, Any]:
    state: dict[str, Any] = {"step": 0}
    for slot in spec.state_slots():
        tensor = torch.empty(slot.shape(*weight.shape), dtype=torch.float32, device=weight.device)
        use_huge_pages(tensor)
        state[slot.name] = tensor.fill_(slot.initial_value)
    return state
