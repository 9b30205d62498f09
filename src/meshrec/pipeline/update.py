"""Run a training step's updates in an order which lets the next batch's lookup start early."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim.keyed import CombinedOptimizer
from meshrec.pipeline.in_flight import Collection
from meshrec.pipeline.lookahead import Lookahead
from meshrec.tables.optimizer import FusedOptimizer


class Update:
    """Backward pass and optimizer steps of a batch, in this order:

    1. The backward pass updates fused tables, and starts the dense gradient all-reduce.
    2. Tables with ``update="on_step"`` step, if ``optimizer`` is a plain CombinedOptimizer.
    3. The next batch's rows are looked up and sent.
    4. The dense gradient all-reduce completes, and all other optimizers step.
    5. Tables updated in step 4 are looked up: tables without a fused optimizer, and clipped tables.

    Args:
        model: the model.
        optimizer: optimizer for dense parameters and tables.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model, self._optimizer = model, optimizer
        # Fused table optimizers, whose steps come first, and all other optimizers.
        self._tables, self._others = _split_optimizers(optimizer)
        # Fixed for the lifetime of this object. Without it, dense gradients are reduced inside the backward
        # pass.
        self._parallel = next((m for m in model.modules() if isinstance(m, DistributedModelParallel)), None)

    @contextmanager
    def backward(self, *, steps: bool, defer_reduction: bool = True) -> Iterator[None]:
        """Context for the forward and backward pass of a batch.

        Args:
            steps: whether the optimizer steps after this batch. If not, this batch's dense gradients are not
                reduced over ranks yet.
            defer_reduction: True: if the model supports it, the backward pass only starts the reduction of
                dense gradients over ranks, and ``after_backward`` waits for it. False: the backward pass
                waits.
        """
        with ExitStack() as stack:
            if not steps:
                for module in self._model.modules():
                    if isinstance(module, nn.parallel.DistributedDataParallel):
                        stack.enter_context(module.no_sync())
            elif (
                defer_reduction
                and self._parallel is not None
                and self._parallel.dense_gradient_averager is not None
            ):
                stack.enter_context(self._parallel.dense_gradient_averager.deferred())
            yield

    def after_backward(self, lookahead: Lookahead, *, steps: bool) -> None:
        """Step all optimizers, and look up rows for the next batch as soon as the tables are updated.

        Args:
            lookahead: the batches after the current batch.
            steps: whether the optimizers step. If not, gradients accumulate.
        """
        if not steps:
            lookahead.look_up(self.is_stepped)
            return
        tables = self._tables
        for optimizer in tables:
            optimizer.step()
        # Tables updated by the backward pass or just now. Tables with ordinary gradients follow below.
        lookahead.look_up(
            lambda module: (
                not module.has_ordinary_gradients
                and (module.tables.collected is None or module.fused_optimizer in tables)
            )
        )
        if self._parallel is not None and self._parallel.dense_gradient_averager is not None:
            # After the lookup, so the next batch's embeddings travel while dense gradients are reduced.
            self._parallel.dense_gradient_averager.finish()
        for other in self._others:
            other.step()
        lookahead.look_up(self.is_stepped)

    def is_stepped(self, module: Collection) -> bool:
        """Return whether a module's rows may be looked up now for the next forward pass.

        True if all tables have fused optimizers: these tables count their updates, so after a later update
        the rows are looked up again. Also true if the pipeline's optimizer has all table parameters.
        Otherwise False, because another optimizer may still change the rows unnoticed.
        """
        if not module.has_ordinary_gradients:
            return True  # the tables count their updates
        stepped = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        # A parameter without elements has no rows on this rank which could change.
        return all(id(parameter) in stepped or parameter.numel() == 0 for parameter in module.parameters())


def _split_optimizers(
    optimizer: torch.optim.Optimizer,
) -> tuple[list[FusedOptimizer], list[torch.optim.Optimizer]]:
    """Split a CombinedOptimizer, which may contain others, into fused table optimizers and all other
    optimizers.

    Any other optimizer is returned whole, in the second list.
    """
    # Subclasses and wrappers may clip over all parameters, so they step as a whole.
    if type(optimizer) is not CombinedOptimizer:
        return [], [optimizer]
    tables: list[FusedOptimizer] = []
    other_optimizers: list[torch.optim.Optimizer] = []
    for _, member in optimizer.optimizers:
        if isinstance(member, FusedOptimizer):
            tables.append(member)
        else:
            nested_tables, nested_optimizers = _split_optimizers(member)
            tables += nested_tables
            other_optimizers += nested_optimizers
    return tables, other_optimizers
