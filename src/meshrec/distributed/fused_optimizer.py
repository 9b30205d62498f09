"""The fused optimizer of a sharded module: rules for the backward pass, and state by the names of whole
tables.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.distributed.table_shards import TableShards
from meshrec.optim.keyed import Closure, KeyedOptimizer, evaluated
from meshrec.tables.rule import UpdateRule


class StateParts(NamedTuple):
    """One state of a table: whether it has a number per row only, and its part for each rectangle here."""

    per_row: bool
    parts: list[Tensor]


class FusedTable(NamedTuple):
    """A table with a fused rule: its shards module, its rule, and its state by slot."""

    shards: TableShards
    rule: UpdateRule
    slots: dict[str, StateParts]
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
            "optimizer with apply_optimizer_in_backward, or in the sharder's fused_params, before sharding."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Nothing: the state was made with the tables."""


def _whole_state(table: FusedTable) -> dict[str, Tensor]:
    return {
        name: table.shards.whole_state(slot.parts, per_row=slot.per_row) for name, slot in table.slots.items()
    }


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
                f"{table.rule.name}. Give them optimizers that differ in some number, or load a state in "
                "which they agree."
            )
