"""The update rule of tables: an optimizer's current hyperparameters, and the number of its updates."""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from meshrec.optim.optimizers import DEFAULT_SEED, HyperOfSteps, OptimizerSpec


class UpdateRule:
    """One spec, for all tables that share it: they are updated in one kernel call.

    Each step reads the rule at a moment when rows have displaced everything else from the processor's caches.
    So whatever can be computed ahead of the step is.

    Args:
        deferred: whether the optimizer's step makes the updates, and not the backward pass.
        seed: of the stochastic rounding of fp16 and bf16 tables; 0 rounds to nearest.
    """

    def __init__(self, spec: OptimizerSpec, *, deferred: bool = False, seed: int = DEFAULT_SEED) -> None:
        self.spec = spec
        """The spec, with the hyperparameters of the last update."""
        self.deferred, self.seed = deferred, seed
        self.slot_names = [slot.name for slot in spec.state_slots()]
        numbers = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
        self.group: dict[str, Any] = {"params": [], **numbers}
        """torch's param_group: the tables' parameters, and the current hyperparameters."""
        self._read = operator.itemgetter(*numbers)
        self._numbers = tuple(numbers.values())
        self._hyper = HyperOfSteps(spec, seed)

    @property
    def code(self) -> int:
        """The kernels' code of the formula."""
        return self.spec.code

    @property
    def name(self) -> str:
        """The optimizer's name for users."""
        return type(self.spec).__name__

    def refresh(self) -> None:
        """Take over the hyperparameters that the param_group holds now.

        Raises:
            ValueError: where one is out of its range now.
        """
        now = self._read(self.group)
        if now != self._numbers:
            numbers: list[Any] = [number.item() if isinstance(number, Tensor) else number for number in now]
            names = [field.name for field in dataclasses.fields(self.spec)]
            self.spec = dataclasses.replace(self.spec, **dict(zip(names, numbers, strict=True)))
            self._hyper = HyperOfSteps(self.spec, self.seed)
            self._numbers = tuple(numbers)

    def hyper_at(self, step: int) -> Tensor:
        """Return the hyperparameters of update ``step`` as of the last ``refresh``. The next call replaces
        them.
        """
        return self._hyper.at(step)

    def hyper(self, step: int, row_dim: int) -> Tensor:
        """Return the hyperparameters of update ``step``, as of the last ``refresh``, in a new tensor.

        ``row_dim``: see ``OptimizerSpec.hyper``.
        """
        return self.spec.hyper(lr=self.spec.lr, step=step, seed=self.seed, row_dim=row_dim)


def distinct(rules: Sequence[UpdateRule | None]) -> list[UpdateRule]:
    """Return each rule once, in the order of tables."""
    return list({id(rule): rule for rule in rules if rule is not None}.values())


def rules_of(
    specs: Sequence[OptimizerSpec | None], *, deferred: bool = False, seed: int = DEFAULT_SEED
) -> list[UpdateRule | None]:
    """Return the rule of each table. Tables with equal specs share a rule, and are updated together."""
    rules: dict[OptimizerSpec, UpdateRule] = {}
    return [
        None if spec is None else rules.setdefault(spec, UpdateRule(spec, deferred=deferred, seed=seed))
        for spec in specs
    ]
