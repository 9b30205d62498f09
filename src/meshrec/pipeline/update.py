"""The end of a training step, in the order that lets the next lookup start early."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from meshrec.comms.dense_gradients import DenseGradients
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim.keyed import CombinedOptimizer
from meshrec.pipeline.in_flight import Collection
from meshrec.pipeline.lookahead import Lookahead
from meshrec.tables.optimizer import FusedOptimizer


class Update:
    """What ``loss.backward()`` and ``optimizer.step()`` change, step by step:

    1. the backward pass updates fused tables; dense gradients start to travel;
    2. tables with ``update="on_step"`` step, where ``optimizer`` is a bare CombinedOptimizer;
    3. the next batch's rows are looked up, and start to travel;
    4. dense gradients arrive, and the rest of the optimizer steps;
    5. what was not ready before is looked up: tables without a fused optimizer, and those that are clipped.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer

    @contextmanager
    def backward(self, *, steps: bool, late: bool = True) -> Iterator[None]:
        """Around forward and backward.

        Args:
            steps: whether ``optimizer`` steps after it; otherwise dense gradients stay on their rank.
            late: whether ``after_backward`` follows, which waits for them; else they are averaged here.
        """
        with ExitStack() as stack:
            if not steps:
                for module in self._model.modules():
                    if isinstance(module, nn.parallel.DistributedDataParallel):
                        stack.enter_context(module.no_sync())
            elif late and (gradients := self._late_gradients()) is not None:
                stack.enter_context(gradients.late())
            yield

    def after_backward(self, ahead: Lookahead, *, steps: bool) -> None:
        """Steps, if that is due, and lets the next lookups start as soon as their tables are updated."""
        if not steps:
            ahead.look_up(self.is_stepped)
            return
        tables, rest = _parts(self._optimizer)
        for each in tables:
            each.step()
        ahead.look_up(
            lambda module: (
                not module.has_ordinary_gradients
                and (module.tables.collected is None or module.fused_optimizer in tables)
            )
        )
        if (gradients := self._late_gradients()) is not None:
            gradients.finish()
        for optimizer in rest:
            optimizer.step()
        ahead.look_up(self.is_stepped)

    def is_stepped(self, module: Collection) -> bool:
        """Whether nobody but this optimizer, and the backward pass, updates the module's tables."""
        if not module.has_ordinary_gradients:
            return True  # the tables themselves count their updates
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        return all(id(parameter) in own or parameter.numel() == 0 for parameter in module.parameters())

    def _late_gradients(self) -> DenseGradients | None:
        for module in self._model.modules():
            if isinstance(module, DistributedModelParallel):
                return module.late_gradients
        return None


def _parts(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[FusedOptimizer], list[torch.optim.Optimizer]]:
    """The optimizers of tables, and the others: in whatever order they step, they do the same."""
    if type(optimizer) is not CombinedOptimizer:
        return [], [optimizer]
    tables: list[FusedOptimizer] = []
    rest: list[torch.optim.Optimizer] = []
    for _, each in optimizer.optimizers:
        if isinstance(each, FusedOptimizer):
            tables.append(each)
        else:
            of_tables, others = _parts(each)
            tables += of_tables
            rest += others
    return tables, rest
