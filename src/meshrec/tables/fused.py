"""Fused optimizer for whole (unsharded) tables in a single process: the backward pass updates the tables."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshrec.ops import tbe
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, check_seed
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.hashed.keys import ALL_KEYS
from meshrec.tables.hashed.table import HashedTable
from meshrec.tables.index import check_pinned, pins_of, release_pins
from meshrec.tables.local_shards import LocalShard, LocalShards, parameter_shard, table_shard
from meshrec.tables.optimizer import (
    Deferred,
    FusedOptimizer,
    FusedTable,
    KeyOrderedState,
    UpdateMode,
    rules_of,
)
from meshrec.tables.packing import Packing
from meshrec.tables.storage import RowStorage
from meshrec.tables.table import Rectangle
from meshrec.tables.updates import LookedUp, TableGradient, TableUpdates, WriteCounter


class UpdateLock:
    """A lock replaced by a new lock when copied or pickled, together with the tables."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return UpdateLock, ()


class TrainedTable(NamedTuple):
    """A collection's table, and how it is trained."""

    name: str
    """Parameter name."""
    weight: nn.Parameter
    spec: OptimizerSpec | None
    """Fused optimizer; None: ordinary gradients."""
    storage: RowStorage
    train_hashed: Callable[[OptimizerSpec | None], HashedTable] | None = None
    """Returns the hashed table with optimizer state allocated; None for other tables."""


class WholeTables(tbe.Updater):
    """A fused collection's tables. Receives lookup gradients, and updates the tables with them.

    Args:
        tables: tables in the module's lookup order.
        update: "in_backward" or "on_step", see ``FusedOptimizer``.
        seed: seed for stochastic rounding in fp16 and bf16 tables; 0 rounds to nearest.

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
        """Indices of tables with ordinary gradients."""
        held: list[LocalShard] = []
        fused: dict[int, FusedTable] = {}
        hashed: dict[int, HashedTable] = {}
        rules = rules_of([table.spec for table in tables], deferred=update == "on_step", seed=seed)
        for index, ((name, weight, spec, storage, _), rule) in enumerate(zip(tables, rules, strict=True)):
            num_rows, dim = weight.shape
            make = tables[index].train_hashed
            if make is not None and rule is not None:
                table = hashed[index] = make(spec)
                # An unsharded hashed table does not know the table index in the collection.
                table.rectangle = table.rectangle._replace(table=index)
                here = table_shard(weight, Packing([table.rectangle], storage), [table])
                held.append(here)
                buffers = [buffer.parameter for buffer in here.gradient_buffers] if rule.deferred else []

                state_now = functools.partial(_slots_of, table, rule.slot_names)
                fused[index] = FusedTable(
                    weight, rule, KeyOrderedState(0, state_now), f"table {name!r}", dim, buffers
                )
                mark_in_backward(weight, rule.spec)
                continue
            packing = Packing([Rectangle(index, 0, num_rows, 0, dim)], storage)
            state = storage.new_state(spec, num_rows, dim, weight.device)
            held.append(parameter_shard(weight, packing, [state], spec))
            if rule is not None and spec is not None:
                slots: dict[str, Any] = {"step": 0, **dict(zip(rule.slot_names, state, strict=True))}
                fused[index] = FusedTable(weight, rule, slots, f"table {name!r}", dim)
                mark_in_backward(weight, spec)
        self._fused = [table.weight for table in fused.values()]
        self._writes = WriteCounter([table.label for table in fused.values()], self._fused)
        admission_eviction = None
        if hashed:
            storages = {t: table.storage for t, table in hashed.items()}
            admission_eviction = AdmissionEviction(hashed, storages, {t: [ALL_KEYS] for t in hashed})
            admission_eviction.recount()
        self._hashed = {t: tables[t].weight for t in hashed}
        self._updates = TableUpdates(
            LocalShards(held), fused, writes=self._writes, admission_eviction=admission_eviction
        )
        # The first gradient checks for other optimizers; the lock serializes updates from several threads.
        self._has_taken, self._updating = False, UpdateLock()
        named = {tables[index].name: table for index, table in fused.items()}
        self.optimizer = FusedOptimizer(named, Deferred(self._step) if update == "on_step" else None)
        """The collection's ``fused_optimizer``."""

    @property
    def admission_evictions(self) -> list[AdmissionEviction]:
        """Admission and eviction for hashed tables."""
        return [] if self._updates.admission_eviction is None else [self._updates.admission_eviction]

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Count in-place writes per fused table made by anything but the updates.

        Raises:
            ValueError: a fused parameter was replaced, so the new parameter would not be trained.
        """
        plain = self.plain_tables
        if self._hashed:
            # Hashed tables pass their row memory; versions are counted on the parameter.
            weights = [self._hashed.get(t, weight) for t, weight in enumerate(weights)]
        self._writes.check_parameters(
            [w for t, w in enumerate(weights) if t not in plain] if plain else weights
        )
        return self._writes.foreign_writes()

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if ``foreign_writes`` no longer returns ``before``: a table was changed."""
        self._writes.check(before)

    def take(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        """Update the tables with a lookup gradient. With ``"on_step"``, add it to ``parameter.grad`` instead.

        Tables are not changed if their parameter requires no gradient now. Threads take turns: two
        updates reading the same step number would count as a single update.

        Args:
            grad: lookup output gradient.
            lookups: the batch.
        """
        gradient = TableGradient(LookedUp(grad, lookups), {}, pins_of(lookups.values))
        # A second backward pass must fail before anything changes.
        check_pinned(gradient.pins)
        with self._updating:
            if not self._has_taken:
                for weight in self._fused:
                    in_backward_spec(weight)  # torch may have attached another optimizer since
                self._has_taken = True
            prepared = self._updates.prepare(gradient, deferred=False)
            self._updates.collect(gradient)
            self._updates.apply(prepared, gradient)
            if self.optimizer.updates_in_backward:  # otherwise collected gradients keep the slots
                release_pins(gradient.pins)

    def _step(self) -> None:
        """Apply the collected gradients: ``optimizer.step()`` with ``"on_step"``."""
        with self._updating:
            collected = self._updates.collected()
            self._updates.apply(self._updates.prepare(collected, deferred=True), collected)


def _slots_of(table: HashedTable, names: Sequence[str]) -> dict[str, Tensor]:
    """Return optimizer state for a table's present rows, by slot name."""
    tensors = table.tensors()
    return {name: tensors[name] for name in names}
