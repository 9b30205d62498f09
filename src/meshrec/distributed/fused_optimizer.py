"""The fused optimizer of a sharded module: rules for the backward pass, and state by the names of whole
tables.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.table_shards import TableShards
from meshrec.ops.memory import use_huge_pages
from meshrec.optim.keyed import Closure, KeyedOptimizer, evaluated
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec


class SpecRule:
    """One spec, with its numbers of now and the count of updates so far.

    Args:
        deferred: whether the optimizer's step makes the updates, and not the backward pass.
        seed: of the stochastic rounding of fp16 and bf16 tables; 0 rounds to nearest.
    """

    def __init__(self, spec: OptimizerSpec, *, deferred: bool = False, seed: int = DEFAULT_SEED) -> None:
        self.spec, self.deferred, self._seed = spec, deferred, seed
        self._numbers = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        self.group: dict[str, Any] = {"params": [], **self._numbers}
        self.states: list[dict[str, Any]] = []
        """The state of every table of this rule; each holds the count as ``"step"``."""

    @property
    def code(self) -> int:
        """Which formula."""
        return self.spec.code

    @property
    def name(self) -> str:
        """What users call it."""
        return type(self.spec).__name__

    @property
    def step(self) -> int:
        """The number of updates."""
        return int(self.states[0]["step"])

    def hyper(self, row_dim: int) -> Tensor:
        """The numbers of the next update, as ``param_groups`` has them. ValueError where one is out of its
        range now.
        """
        spec = self._current()
        return spec.hyper(lr=spec.lr, step=self.step + 1, seed=self._seed, row_dim=row_dim)

    def advance(self) -> None:
        """Counts an update that was made."""
        for state in self.states:
            state["step"] += 1

    def _current(self) -> OptimizerSpec:
        changed: dict[str, Any] = {
            key: value.item() if isinstance(value, Tensor) else value
            for key, value in self.group.items()
            if key in self._numbers and value != self._numbers[key]
        }
        return dataclasses.replace(self.spec, **changed) if changed else self.spec


def make_state(spec: OptimizerSpec | None, weight: Tensor) -> list[Tensor]:
    """The state of one rectangle before its first update, on huge pages where it is large."""
    state = []
    for slot in spec.state_slots() if spec is not None else ():
        tensor = torch.empty(slot.shape(*weight.shape), dtype=torch.float32, device=weight.device)
        use_huge_pages(tensor)
        state.append(tensor.fill_(slot.initial_value))
    return state


class Slot(NamedTuple):
    """One state of a table: whether it has a number per row only, and its part for each rectangle here."""

    per_row: bool
    parts: list[Tensor]


class FusedTable(NamedTuple):
    """A table with a fused rule: its shards module, its rule, and its state by slot."""

    shards: TableShards
    rule: SpecRule
    slots: dict[str, Slot]
    first_step: int = 0
    """Updates that the table has had before."""


class Deferred(NamedTuple):
    """How ``step`` applies what backward passes have collected. ``signal``: see ``Collected``."""

    signal: nn.Parameter
    step: Callable[[], None]


class _Own(NamedTuple):
    """The objects that a KeyedOptimizer shares with those who hold it: changed in place, never replaced."""

    params: dict[str, Tensor]
    state: dict[Tensor, dict[str, Any]]
    groups: list[dict[str, Any]]


class ShardedFusedOptimizer(KeyedOptimizer):
    """What updates the tables of a sharded module: during backward, and ``step`` has nothing left to do, or
    in ``step``, from the gradients that backward collected on each rank (``update="on_step"``).

    ``param_groups``: one for each spec; a scheduler may change its ``"lr"``. The state is that of whole
    tables: a DTensor for a split table, of which this rank holds some rectangles.

    Args:
        tables: the fused tables, by the name of their weight.
        deferred: None for updates during backward.
    """

    def __init__(self, tables: Mapping[str, FusedTable], deferred: Deferred | None = None) -> None:
        self.tables: dict[str, FusedTable] = {}
        params: dict[str, Tensor] = {}
        state: dict[Tensor, dict[str, Any]] = {}
        groups: list[dict[str, Any]] = []
        self._own = _Own(params, state, groups)
        self.rebind(tables, deferred)
        super().__init__(params, state, groups)
        self.register_load_state_dict_pre_hook(_check_loaded)

    def rebind(self, tables: Mapping[str, FusedTable], deferred: Deferred | None) -> None:
        """Goes on with tables that have moved; whoever holds this optimizer or its groups sees the new
        ones."""
        params, state, groups = self._own
        self.tables, self._deferred = dict(tables), deferred
        params.clear()
        state.clear()
        for table in tables.values():
            table.rule.group["params"].clear()
            table.rule.states.clear()
        for name, table in tables.items():
            params[name] = table.shards.weight
            table.rule.group["params"].append(params[name])
            if all(table.rule.group is not group for group in groups):
                groups.append(table.rule.group)
            state[params[name]] = {"step": table.first_step, **_whole_state(table)}
            table.rule.states.append(state[params[name]])
        if deferred is not None:
            groups[0]["params"].append(deferred.signal)

    @property
    def updates_in_backward(self) -> bool:
        """Whether there are tables, and ``step`` has nothing left to do for them."""
        return bool(self.tables) and self._deferred is None

    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Evaluates the closure, and applies what was collected. Collective over all ranks."""
        loss = evaluated(closure)
        if self._deferred is not None:
            with torch.no_grad():
                self._deferred.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not here: raises ValueError."""
        raise ValueError(
            "the fused optimizer of a sharded module has the tables it was sharded with. Attach an "
            "optimizer with "
            "apply_optimizer_in_backward, or in the sharder's fused_params, before sharding."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Nothing: the state was made with the tables."""


def _whole_state(table: FusedTable) -> dict[str, Tensor]:
    return {name: table.shards.whole(slot.parts, per_row=slot.per_row) for name, slot in table.slots.items()}


def _check_loaded(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    assert isinstance(optimizer, ShardedFusedOptimizer)
    _check_steps(optimizer, state_dict.get("state", {}))


def _check_steps(optimizer: ShardedFusedOptimizer, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Tables of one rule are updated together, so they count together."""
    seen: dict[int, tuple[str, int]] = {}
    for name, table in optimizer.tables.items():
        if "step" not in state.get(name, {}):
            continue
        step = int(state[name]["step"])
        first, expected = seen.setdefault(id(table.rule), (name, step))
        if step != expected:
            raise ValueError(
                f"{name!r} has had {step} updates and {first!r} {expected}, but they share "
                f"{table.rule.name}. "
                "Give them optimizers that differ in some number, or load a state in which they agree."
            )
