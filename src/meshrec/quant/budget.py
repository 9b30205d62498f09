"""Selection of a data type per table that saves bytes, with a bounded loss increase on validation data.

The *rise* is the relative log loss increase, and the *budget* is the greatest rise allowed. The same
samples are scored with the original and the quantized model. A sample's loss change has a much lower
variance than the loss itself, so a few thousand samples reveal rises below 0.1 %. (Normalized entropy is log
loss divided by a constant of the data, so it rises by the same fraction.)

1. Measure every table alone, quantized to 4 bits, and then to 2 bits, or to 8 bits if 4 bits alone exceed the
   budget.
2. Predict the rise with several quantized tables from their summed per-sample changes. Repeatedly make the
   type change that saves the most bytes per rise, while the prediction stays within the budget.
3. Measure all selected types together. While the rise exceeds the budget, give the table with the largest
   predicted rise the next larger type, and measure again.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.modules import DataType
from meshrec.modules.embedding_modules import TableCollection
from meshrec.modules.table_lookup import storage_for
from meshrec.optim.table_names import full_names
from meshrec.quant.collections import rows_by_table
from meshrec.quant.precision import Rounding
from meshrec.quant.quantize import quantize

# Shape legend: N samples.

INT8, INT4, INT2, FP16, FP32 = DataType.INT8, DataType.INT4, DataType.INT2, DataType.FP16, DataType.FP32

_QUANTILE = 1.6448536269514722
"""95 % quantile of the standard normal distribution, for one-sided confidence bounds."""
_STEPS = 17
"""How many times larger the quantization step is with 4 bits than with 8 bits: 255 / 15."""


class Rise(NamedTuple):
    """Relative log loss increase of a quantized model over the original model; 0.001 is 0.1 %."""

    mean: float
    """Mean over the validation samples."""
    bound: float
    """Upper bound with 95 % confidence."""


class Choice(NamedTuple):
    """Result of ``choose_precision``. Table names are unique in the model; see ``optim.table_names``.

    Attributes:
        types: selected data type by table name.
        num_bytes: bytes that all rows of a table take, by table name and data type.
        rises: rise if only this table is quantized, by table name and data type. Every table has two measured
            types: INT4, and either INT2 or INT8.
        rise: measured rise with all selected types together; 0 if all tables stay in FP32.
        budget: greatest rise allowed.
        num_evaluations: how many times ``losses`` was called.
    """

    types: dict[str, DataType]
    num_bytes: dict[str, dict[DataType, int]]
    rises: dict[str, dict[DataType, Rise]]
    rise: Rise
    budget: float
    num_evaluations: int


def choose_precision(
    model: nn.Module,
    losses: Callable[[nn.Module], Tensor],
    *,
    max_loss: float,
    rounding: Rounding = "search",
) -> Choice:
    """Select a data type per table that saves bytes while the loss increase stays within a budget.

    Calls ``losses`` at most three times per table, plus three times. The module docstring describes the
    search.

    Args:
        model: unsharded, unquantized model. It is not changed.
        losses: returns a model's log loss per validation sample, [N], always in the same order.
        max_loss: greatest relative log loss increase; 0.0002 is 0.02 %.
        rounding: see ``quantize``.

    Raises:
        ValueError: a budget outside (0, 1), fewer than two samples, or a mean loss that is not above 0 and
            finite.
    """
    if not 0 < max_loss < 1:
        raise ValueError(
            f"max_loss is {max_loss}; it must be a fraction between 0 and 1, such as 0.0002 for 0.02 %."
        )
    search = _Search(model, losses, max_loss, rounding)
    return search.run()


class _Search:
    """The state of a search by ``choose_precision``. The arguments are documented there.

    A "change" in this class is a tensor with the loss change per validation sample, fp64 [N].
    """

    def __init__(
        self, model: nn.Module, losses: Callable[[nn.Module], Tensor], budget: float, rounding: Rounding
    ) -> None:
        self._model, self._losses, self._budget, self._rounding = model, losses, budget, rounding
        # Tables get unique names, because several modules may have a table with the same name.
        collections = {path: m for path, m in model.named_modules() if isinstance(m, TableCollection)}
        names_by_path = {
            path: [config.name for config, _ in m.tables().values()] for path, m in collections.items()
        }
        names = full_names(names_by_path)
        tables = [
            (names[path, config.name], config, num_rows[config.name])
            for path, module in collections.items()
            for num_rows in [rows_by_table(module)]
            for config, _ in module.tables().values()
        ]
        # Also fp16 and fp32, from which the search may start.
        self._num_bytes = {
            name: {
                data_type: storage_for(data_type).num_bytes(num_rows, config.embedding_dim)
                for data_type in (FP32, FP16, INT8, INT4, INT2)
            }
            for name, config, num_rows in tables
        }
        # Counts the evaluation of the original model, too.
        self._num_evaluations = 1
        # The original model's losses, fp64 [N]. Every candidate is compared with them, sample by sample.
        # fp64, because changes are small differences of losses.
        self._before = losses(model).double()
        if self._before.numel() < 2:
            raise ValueError("there are fewer than two validation samples. Give the run validation data.")
        if not 0 < (mean := float(self._before.mean())) < math.inf:
            raise ValueError(
                f"the model's mean log loss is {mean}; a relative budget needs a loss above 0. Check the "
                "model and the validation data."
            )

    def run(self) -> Choice:
        """Run the search; see the module docstring."""
        # Start from fp16 in all tables if this is within the budget, otherwise from fp32.
        fp16_changes = self._measure(dict.fromkeys(self._num_bytes, FP16))
        first = FP16 if self._relative_rise(fp16_changes).bound <= self._budget else FP32
        changes = {name: self._loss_changes(name) for name in self._num_bytes}
        rises = {
            name: {data_type: self._relative_rise(c) for data_type, c in table_changes.items()}
            for name, table_changes in changes.items()
        }
        for table_changes in changes.values():
            if INT8 not in table_changes:
                # Estimate the change with 8 bits, to save an evaluation: the error is proportional to the
                # quantization step.
                table_changes[INT8] = table_changes[INT4] / _STEPS
            # The start counts as no change. With fp16, ``common`` has the change by all tables together.
            table_changes[first] = torch.zeros(())
        common = fp16_changes if first is FP16 else torch.zeros_like(fp16_changes)
        types = dict.fromkeys(self._num_bytes, first)
        self._shrink(types, changes, common)
        rise = Rise(0.0, 0.0)
        # The sum of per-table changes is only a prediction, because tables interact. Measure, and move a
        # single table back by a step per round.
        # Usually ends by ``break``. The limit bounds the number of evaluations; without a result by then, no
        # table is quantized.
        for _ in range(len(types) + 1):
            if all(data_type is FP32 for data_type in types.values()):
                rise = Rise(0.0, 0.0)
                break
            rise = self._relative_rise(self._measure(types))
            if rise.bound <= self._budget:
                break
            # No quantized table is left, so fp16 itself exceeds the budget.
            if not self._step_back(types, changes):
                types = dict.fromkeys(types, FP32)
        else:
            types, rise = dict.fromkeys(types, FP32), Rise(0.0, 0.0)
        return Choice(types, self._num_bytes, rises, rise, self._budget, self._num_evaluations)

    def _loss_changes(self, name: str) -> dict[DataType, Tensor]:
        """Measure the per-sample loss changes if only this table is quantized, for two data types.

        The first type is INT4. The second type is INT2 if the rise with INT4 is within the budget, and
        otherwise INT8.

        Returns:
            Loss change per sample, fp64 [N], by data type.
        """
        other_types = dict.fromkeys(self._num_bytes, FP32)
        changes = {INT4: self._measure({**other_types, name: INT4})}
        more = INT2 if self._relative_rise(changes[INT4]).bound <= self._budget else INT8
        changes[more] = self._measure({**other_types, name: more})
        return changes

    def _shrink(
        self, types: dict[str, DataType], changes: Mapping[str, Mapping[DataType, Tensor]], total: Tensor
    ) -> None:
        """Give tables smaller data types, as long as the predicted rise stays within the budget.

        The upper confidence bound of the rise is compared with the budget, not the mean.

        Args:
            changes: per-sample loss change by table name and data type, with only that table quantized.
            total: predicted per-sample loss change with the present ``types`` together.
        """
        while True:
            rise = self._relative_rise(total).bound
            best: tuple[float, str, DataType, Tensor] | None = None
            for name, now in types.items():
                for data_type, change in changes[name].items():
                    saved = self._num_bytes[name][now] - self._num_bytes[name][data_type]
                    if saved <= 0:
                        continue
                    # Sum the per-sample changes before taking the bound, because the noise of different
                    # tables partly cancels.
                    after = total - changes[name][now] + change
                    bound = self._relative_rise(after).bound
                    # Noise can make a change look free or even helpful. The lower limit of the rise keeps
                    # such a change from winning if it does not save much.
                    value = saved / max(bound - rise, 1e-3 * self._budget)
                    if bound <= self._budget and (best is None or value > best[0]):
                        best = (value, name, data_type, after)
            if best is None:
                return
            _, name, types[name], total = best

    def _step_back(
        self, types: dict[str, DataType], changes: Mapping[str, Mapping[DataType, Tensor]]
    ) -> bool:
        """Give the quantized table with the largest predicted rise the next larger data type.

        Returns:
            True if a table got a larger type. False if no table is quantized; then ``types`` is unchanged.
        """
        small = [name for name, candidate in types.items() if candidate.bits]
        if not small:
            return False
        name = max(small, key=lambda candidate: float(changes[candidate][types[candidate]].mean()))
        # Never empty: the data type from which the search started is among the changes.
        larger = [
            candidate
            for candidate in changes[name]
            if self._num_bytes[name][candidate] > self._num_bytes[name][types[name]]
        ]
        types[name] = min(larger, key=lambda candidate: self._num_bytes[name][candidate])
        return True

    def _measure(self, types: dict[str, DataType]) -> Tensor:
        """Evaluate the model with these data types, and return the loss change per sample, fp64 [N]."""
        self._num_evaluations += 1
        quantised = quantize(self._model, FP32, per_table=types, output_dtype=FP32, rounding=self._rounding)
        return self._losses(quantised).double() - self._before

    def _relative_rise(self, change: Tensor) -> Rise:
        """Return the relative loss increase (mean and upper bound), given the loss change per sample."""
        mean = float(change.mean())
        # Standard error of the mean of paired differences: the spread of the loss itself cancels.
        error = float(change.std()) / math.sqrt(change.numel())
        loss = float(self._before.mean())
        return Rise(mean / loss, (mean + _QUANTILE * error) / loss)
