"""The optimizer that a module with fused tables shows to training loops, schedulers and checkpoints."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.optim.keyed import Closure, KeyedOptimizer, evaluated
from meshrec.tables.rule import UpdateRule

UpdateMode = Literal["in_backward", "on_step"]


class FusedTable(NamedTuple):
    """A table with a fused rule, on one rank: its parameter, its rule and its optimizer state."""

    weight: nn.Parameter
    """The parameter under the table's name; it has no rows where this rank holds none of them."""
    rule: UpdateRule
    state: dict[str, Any]
    """The state of the whole table by slot, and ``"step"``, the number of its updates so far.

    Every update reads and writes ``"step"`` here, so a loaded state dict takes effect at once.
    """
    label: str
    """The table's name in messages."""
    dim: int
    """The width of the whole table."""
    carriers: Sequence[nn.Parameter] = ()
    """The parameters that have the collected gradients of such a table, see ``tables/carrier.py``."""


class Deferred(NamedTuple):
    """The function with which ``FusedOptimizer.step`` applies collected gradients."""

    step: Callable[[], None]
    signal: nn.Parameter | None = None
    """A parameter whose ``grad`` says whether the gradients of all ranks are finite; see
    ``distributed.collected``. None in one process.
    """


class _Shared(NamedTuple):
    """The objects that a KeyedOptimizer shares with wrappers: changed in place, never replaced."""

    params: dict[str, Tensor]
    state: dict[Tensor, dict[str, Any]]
    groups: list[dict[str, Any]]


class FusedOptimizer(KeyedOptimizer):
    """The optimizer of fused tables, unsharded or sharded, keyed by the names of their parameters.

    It updates tables from the gradient of their lookup and never builds the gradient of a table. With
    ``update="in_backward"`` the backward pass makes the updates and ``step`` does nothing. With ``"on_step"``
    the backward pass adds sparse gradients to ``parameter.grad`` and ``step`` applies them; accumulation,
    clipping and gradient scaling then work as with any torch optimizer.

    The state of a table has one fp32 tensor for each state slot of its spec (``[rows]`` or ``[rows, D]``) and
    ``"step"``, the number of updates of this table. Tables that share a spec may have different steps. Split
    tables have DTensors of the whole. ``param_groups`` holds one group for each spec; its numbers (``lr``,
    ``weight_decay``, ...) are read at every update, so learning rate schedulers work.

    Args:
        tables: the fused tables by the name of their parameter.
        deferred: how ``step`` updates them; None where the backward pass does.
    """

    def __init__(self, tables: Mapping[str, FusedTable], deferred: Deferred | None) -> None:
        self.tables: dict[str, FusedTable] = {}
        self._shared = _Shared({}, {}, [])
        self.rebind(tables, deferred)
        super().__init__(*self._shared)
        self.defaults = {}

    def rebind(self, tables: Mapping[str, FusedTable], deferred: Deferred | None) -> None:
        """Take over tables that have moved to other parameters.

        Whoever holds this optimizer, its state or its groups sees the new tables.
        """
        params, state, groups = self._shared
        self.tables, self._deferred = dict(tables), deferred
        params.clear()
        state.clear()
        for table in tables.values():
            table.rule.group["params"].clear()
        for name, table in tables.items():
            params[name] = table.weight
            state[table.weight] = table.state
            table.rule.group["params"] += [table.weight, *table.carriers]
            if all(table.rule.group is not group for group in groups):
                groups.append(table.rule.group)
        if deferred is not None and deferred.signal is not None:
            groups[0]["params"].append(deferred.signal)

    @property
    def updates_in_backward(self) -> bool:
        """Whether there are tables and the backward pass updates them."""
        return bool(self.tables) and self._deferred is None

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Apply the collected gradients, after evaluating the closure. Collective for sharded tables."""
        loss = evaluated(closure)
        if self._deferred is not None:
            self._deferred.step()
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise an error: tables join an optimizer when their module is fused or sharded.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a fused optimizer takes no parameters afterwards: it has the tables that its module was fused "
            "or sharded with. Choose a table's optimizer before that, with apply_optimizer_in_backward, "
            "meshrec.fuse(module, optimizer=...) or the sharder's fused_params."
        )

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Do nothing, as the tables come with their state."""
