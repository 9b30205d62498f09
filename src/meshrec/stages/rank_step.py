"""A training step on a rank that runs a stage: the order of splits, the loss, and error handling.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from meshrec.stages.messages import RankExchange, RemoteStageError, messages_of
from meshrec.stages.programs import StageFlow
from meshrec.stages.running import GENERATOR, StageError, StageRun
from meshrec.stages.samples import join
from meshrec.stages.values import Gradients, Inputs

Criterion = Callable[[Any, Any], Tensor]


class Lane:
    """The process groups of a rank in a lane, where a lane is a set of ranks with one copy of all stages.

    All methods are collective over one of the groups.

    Args:
        lane_peers: ranks that run this stage in all lanes; None if there is a single lane.
    """

    def __init__(
        self, stages: dist.ProcessGroup, lane_peers: dist.ProcessGroup | None, all_ranks: dist.ProcessGroup
    ) -> None:
        self.stages, self.lane_peers, self.all_ranks = stages, lane_peers, all_ranks

    def broadcast_seed(self) -> int:
        """Draw a random seed on the first stage, and return it on all ranks in the lane."""
        seed = torch.empty((), dtype=torch.int64).random_()
        dist.broadcast(seed, dist.get_global_rank(self.stages, 0), group=self.stages)
        return int(seed)

    def broadcast_loss(self, loss: Tensor | None) -> Tensor:
        """Send the last stage's loss to all ranks in the lane, and return it on every rank (0-d, float32).

        Args:
            loss: loss for the batch (0-d) on the last stage; None on other stages.
        """
        # The same dtype on all ranks, as a broadcast requires.
        value = torch.zeros(()) if loss is None else loss.detach().float().clone()
        # Only the last stage computes the loss.
        source = dist.get_global_rank(self.stages, self.stages.size() - 1)
        dist.broadcast(value, source, group=self.stages)
        return value

    def raise_together(self, error: str | None, cause: BaseException | None) -> None:
        """Raise StageError on all ranks in all lanes if any rank passes an error; otherwise do nothing.

        All ranks raise the same message: that of the lowest rank on which an exception was raised. Ranks
        which only received an error from another stage do not count.

        Args:
            error: error message, raised here or received from another stage; None without an error.
            cause: the original exception if it was raised on this rank, else None.
        """
        if not any_rank(error is not None, self.all_ranks):
            return
        texts: list[Any] = [None] * self.all_ranks.size()
        # Slow, but only after an error.
        dist.all_gather_object(texts, (error, cause is not None), group=self.all_ranks)
        # Ranks which only received an error from another stage repeat its message, so prefer the original.
        first = next((text for text, is_cause in texts if is_cause), None)
        raise StageError(first or next(text for text, _ in texts if text)) from cause


class SplitLosses:
    """Model outputs and losses of all splits (microbatches) of a batch. The last stage adds them.

    Args:
        targets: target of every split; empty if the batch has no target.
        criterion: function from (model output, target) to the mean loss over the samples in a split. None if
            the model returns the loss.

    Attributes:
        gradients: loss gradients with respect to the values the model returns, by split index and then by
            value name. The backward pass of a split removes the split's gradients.
    """

    def __init__(
        self,
        output: fx.Node,
        inputs: Inputs,
        targets: Sequence[Any],
        criterion: Criterion | None,
        *,
        train: bool,
    ) -> None:
        self._output, self._inputs, self._targets = output, inputs, targets
        self._criterion, self._train = criterion, train
        # Losses and outputs in split order, detached, until the batch ends.
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        self.gradients: dict[int, dict[str, Gradients]] = {}

    def loss(self) -> Tensor | None:
        """Return the mean loss over all samples in the batch (0-d). None on stages other than the last."""
        if not self._losses:
            return None
        sizes = self._inputs.sizes
        return torch.stack(
            # Weighted by samples, because the last split may be smaller.
            [loss * (n / sum(sizes)) for loss, n in zip(self._losses, sizes, strict=True)]
        ).sum()

    def output(self) -> Any:
        """Return the model's output for the whole batch, detached. None on stages other than the last."""
        return join(self._outputs, self._inputs.sizes) if self._outputs else None

    def add(self, k: int, results: dict[tuple[str, int], Any]) -> None:
        """Compute and store the output and the loss of split ``k``, and the loss gradients in ``gradients``.

        The gradients are computed only for training, with respect to the values the model returns.

        Args:
            results: values returned by the model, by (value name, split index). The entries for split ``k``
                are removed.
        """
        # Compute the loss on detached leaves. The backward pass through the model starts later, from
        # ``gradients``.
        computed = {n.name for n in self._output.all_input_nodes if (n.name, k) in results}
        leaves: dict[str, list[Any]] = {}
        values: dict[str, Any] = {}
        for name in computed:
            flat, spec = pytree.tree_flatten(results.pop((name, k)))
            # Values of other splits stay in ``results`` until their split reaches this point.
            leaves[name] = [
                leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                for leaf in flat
            ]
            values[name] = pytree.tree_unflatten(leaves[name], spec)

        def value(node: fx.Node) -> Any:
            """Return a node's value for split ``k``, from the results of stages or from the batch."""
            return values[node.name] if node.name in computed else self._inputs.splits[node.name][k]

        output = fx.node.map_arg(self._output.args[0], value)
        self._outputs.append(
            pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        )
        loss = self._loss_of(output, k)
        if loss is None:
            return
        self._losses.append(loss.detach())
        if self._train:
            # Split losses are means over splits, which may have different sizes.
            share = self._inputs.sizes[k] / sum(self._inputs.sizes)
            targets = [
                e
                for value_leaves in leaves.values()
                for e in value_leaves
                if isinstance(e, Tensor) and e.requires_grad
            ]
            gradients = iter(torch.autograd.grad(loss * share, targets, allow_unused=True))
            self.gradients[k] = {
                # Put the gradients back at the positions of the leaves which require them.
                name: [
                    next(gradients) if isinstance(e, Tensor) and e.requires_grad else None
                    for e in value_leaves
                ]
                for name, value_leaves in leaves.items()
            }

    def _loss_of(self, output: Any, k: int) -> Tensor | None:
        """Return the mean loss over the samples in split ``k`` (0-d).

        In evaluation, the result is None if the criterion has no target, or if the model returns no loss. In
        training, a missing target or loss is an error.
        """
        criterion = self._criterion
        if criterion is not None:
            if not self._targets:
                if not self._train:
                    return None
                raise ValueError("the criterion needs a target: call step(..., target=...).")
            loss: Any = criterion(output, self._targets[k])
        else:
            # The model may return (loss, other outputs).
            loss = output[0] if isinstance(output, tuple) else output
        if not isinstance(loss, Tensor) or loss.dim():
            if not self._train and criterion is None:
                return None
            description = (
                f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
            )
            raise ValueError(f"the loss is {description}; it must be a scalar tensor, the mean over samples.")
        return loss


class RankStep:
    """Execution of all actions of a batch on this rank, in the order of `schedule`.

    Args:
        draws_random: whether the model draws random values. The state of a random generator then travels
            from stage to stage with every split (microbatch).
    """

    def __init__(
        self,
        flow: StageFlow,
        exchange: RankExchange,
        lane: Lane,
        *,
        run: StageRun,
        losses: SplitLosses,
        train: bool,
        draws_random: bool,
    ) -> None:
        # All belong to a single batch, as this object does.
        self._flow, self._exchange, self._lane, self._run, self._losses = flow, exchange, lane, run, losses
        # Without random values, no generator state is sent.
        self._train, self._generator = train, GENERATOR if draws_random else None

    def __call__(self) -> None:
        """Run the batch. Collective over all lanes.

        Raises:
            StageError: a stage failed on some rank. All ranks raise it, and no table has been updated.
        """
        flow, exchange, stage = self._flow, self._exchange, self._flow.stage
        exchange.start()
        cause: BaseException | None = None
        for action, k in schedule(stage.index, flow.last + 1, self._run.num_splits, train=self._train):
            # Listed before the action runs, because after a failure exactly these messages must still be
            # exchanged.
            messages = messages_of(flow, action, k, generator=self._generator)
            if action == "agree":
                # This comes before lanes exchange gradients and before tables are updated. Either all lanes
                # continue, or none.
                group = self._lane.lane_peers if k else None
                if any_rank(exchange.error is not None, group) and exchange.error is None:
                    exchange.error = "another lane failed"
                continue
            if exchange.error is None:
                try:
                    self._run_action(action, k)
                except RemoteStageError as error:
                    exchange.error = str(error)
                except Exception as error:
                    cause, where = error, self._run.where
                    exchange.error = (
                        f"stage {stage.index} ({stage.name}), {where}: {type(error).__name__}: {error}"
                    )
            if exchange.error is not None:
                # Other stages wait for the messages of this action, with or without a failure.
                exchange.exchange_remaining(messages)
        # All messages of the batch must be sent before the buffers are released.
        exchange.finish()
        # Before the tables are updated, so a failed step leaves them unchanged on all ranks.
        self._lane.raise_together(exchange.error, cause)
        if self._train:
            self._run.tables_backward()

    def _run_action(self, action: str, k: int) -> None:
        """Run an action of `schedule` other than "agree": a pass for split ``k``, or a table action."""
        run = self._run
        if action == "tables":
            run.tables()
        elif action == "forward":
            run.forward(k)
            if self._flow.is_last:
                self._losses.add(k, run.values.results)
        elif action == "backward":
            # Only the last stage has gradients of the loss. The others receive theirs from the next stage.
            run.backward(k, self._losses.gradients.pop(k, {}))
        elif action == "collect":
            run.values.collect()


def schedule(index: int, num_stages: int, num_splits: int, *, train: bool) -> list[tuple[str, int]]:
    """Return the actions of a stage for a batch, in 1F1B order (one forward, one backward).

    For the first of two stages and three splits (microbatches)::

        [("tables", 3), ("forward", 0), ("forward", 1), ("backward", 0), ("forward", 2), ("backward", 1),
         ("agree", 1), ("backward", 2), ("collect", 3)]

    Args:
        index: number of the stage.
        num_stages: stage count.
        num_splits: splits per batch.
        train: whether there is a backward pass.

    Returns:
        Pairs (action, k):

        - ("tables", number of splits): look up the tables for the whole batch.
        - ("forward", k) and ("backward", k): run split k.
        - ("agree", 1): all lanes find out whether any lane has failed. The last backward pass follows, in
          which lanes exchange gradients.
        - ("collect", number of splits): receive the gradients for the table lookups.
    """
    if not train:
        return [("tables", num_splits), *(("forward", k) for k in range(num_splits))]
    # Start with as many forward passes as there are later stages. Then alternate, so a backward pass frees
    # a split's memory before the next forward pass.
    num_warmup = min(num_stages - 1 - index, num_splits)
    order = [("forward", k) for k in range(num_warmup)]
    # One forward, one backward: memory holds at most ``num_warmup + 1`` splits.
    for k in range(num_splits - num_warmup):
        order += [("forward", num_warmup + k), ("backward", k)]
    # The splits in flight at the end.
    order += [("backward", k) for k in range(num_splits - num_warmup, num_splits)]
    return [("tables", num_splits), *order[:-1], ("agree", 1), order[-1], ("collect", num_splits)]


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether ``flag`` is true on any rank. Collective over the group; None means only this rank."""
    if group is None:
        return flag
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return bool(tensor)
