"""A precision for every table, such that the loss on validation data rises by no more than a budget.

The same samples are scored before and after. The rise of a sample's log loss has a much smaller variance than
the loss itself, so a few thousand samples reveal rises of parts of a per mille. Normalized entropy is log
loss over a constant of the data, so both rise by the same fraction.

Each table is quantised alone to 4 bits, and then to 2 bits, or to 8 if 4 bits alone exceed the budget. The
rise of several tables is predicted as the sum of their rises, sample by sample. With this sum, tables are
made smaller, those that save most bytes per rise first. Then all choices are measured together. As long as
their rise exceeds the budget, the table with the largest predicted rise goes back by one step.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.modules import DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_for
from meshrec.quant.collections import rows_by_table
from meshrec.quant.precision import Rounding
from meshrec.quant.quantize import quantize

# N samples

INT8, INT4, INT2, FP16, FP32 = DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32

_QUANTILE = 1.6448536269514722
"""The 95 % quantile of the normal distribution."""
_STEPS = 17
"""Ratio of the steps between codes, 4 bits to 8 bits."""


class Rise(NamedTuple):
    """The rise of the loss as a fraction: its mean, and an upper bound with a confidence of 95 %."""

    mean: float
    bound: float


class Choice(NamedTuple):
    """The result of ``choose_precision``."""

    types: dict[str, DataType]
    """The chosen type of each table."""
    num_bytes: dict[str, dict[DataType, int]]
    """The bytes of each table in each type."""
    rises: dict[str, dict[DataType, Rise]]
    """The rise by each table alone, for the types that were measured."""
    rise: Rise
    """The measured rise of the loss when all tables have their chosen types."""
    budget: float
    num_evaluations: int


def choose_precision(
    model: nn.Module,
    losses: Callable[[nn.Module], Tensor],
    *,
    max_loss: float,
    rounding: Rounding = "search",
) -> Choice:
    """Choose data types with few bytes whose measured rise stays below the budget.

    It takes at most three evaluations per table, and two more.

    Args:
        model: the unsharded model, not quantised.
        losses: returns the log loss of every validation sample [N] for a model, always in the same order.
        max_loss: the fraction by which the loss may rise: 0.0002 is 0.02 %.
        rounding: see ``quantize``.

    Raises:
        ValueError: the budget is not between 0 and 1, or there are fewer than two samples.
    """
    if not 0 < max_loss < 1:
        raise ValueError(
            f"max_loss is {max_loss}; it must be a fraction between 0 and 1, such as 0.0002 for 0.02 %."
        )
    search = _Search(model, losses, max_loss, rounding)
    return search.run()


class _Search:
    def __init__(
        self, model: nn.Module, losses: Callable[[nn.Module], Tensor], budget: float, rounding: Rounding
    ) -> None:
        self._model, self._losses, self._budget, self._rounding = model, losses, budget, rounding
        tables = [
            (config, num_rows[config.name])
            for module in model.modules()
            if isinstance(module, TableCollection)
            for num_rows in [rows_by_table(module)]
            for config, _ in module.tables().values()
        ]
        self._num_bytes = {
            config.name: {
                each: storage_for(each).num_bytes(num_rows, config.embedding_dim)
                for each in (FP32, FP16, INT8, INT4, INT2)
            }
            for config, num_rows in tables
        }
        self._num_evaluations = 1
        self._before = losses(model).double()
        if self._before.numel() < 2:
            raise ValueError("there are fewer than two validation samples. Give the run validation data.")

    def run(self) -> Choice:
        halves = self._measured(dict.fromkeys(self._num_bytes, FP16))
        # If 16 bits exceed the budget already, tables stay fp32 unless they are quantised.
        first = FP16 if self._rise(halves).bound <= self._budget else FP32
        changes = {name: self._alone(name) for name in self._num_bytes}
        rises = {name: {each: self._rise(c) for each, c in own.items()} for name, own in changes.items()}
        for own in changes.values():
            if INT8 not in own:
                own[INT8] = own[INT4] / _STEPS
            own[first] = torch.zeros(())
        common = halves if first is FP16 else torch.zeros_like(halves)
        types = dict.fromkeys(self._num_bytes, first)
        self._shrink(types, changes, common)
        rise = Rise(0.0, 0.0)
        for _ in range(len(types) + 1):
            if all(each is FP32 for each in types.values()):
                rise = Rise(0.0, 0.0)
                break
            rise = self._rise(self._measured(types))
            if rise.bound <= self._budget:
                break
            if not self._back(types, changes):
                types = dict.fromkeys(types, FP32)
        else:
            types, rise = dict.fromkeys(types, FP32), Rise(0.0, 0.0)
        return Choice(types, self._num_bytes, rises, rise, self._budget, self._num_evaluations)

    def _alone(self, name: str) -> dict[DataType, Tensor]:
        """Measure the change of the samples' losses for two precisions of one table."""
        others = dict.fromkeys(self._num_bytes, FP32)
        found = {INT4: self._measured({**others, name: INT4})}
        more = INT2 if self._rise(found[INT4]).bound <= self._budget else INT8
        found[more] = self._measured({**others, name: more})
        return found

    def _shrink(
        self, types: dict[str, DataType], changes: Mapping[str, Mapping[DataType, Tensor]], total: Tensor
    ) -> None:
        """Make tables smaller as long as the sum of changes stays within the budget."""
        while True:
            rise = self._rise(total).bound
            best: tuple[float, str, DataType, Tensor] | None = None
            for name, now in types.items():
                for each, change in changes[name].items():
                    saved = self._num_bytes[name][now] - self._num_bytes[name][each]
                    if saved <= 0:
                        continue
                    after = total - changes[name][now] + change
                    bound = self._rise(after).bound
                    value = saved / max(bound - rise, 1e-3 * self._budget)
                    if bound <= self._budget and (best is None or value > best[0]):
                        best = (value, name, each, after)
            if best is None:
                return
            _, name, types[name], total = best

    def _back(self, types: dict[str, DataType], changes: Mapping[str, Mapping[DataType, Tensor]]) -> bool:
        """Give the table with the largest rise its next larger type; return False if no table is
        quantised.
        """
        small = [name for name, each in types.items() if each.bits]
        if not small:
            return False
        name = max(small, key=lambda each: float(changes[each][types[each]].mean()))
        larger = [
            each for each in changes[name] if self._num_bytes[name][each] > self._num_bytes[name][types[name]]
        ]
        types[name] = min(larger, key=lambda each: self._num_bytes[name][each])
        return True

    def _measured(self, types: dict[str, DataType]) -> Tensor:
        """Measure the change of each sample's loss."""
        self._num_evaluations += 1
        made = quantize(self._model, FP32, per_table=types, output_dtype=FP32, rounding=self._rounding)
        return self._losses(made).double() - self._before

    def _rise(self, change: Tensor) -> Rise:
        mean = float(change.mean())
        error = float(change.std()) / math.sqrt(change.numel())
        loss = float(self._before.mean())
        return Rise(mean / loss, (mean + _QUANTILE * error) / loss)
