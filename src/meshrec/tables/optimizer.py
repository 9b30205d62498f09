"""Optimizers for fused tables: the update rule that kernels apply, and the optimizer for training loops.

A fused table is updated by a kernel directly from the gradient of a lookup, without a dense gradient.
"""

import dataclasses
import operator
from collections.abc import Callable, Collection, ItemsView, KeysView, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.keyed import Closure, KeyedOptimizer, run_closure
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, StepHyper


class UpdateRule:
    """An optimizer with its current hyperparameters, for all tables that a kernel call updates together.

    Args:
        spec: optimizer with its initial hyperparameters.
        deferred: whether ``optimizer.step()`` updates the tables, instead of the backward pass.
        seed: seed for stochastic rounding in fp16 and bf16 tables; 0 rounds to nearest.
    """

    def __init__(self, spec: OptimizerSpec, *, deferred: bool = False, seed: int = DEFAULT_SEED) -> None:
        self.spec = spec
        """Optimizer with the hyperparameters read by the last ``refresh``."""
        self.deferred, self.seed = deferred, seed
        # Names of the state tensors, in the order of the kernels.
        self.slot_names = [slot.name for slot in spec.state_slots()]
        hyper = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        self.group: dict[str, Any] = {"params": [], **hyper}
        """Entry of ``param_groups`` in ``FusedOptimizer``: the tables' parameters, and the hyperparameters,
        which schedulers change."""
        # Reads all hyperparameters from ``group`` in a single C call, because every step does it.
        self._read = operator.itemgetter(*hyper)
        # Hyperparameters in ``spec``. ``refresh`` compares them with the param_group in every step.
        self._values = tuple(hyper.values())
        # Computes kernel arguments ahead of the step. During a step, rows have displaced all other data from
        # the processor's caches.
        self._hyper = StepHyper(spec, seed)

    @property
    def code(self) -> int:
        """Number of the optimizer in the kernels."""
        return self.spec.code

    @property
    def name(self) -> str:
        """Class name of the optimizer, such as ``"Adam"``."""
        return type(self.spec).__name__

    def refresh(self) -> None:
        """Read the current hyperparameters from the param_group, which schedulers change.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        now = self._read(self.group)
        # Rarely true: most steps have the hyperparameters of the step before.
        if now != self._values:
            values: list[Any] = [number.item() if isinstance(number, Tensor) else number for number in now]
            names = [field.name for field in dataclasses.fields(self.spec)]
            self.spec = dataclasses.replace(self.spec, **dict(zip(names, values, strict=True)))
            self._hyper = StepHyper(self.spec, self.seed)
            self._values = tuple(values)

    def hyper_at(self, step: int) -> Tensor:
        """Return the kernels' hyperparameters for update number ``step`` (from 1), float64.

        The next call overwrites the tensor.
        """
        return self._hyper.at(step)

    def hyper(self, step: int, row_dim: int) -> Tensor:
        """Return the kernels' hyperparameters for an update in a new tensor, float64.

        Args:
            step: number of the update, from 1.
            row_dim: see ``OptimizerSpec.hyper``.
        """
        return self.spec.hyper(lr=self.spec.lr, step=step, seed=self.seed, row_dim=row_dim)


def distinct_rules(rules: Sequence[UpdateRule | None]) -> list[UpdateRule]:
    """Return every rule object once, in the order of first occurrence. Ignores None."""
    return list({id(rule): rule for rule in rules if rule is not None}.values())


def rules_of(
    specs: Sequence[OptimizerSpec | None], *, deferred: bool = False, seed: int = DEFAULT_SEED
) -> list[UpdateRule | None]:
    """Create the update rules of some tables. Tables with equal optimizers share a rule.

    Args:
        specs: optimizer per table; None: ordinary gradients.
        deferred, seed: see ``UpdateRule``.

    Returns:
        A rule per table; None for ordinary gradients.
    """
    # Specs are frozen dataclasses, so equal hyperparameters give equal keys.
    rules: dict[OptimizerSpec, UpdateRule] = {}
    return [
        None if spec is None else rules.setdefault(spec, UpdateRule(spec, deferred=deferred, seed=seed))
        for spec in specs
    ]


UpdateMode = Literal["in_backward", "on_step"]
"""When tables are updated: in the backward pass, or by ``optimizer.step()``; see ``FusedOptimizer``."""


class KeyOrderedState(dict[str, Any]):
    """Optimizer state of a hashed table: the number ``"step"``, and a tensor per state slot.

    A state tensor has a row per live ID, sorted by key. Every call of ``keys`` or ``items`` reads the
    tensors from the table again, because admissions and evictions change them.

    Args:
        step: number of updates so far.
        key_ordered: function which returns the present state in key order, by state slot name.
    """

    def __init__(self, step: int, key_ordered: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(step=step)
        # Called by ``keys`` and ``items``, because a save must see the rows that exist at that moment.
        self._read_slots = key_ordered

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyOrderedState, (self["step"], self._read_slots)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Read the present state into the dict, and return the state slot names and ``"step"``."""
        self.update(self._read_slots())
        return super().keys()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Read the present state into the dict, and return its items, including ``"step"``."""
        self.update(self._read_slots())
        return super().items()


class FusedTable(NamedTuple):
    """A table with a fused optimizer: parameter, update rule, and optimizer state."""

    weight: nn.Parameter
    """The table's parameter. It has no rows if this rank has none, or if the rows are elsewhere."""
    rule: UpdateRule
    """The optimizer, which tables with equal hyperparameters share."""
    state: dict[str, Any]
    """Optimizer state of the whole table by state slot name, and ``"step"``, the number of updates so far.

    Every update reads and writes ``"step"`` here, so a loaded state dict takes effect at once.
    """
    label: str
    """Table name in messages."""
    dim: int
    """Number of whole-table columns."""
    gradient_buffers: Sequence[nn.Parameter] = ()
    """Parameters that collect gradients in their ``grad``, for rows outside ``weight``; see
    ``local_shards.GradientBuffer``."""


class DeferredUpdate(NamedTuple):
    """Update by ``FusedOptimizer.step``, which applies the gradients that the backward pass has collected."""

    step: Callable[[], None]
    """Function that applies the collected gradients to the tables."""
    signal: nn.Parameter | None = None
    """Parameter whose ``grad`` tells whether the gradients on all ranks are finite; see
    ``distributed.sharded_tables.GradientSignal``. None in a single process."""


class _Shared(NamedTuple):
    """Containers shared by a FusedOptimizer and its wrappers. They are changed in place, never replaced."""

    params: dict[str, Tensor]
    """Parameter by name."""
    state: dict[Tensor, dict[str, Any]]
    """Optimizer state by parameter."""
    groups: list[dict[str, Any]]
    """The ``param_groups`` of the optimizer."""


class FusedOptimizer(KeyedOptimizer):
    """Optimizer for fused tables, unsharded or sharded, with state by parameter name.

    It updates the tables from the gradients of lookups and never builds a dense gradient of a table. With
    ``update="in_backward"`` the backward pass applies the updates and ``step`` does nothing. With
    ``"on_step"`` the backward pass adds sparse gradients to ``parameter.grad`` and ``step`` applies them, so
    that gradient accumulation, clipping and gradient scaling work as with any torch optimizer.

    The state of a table is an fp32 tensor per state slot (``[rows]`` or ``[rows, D]``) and ``"step"``, the
    number of updates of this table. Tables split over ranks have DTensors for the whole table.
    ``param_groups`` has a group per distinct optimizer. The hyperparameters (``lr``, ``weight_decay``, ...)
    are read at every update, so learning rate schedulers work.

    Args:
        tables: fused tables by parameter name.
        deferred: how ``step`` applies collected gradients; None if the backward pass updates the tables.
    """

    def __init__(self, tables: Mapping[str, FusedTable], deferred: DeferredUpdate | None) -> None:
        # Replaced by ``rebind``, as is ``_deferred``. The containers in ``_shared`` stay.
        self.tables: dict[str, FusedTable] = {}
        self._shared = _Shared({}, {}, [])
        self.rebind(tables, deferred)
        super().__init__(*self._shared)
        self.defaults = {}

    def rebind(self, tables: Mapping[str, FusedTable], deferred: DeferredUpdate | None) -> None:
        """Replace the tables, after resharding has moved them to other parameters.

        All code that holds this optimizer, its state, or its groups sees the new tables.

        Args:
            tables: fused tables by parameter name.
            deferred: how ``step`` applies collected gradients; None if the backward pass updates the tables.
        """
        params, state, groups = self._shared
        self.tables, self._deferred = dict(tables), deferred
        # Clear and refill the containers, because wrappers hold these very objects.
        params.clear()
        state.clear()
        for table in tables.values():
            table.rule.group["params"].clear()
        for name, table in tables.items():
            params[name] = table.weight
            state[table.weight] = table.state
            table.rule.group["params"] += [table.weight, *table.gradient_buffers]
            # Compare by identity: two groups with equal hyperparameters are still different groups.
            if all(table.rule.group is not group for group in groups):
                groups.append(table.rule.group)
        # A GradScaler inspects the gradients of all groups, so put the signal into one of them on every rank.
        if deferred is not None and deferred.signal is not None:
            groups[0]["params"].append(deferred.signal)

    @property
    def updates_in_backward(self) -> bool:
        """Whether the backward pass updates the tables. False without tables."""
        return bool(self.tables) and self._deferred is None

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Evaluate the closure if given, then apply the collected gradients. Collective for sharded tables.

        Returns:
            The loss that the closure has returned; None without a closure.
        """
        loss = run_closure(closure)
        # In "in_backward" mode the closure's backward pass has already updated the tables.
        if self._deferred is not None:
            self._deferred.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError, because tables get their optimizer when the module is fused or sharded.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a fused optimizer takes no parameters afterwards: it has the tables that its module was fused "
            "or sharded with. Choose a table's optimizer before that, with apply_optimizer_in_backward, "
            "meshrec.fuse(module, optimizer=...) or the sharder's fused_params."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Do nothing, because fused tables have optimizer state from the start."""
