"""Fused tables in a single process (unsharded): kernels update them from the gradient of a lookup."""

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
    DeferredUpdate,
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
    """A lock that can be copied and pickled with the tables it protects. The copy is a new, free lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return UpdateLock, ()


class TrainedTable(NamedTuple):
    """A table in an embedding collection, and the optimizer that trains it."""

    name: str
    """Name of the parameter."""
    weight: nn.Parameter
    """The table's parameter."""
    spec: OptimizerSpec | None
    """Fused optimizer; None: ordinary gradients."""
    storage: RowStorage
    """Row format of the table."""
    train_hashed: Callable[[OptimizerSpec | None], HashedTable] | None = None
    """For a hashed table: function that adds optimizer state and returns the table. None for other tables."""


class WholeTables(tbe.Updater):
    """The unsharded tables of a fused embedding collection, updated with the gradients of lookups.

    The backward pass of a lookup calls ``apply_gradient`` with the gradient.

    Args:
        tables: tables in the order in which the module looks them up.
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
        shards: list[LocalShard] = []
        fused: dict[int, FusedTable] = {}
        hashed: dict[int, HashedTable] = {}
        rules = rules_of([table.spec for table in tables], deferred=update == "on_step", seed=seed)
        for index, ((name, weight, spec, storage, _), rule) in enumerate(zip(tables, rules, strict=True)):
            num_rows, dim = weight.shape
            make = tables[index].train_hashed
            if make is not None and rule is not None:
                table = hashed[index] = make(spec)
                # A hashed table is created with table number 0. Here the number is the index in the
                # collection.
                table.rectangle = table.rectangle._replace(table=index)
                here = table_shard(weight, Packing([table.rectangle], storage), [table])
                shards.append(here)
                buffers = [buffer.parameter for buffer in here.gradient_buffers] if rule.deferred else []

                # State dicts read the optimizer state of the rows present at that moment.
                state_now = functools.partial(_slots_of, table, rule.slot_names)
                fused[index] = FusedTable(
                    weight, rule, KeyOrderedState(0, state_now), f"table {name!r}", dim, buffers
                )
                mark_in_backward(weight, rule.spec)
                continue
            packing = Packing([Rectangle(index, 0, num_rows, 0, dim)], storage)
            state = storage.new_state(spec, num_rows, dim, weight.device)
            shards.append(parameter_shard(weight, packing, [state], spec))
            if rule is not None and spec is not None:
                slots: dict[str, Any] = {"step": 0, **dict(zip(rule.slot_names, state, strict=True))}
                fused[index] = FusedTable(weight, rule, slots, f"table {name!r}", dim)
                mark_in_backward(weight, spec)
        # The fields below are set once. The module's parameters must stay these objects, see
        # ``WriteCounter``.
        self._fused = [table.weight for table in fused.values()]
        self._writes = WriteCounter([table.label for table in fused.values()], self._fused)
        admission_eviction = None
        if hashed:
            # A single process has all keys, so a single interval per table is enough.
            storages = {t: table.storage for t, table in hashed.items()}
            admission_eviction = AdmissionEviction(hashed, storages, {t: [ALL_KEYS] for t in hashed})
            # The tables may have rows already, from before the module was fused.
            admission_eviction.recount()
        # Placeholder parameters of the hashed tables, by table index.
        self._hashed = {t: tables[t].weight for t in hashed}
        self._updates = TableUpdates(
            LocalShards(shards), fused, writes=self._writes, admission_eviction=admission_eviction
        )
        # ``_has_taken``: whether a gradient has arrived; the first one checks that no other optimizer was
        # attached. The lock serializes updates from several threads.
        self._has_taken, self._updating = False, UpdateLock()
        named = {tables[index].name: table for index, table in fused.items()}
        self.optimizer = FusedOptimizer(named, DeferredUpdate(self._step) if update == "on_step" else None)
        """Optimizer of the tables, which the collection shows as ``fused_optimizer``."""

    @property
    def admission_evictions(self) -> list[AdmissionEviction]:
        """A list with the object that admits IDs and evicts rows; empty without hashed tables."""
        return [] if self._updates.admission_eviction is None else [self._updates.admission_eviction]

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return the number of in-place writes per fused table that were not made by updates.

        Args:
            weights: the module's present parameters, in the order of the tables.

        Raises:
            ValueError: a fused parameter was replaced, so the new parameter would not be trained.
        """
        plain = self.plain_tables
        if self._hashed:
            # For a hashed table the module passes the row memory, but writes are counted on the parameter.
            weights = [self._hashed.get(t, weight) for t, weight in enumerate(weights)]
        self._writes.check_parameters(
            [w for t, w in enumerate(weights) if t not in plain] if plain else weights
        )
        return self._writes.foreign_writes()

    def check_tables(self, before: list[int]) -> None:
        """Check that only updates have written to the tables since ``foreign_writes`` returned ``before``.

        Raises:
            ValueError: other code has written to a table.
        """
        self._writes.check(before)

    def apply_gradient(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        """Update the tables with the gradient of a lookup. With ``"on_step"``, collect the gradient instead.

        A table is not changed if the parameter requires no gradient now.
        """
        gradient = TableGradient(LookedUp(grad, lookups), {}, pins_of(lookups.values))
        # A second backward pass must fail before anything changes.
        check_pinned(gradient.pins)
        # Threads take turns: two updates that read the same step number would count as a single update.
        with self._updating:
            if not self._has_taken:
                for weight in self._fused:
                    # Raises an error if torch has attached another optimizer since the module was fused.
                    in_backward_spec(weight)
                self._has_taken = True
            # First, because it may raise: ``parameter.grad`` must then be as before.
            prepared = self._updates.prepare(gradient, deferred=False)
            self._updates.collect(gradient)
            self._updates.apply(prepared, gradient)
            # Collected gradients refer to slots, and need the pins until the step.
            if self.optimizer.updates_in_backward:
                release_pins(gradient.pins)

    def _step(self) -> None:
        """Apply the collected gradients. ``optimizer.step()`` calls this with ``update="on_step"``."""
        with self._updating:
            collected = self._updates.collected()
            self._updates.apply(self._updates.prepare(collected, deferred=True), collected)


def _slots_of(table: HashedTable, names: Sequence[str]) -> dict[str, Tensor]:
    """Return the optimizer state of a hashed table's live rows in key order, by state slot name."""
    tensors = table.tensors()
    return {name: tensors[name] for name in names}
