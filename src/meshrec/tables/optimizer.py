"""Optimizers for fused tables: the update rule, and the optimizer object for training loops."""

import dataclasses
import operator
from collections.abc import Callable, Collection, ItemsView, KeysView, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.keyed import Closure, KeyedOptimizer, run_closure
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, StepHyper


class UpdateRule:
    """Optimizer spec and current hyperparameters for tables updated together in a kernel call.

    A step reads the rule when rows have displaced all other data from the processor's caches, so the rule
    computes kernel arguments ahead of the step.

    Args:
        spec: the optimizer spec.
        deferred: whether the optimizer step applies the updates, instead of the backward pass.
        seed: seed for stochastic rounding in fp16 and bf16 tables; 0 rounds to nearest.
    """

    def __init__(self, spec: OptimizerSpec, *, deferred: bool = False, seed: int = DEFAULT_SEED) -> None:
        self.spec = spec
        """Spec with hyperparameters from the last ``refresh``."""
        self.deferred, self.seed = deferred, seed
        self.slot_names = [slot.name for slot in spec.state_slots()]
        hyper = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        self.group: dict[str, Any] = {"params": [], **hyper}
        """torch's param_group: the tables' parameters and the current hyperparameters."""
        self._read = operator.itemgetter(*hyper)
        # Values for building ``spec``; ``refresh`` compares them with the param_group in every step.
        self._values = tuple(hyper.values())
        self._hyper = StepHyper(spec, seed)

    @property
    def code(self) -> int:
        """Optimizer number in the kernels."""
        return self.spec.code

    @property
    def name(self) -> str:
        """Optimizer class name, such as ``"Adam"``."""
        return type(self.spec).__name__

    def refresh(self) -> None:
        """Read the current hyperparameters from the param_group, which schedulers change.

        Raises:
            ValueError: a hyperparameter is out of range.
        """
        now = self._read(self.group)
        if now != self._values:
            values: list[Any] = [number.item() if isinstance(number, Tensor) else number for number in now]
            names = [field.name for field in dataclasses.fields(self.spec)]
            self.spec = dataclasses.replace(self.spec, **dict(zip(names, values, strict=True)))
            self._hyper = StepHyper(self.spec, self.seed)
            self._values = tuple(values)

    def hyper_at(self, step: int) -> Tensor:
        """Return hyperparameters for update ``step``, float64. The next call overwrites the tensor."""
        return self._hyper.at(step)

    def hyper(self, step: int, row_dim: int) -> Tensor:
        """Return hyperparameters for update ``step`` in a new tensor, float64.

        Args:
            step: update number, counted from 1.
            row_dim: see ``OptimizerSpec.hyper``.
        """
        return self.spec.hyper(lr=self.spec.lr, step=step, seed=self.seed, row_dim=row_dim)


def distinct_rules(rules: Sequence[UpdateRule | None]) -> list[UpdateRule]:
    """Return distinct rules, ordered by first use."""
    return list({id(rule): rule for rule in rules if rule is not None}.values())


def rules_of(
    specs: Sequence[OptimizerSpec | None], *, deferred: bool = False, seed: int = DEFAULT_SEED
) -> list[UpdateRule | None]:
    """Return update rules by table. Tables with equal specs share a rule.

    Args:
        specs: optimizer spec per table; None: ordinary gradients.
        deferred: see ``UpdateRule``.
        seed: see ``UpdateRule``.
    """
    rules: dict[OptimizerSpec, UpdateRule] = {}
    return [
        None if spec is None else rules.setdefault(spec, UpdateRule(spec, deferred=deferred, seed=seed))
        for spec in specs
    ]


UpdateMode = Literal["in_backward", "on_step"]
"""Whether the backward pass updates tables, or ``optimizer.step()`` does; see ``FusedOptimizer``."""


class KeyOrderedState(dict[str, Any]):
    """Optimizer state for a growable table: ``"step"``, and slots computed when listed.

    Args:
        step: update count so far.
        key_ordered: returns the present slots in key order, by slot name.
    """

    def __init__(self, step: int, key_ordered: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(step=step)
        self._read_slots = key_ordered

    def __reduce__(self) -> tuple[Any, ...]:
        return KeyOrderedState, (self["step"], self._read_slots)

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Read the slots, and return their names and ``"step"``."""
        self.update(self._read_slots())
        return super().keys()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Read the slots, and return them and ``"step"``."""
        self.update(self._read_slots())
        return super().items()


class FusedTable(NamedTuple):
    """A table with a fused optimizer: parameter, rule, and optimizer state."""

    weight: nn.Parameter
    """Parameter with the table's name; without rows if this rank has none."""
    rule: UpdateRule
    state: dict[str, Any]
    """Whole-table state by slot name, and ``"step"``, the update count so far.

    Every update reads and writes ``"step"`` here, so a loaded state dict takes effect at once.
    """
    label: str
    """Table name in messages."""
    dim: int
    """Whole-table width."""
    gradient_buffers: Sequence[nn.Parameter] = ()
    """Parameters with a ``grad`` that collects gradients for rows outside the parameter, see
    ``local_shards.GradientBuffer``.
    """


class Deferred(NamedTuple):
    """How ``FusedOptimizer.step`` applies gradients collected in the backward pass."""

    step: Callable[[], None]
    signal: nn.Parameter | None = None
    """Parameter whose ``grad`` tells whether gradients on all ranks are finite; see
    ``distributed.sharded_tables.GradientSignal``.
    None in a single process.
    """


class _Shared(NamedTuple):
    """Mappings shared by a FusedOptimizer and wrappers: changed in place, never replaced."""

    params: dict[str, Tensor]
    state: dict[Tensor, dict[str, Any]]
    groups: list[dict[str, Any]]


class FusedOptimizer(KeyedOptimizer):
    """Optimizer for fused tables, unsharded or sharded, with state keyed by parameter name.

    It updates tables from lookup gradients and never builds a whole-table gradient. With
    ``update="in_backward"`` the backward pass applies the updates and ``step`` does nothing. With
    ``"on_step"`` the backward pass adds sparse gradients to ``parameter.grad`` and ``step`` applies them;
    accumulation, clipping and gradient scaling then work as with any torch optimizer.

    A table's state has one fp32 tensor per state slot (``[rows]`` or ``[rows, D]``) and ``"step"``, the
    table's update count. Tables sharing a spec may have different steps. Split tables have
    whole-table DTensors. ``param_groups`` has one group per spec. The hyperparameters (``lr``,
    ``weight_decay``, ...) are read at every update, so learning rate schedulers work.

    Args:
        tables: fused tables by parameter name.
        deferred: hooks for ``step``; None if the backward pass updates the tables.
    """

    def __init__(self, tables: Mapping[str, FusedTable], deferred: Deferred | None) -> None:
        self.tables: dict[str, FusedTable] = {}
        self._shared = _Shared({}, {}, [])
        self.rebind(tables, deferred)
        super().__init__(*self._shared)
        self.defaults = {}

    def rebind(self, tables: Mapping[str, FusedTable], deferred: Deferred | None) -> None:
        """Replace the tables, after they have moved to other parameters.

        All code holding this optimizer, the state, or the groups sees the new tables.
        """
        params, state, groups = self._shared
        self.tables, self._deferred = dict(tables), deferred
        # Clear and refill: wrappers hold these very objects.
        params.clear()
        state.clear()
        for table in tables.values():
            table.rule.group["params"].clear()
        for name, table in tables.items():
            params[name] = table.weight
            state[table.weight] = table.state
            table.rule.group["params"] += [table.weight, *table.gradient_buffers]
            # By identity: two groups with equal hyperparameters are still separate.
            if all(table.rule.group is not group for group in groups):
                groups.append(table.rule.group)
        # The signal shares the first group, so a GradScaler sees it on every rank.
        if deferred is not None and deferred.signal is not None:
            groups[0]["params"].append(deferred.signal)

    @property
    def updates_in_backward(self) -> bool:
        """Whether the backward pass updates tables. False without tables."""
        return bool(self.tables) and self._deferred is None

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Evaluate the closure, then apply the collected gradients. Collective for sharded tables."""
        loss = run_closure(closure)
        if self._deferred is not None:
            self._deferred.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: tables get an optimizer when the module is fused or sharded.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a fused optimizer takes no parameters afterwards: it has the tables that its module was fused "
            "or sharded with. Choose a table's optimizer before that, with apply_optimizer_in_backward, "
            "meshrec.fuse(module, optimizer=...) or the sharder's fused_params."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Do nothing: fused tables have state from the start."""
