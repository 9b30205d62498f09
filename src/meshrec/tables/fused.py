"""The optimizer inside the backward pass, for whole tables in one process."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshrec.ops import tbe
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, check_seed
from meshrec.tables.at_rest import RestingState
from meshrec.tables.hashed import HashedTable
from meshrec.tables.holdings import Held, Holdings, in_parameter, in_table
from meshrec.tables.index import pins_of
from meshrec.tables.key_space import ALL_KEYS
from meshrec.tables.locking import UpdateLock
from meshrec.tables.optimizer import Deferred, FusedOptimizer, FusedTable, UpdateMode
from meshrec.tables.packing import Packing
from meshrec.tables.rule import rules_of
from meshrec.tables.storage import RowStorage
from meshrec.tables.table import Rectangle
from meshrec.tables.turnover import Turnover
from meshrec.tables.updates import LookedUp, TableGradient, TableUpdates
from meshrec.tables.writes import OwnWrites


class TrainedTable(NamedTuple):
    """A table and how it is trained."""

    name: str
    """The parameter's name."""
    weight: nn.Parameter
    spec: OptimizerSpec | None
    """The fused optimizer; None for ordinary gradients."""
    storage: RowStorage
    train_hashed: Callable[[OptimizerSpec | None], HashedTable] | None = None
    """Makes room for the optimizer's state in a table with hashed keys; None for others."""


class WholeTables(tbe.Updater):
    """The tables of one fused collection, which hands it the gradient of each lookup.

    Args:
        tables: the tables in the order in which the module's lookup counts them.
        update: "in_backward" or "on_step", see ``FusedOptimizer``.
        seed: the seed of the stochastic rounding of fp16 and bf16 tables; 0 rounds to nearest.

    Raises:
        ValueError: ``update`` or ``seed`` is not allowed.
    """

    def __init__(
        self, tables: Sequence[TrainedTable], *, update: UpdateMode = "in_backward", seed: int = DEFAULT_SEED
    ) -> None:
        if update not in ("in_backward", "on_step"):
            raise ValueError(f"update must be 'in_backward' or 'on_step', got {update!r}.")
        check_seed(seed)
        self.plain_tables = [index for index, table in enumerate(tables) if table.spec is None]
        """The tables that it leaves to ordinary gradients."""
        held: list[Held] = []
        fused: dict[int, FusedTable] = {}
        hashed: dict[int, HashedTable] = {}
        rules = rules_of([table.spec for table in tables], deferred=update == "on_step", seed=seed)
        for index, ((name, weight, spec, storage, _), rule) in enumerate(zip(tables, rules, strict=True)):
            num_rows, dim = weight.shape
            make = tables[index].train_hashed
            if make is not None and rule is not None:
                own = hashed[index] = make(spec)
                own.rectangle = own.rectangle._replace(table=index)
                here = in_table(weight, Packing([own.rectangle], storage), [own])
                held.append(here)
                carriers = [each.parameter for each in here.carriers] if rule.deferred else []
                state_now = functools.partial(_slots_of, own, rule.slot_names)
                fused[index] = FusedTable(
                    weight, rule, RestingState(0, state_now), f"table {name!r}", dim, carriers
                )
                mark_in_backward(weight, rule.spec)
                continue
            packing = Packing([Rectangle(index, 0, num_rows, 0, dim)], storage)
            state = storage.new_state(spec, num_rows, dim, weight.device)
            held.append(in_parameter(weight, packing, [state], spec))
            if rule is not None and spec is not None:
                slots: dict[str, Any] = {"step": 0, **dict(zip(rule.slot_names, state, strict=True))}
                fused[index] = FusedTable(weight, rule, slots, f"table {name!r}", dim)
                mark_in_backward(weight, spec)
        self._fused = [table.weight for table in fused.values()]
        self._writes = OwnWrites([table.label for table in fused.values()], self._fused)
        turnover = None
        if hashed:
            storages = {t: table.storage for t, table in hashed.items()}
            turnover = Turnover(hashed, storages, {t: [ALL_KEYS] for t in hashed})
            turnover.recount()
        self._hashed = {t: tables[t].weight for t in hashed}
        self._updates = TableUpdates(Holdings(held), fused, writes=self._writes, turnover=turnover)
        self._has_taken, self._updating = False, UpdateLock()
        named = {tables[index].name: table for index, table in fused.items()}
        self.optimizer = FusedOptimizer(named, Deferred(self._step) if update == "on_step" else None)
        """The optimizer that the collection shows."""

    @property
    def turnovers(self) -> list[Turnover]:
        """The turnovers, which let IDs of hashed tables come and go."""
        return [] if self._updates.turnover is None else [self._updates.turnover]

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return how often somebody other than the optimizer has written to each fused table.

        Raises:
            ValueError: a fused parameter of the module was replaced, so that it would not be trained.
        """
        plain = self.plain_tables
        if self._hashed:
            weights = [self._hashed.get(t, weight) for t, weight in enumerate(weights)]
        self._writes.check_held([w for t, w in enumerate(weights) if t not in plain] if plain else weights)
        return self._writes.foreign()

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if ``foreign_writes`` has changed since it gave ``before``."""
        self._writes.check(before)

    def take(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        """Update the tables from the gradient of a lookup, or add sparse gradients to ``parameter.grad``.

        Tables that do not require a gradient (now, not when they were fused) are left alone. Threads take
        turns: two updates that read the same step would count as one.
        """
        gradient = TableGradient(LookedUp(grad, lookups), {}, pins_of(lookups.values))
        with self._updating:
            if not self._has_taken:
                for weight in self._fused:
                    in_backward_spec(weight)  # torch may have attached another one since
                self._has_taken = True
            prepared = self._updates.prepare(gradient, deferred=False)
            self._updates.collect(gradient)
            self._updates.apply(prepared, gradient)

    def _step(self) -> None:
        with self._updating:
            collected = self._updates.collected()
            self._updates.apply(self._updates.prepare(collected, deferred=True), collected)


def _slots_of(table: HashedTable, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer state of a table's rows as they are now."""
    found = table.tensors()
    return {name: found[name] for name in names}
