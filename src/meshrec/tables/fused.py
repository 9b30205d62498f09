"""The optimizer inside the backward pass, for whole tables."""

import operator
from collections.abc import Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from meshrec.ops import tbe
from meshrec.ops.versions import changed_message, versions_of
from meshrec.optim.in_backward import in_backward_spec, mark_in_backward
from meshrec.optim.keyed import Closure, KeyedOptimizer, evaluated
from meshrec.optim.optimizers import DEFAULT_SEED, OptimizerSpec, check_seed
from meshrec.tables.holdings import Holdings
from meshrec.tables.locking import UpdateLock
from meshrec.tables.packing import Packing, Rectangle, RowGradients
from meshrec.tables.row_updates import rows_as_lookups
from meshrec.tables.rule import UpdateRule, distinct, rules_of
from meshrec.tables.storage import RowStorage

# T tables, U touched rows, D width

UpdateMode = Literal["in_backward", "on_step"]


class TrainedTable(NamedTuple):
    """A table and how it is trained."""

    name: str
    """The parameter's name."""
    weight: nn.Parameter
    spec: OptimizerSpec | None
    """None: ordinary gradients."""
    storage: RowStorage


class TableUpdater(tbe.Updater):
    """What a collection needs to know of its fused optimizer."""

    plain_tables: list[int]
    """The tables it leaves to ordinary gradients."""


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
        self, tables: list[TrainedTable], *, update: UpdateMode = "in_backward", seed: int = DEFAULT_SEED
    ) -> None:
        if update not in ("in_backward", "on_step"):
            raise ValueError(f"update must be 'in_backward' or 'on_step', got {update!r}.")
        check_seed(seed)
        self._tables = tables
        self._update: UpdateMode = update
        self._has_taken = False
        self.seed = seed
        self.plain_tables = [index for index, table in enumerate(tables) if table.spec is None]
        self._weights = [table.weight for table in tables]
        self._num_updates = [0] * len(tables)
        self._updating, self._counting = UpdateLock(), UpdateLock()
        rules = rules_of([table.spec for table in tables], deferred=update == "on_step", seed=seed)
        self._rules = distinct(rules)
        self._members = {
            rule: [index for index, other in enumerate(rules) if other is rule] for rule in self._rules
        }
        packings, slots = [], []
        for index, (_, weight, spec, storage) in enumerate(tables):
            num_rows, dim = weight.shape
            packings.append(Packing([Rectangle(index, 0, num_rows, 0, dim)], storage))
            slots.append(storage.new_state(spec, num_rows, dim, weight.device))
        self._held = Holdings(self._weights, packings, slots)
        # By table: a step looks for them in no dict of tensors, whose hashes are made in Python.
        self._slots: list[dict[str, Any]] = []
        for table, rule, own in zip(tables, rules, slots, strict=True):
            if rule is None or table.spec is None:
                self._slots.append({})
                continue
            self._slots.append({"step": 0, **dict(zip(rule.slot_names, own, strict=True))})
            rule.group["params"].append(table.weight)
            rule.states.append(self._slots[-1])
            mark_in_backward(table.weight, table.spec)
        trained: dict[str, Tensor] = {table.name: table.weight for table in tables if table.spec is not None}
        state: dict[Tensor, dict[str, Any]] = {
            weight: own for weight, own in zip(self._weights, self._slots, strict=True) if own
        }
        super().__init__(trained, state, [rule.group for rule in self._rules])
        self.defaults = {}

    @property
    def updates_in_backward(self) -> bool:
        """Whether the backward pass updates the tables (``update="in_backward"``)."""
        return self._update == "in_backward"

    def foreign_writes(self, weights: Sequence[Tensor]) -> list[int]:
        """Return how often somebody other than this optimizer has written to each table.

        Raises:
            ValueError: a parameter of the module was replaced, so that it would not be trained.
        """
        if not all(map(operator.is_, weights, self._weights)):
            replaced = next(t for t, weight in enumerate(weights) if weight is not self._weights[t])
            raise ValueError(
                f"the parameter {self._tables[replaced].name!r} was replaced by another one after the module "
                "was fused; its optimizer would go on to train the old one. Copy the new values into the "
                "parameter that is there (parameter.data.copy_(values), load_state_dict without assign=True)."
            )
        with self._counting:
            return list(map(operator.sub, versions_of(self._weights), self._num_updates))

    def check_tables(self, before: list[int]) -> None:
        """Raise ValueError if ``foreign_writes`` has changed since it gave ``before``."""
        now = self.foreign_writes(self._weights)
        if now != before:
            changed = next(t for t, (own, old) in enumerate(zip(now, before, strict=True)) if own != old)
            raise ValueError(changed_message(f"the table {self._tables[changed].name!r}"))

    def take(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        """Uses the gradient of a lookup: updates the tables, or keeps sparse gradients for ``step``.

        Tables that do not require a gradient (now, not when they were fused) are left alone.
        """
        with self._updating:
            self._take(grad, lookups)

    def _take(self, grad: Tensor, lookups: tbe.Lookups) -> None:
        if not self._has_taken:
            for weight in self.params.values():
                in_backward_spec(weight)  # torch may have attached another one since
            self._has_taken = True
        weights = self._weights
        trained = [[t for t in self._members[rule] if weights[t].requires_grad] for rule in self._rules]
        # All read before any is used: a number out of its range must not leave half of the tables updated.
        for rule in self._rules:
            rule.refresh()
        for rule, tables in zip(self._rules, trained, strict=True):
            if rule.deferred:
                self._collect(tables, grad, lookups)
            else:
                self._apply(rule, tables, grad, lookups)

    @torch.no_grad()
    def step(self, closure: Closure = None) -> float | None:  # type: ignore[override]
        """Applies the collected gradients (``update="on_step"``); otherwise does nothing."""
        loss = evaluated(closure)
        if self._update == "on_step":
            with self._updating:
                self._step()
        return loss

    def _step(self) -> None:
        for rule in self._rules:
            rule.refresh()
        trained = [index for index, table in enumerate(self._tables) if table.spec is not None]
        collected = self._held.collected({index: repr(self._tables[index].name) for index in trained})
        for rule in self._rules:
            self._apply_collected(rule, collected)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not possible: tables join by ``meshrec.fuse``.

        Raises:
            ValueError: always.
        """
        raise ValueError("a fused optimizer takes no parameters afterwards. Fuse the module that holds them.")

    def create_state(self, names: Collection[str], sparse_names: Collection[str] = ()) -> None:
        """Nothing to do: the state is there from the beginning."""

    def _apply(self, rule: UpdateRule, tables: list[int], grad: Tensor, lookups: tbe.Lookups) -> None:
        """One step of some of the rule's tables."""
        by_step: dict[int, list[int]] = {}
        for table in tables:
            by_step.setdefault(self._slots[table]["step"] + 1, []).append(table)
        for step, members in by_step.items():
            weights = [self._weights[table] for table in members]
            members_slots = [self._slots[table] for table in members]
            state = [slots[name] for name in rule.slot_names for slots in members_slots]
            chosen = lookups if len(members) == len(self._weights) else lookups.of_tables(members)
            tbe.update(grad, *chosen, weights, state, rule.code, rule.hyper_at(step), None, [])
            with self._counting:
                increment_version(weights)
                for table in members:
                    self._num_updates[table] += 1
            for slots in members_slots:
                slots["step"] = step

    def _collect(self, tables: list[int], grad: Tensor, lookups: tbe.Lookups) -> None:
        num_rows = [self._weights[table].shape[0] for table in tables]
        gradients = tbe.sparse_grad(grad, lookups.of_tables(tables), num_rows)
        self._held.collect({t: RowGradients(*each) for t, each in zip(tables, gradients, strict=True)})

    def _apply_collected(self, rule: UpdateRule, collected: dict[int, RowGradients]) -> None:
        tables = [table for table in self._members[rule] if table in collected]
        if tables:
            rows, grads = zip(*(collected[table] for table in tables), strict=True)
            lookups = rows_as_lookups(rows, [grad.shape[1] for grad in grads], tables)
            self._apply(rule, tables, torch.cat([grad.reshape(-1) for grad in grads]), lookups)
