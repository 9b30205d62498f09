"""One batch of a lane on one rank: the schedule of its splits, the loss, and failures."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from meshrec.pipeline.stages.messages import ElsewhereError, RankExchange, messages_of
from meshrec.pipeline.stages.programs import StageFlow
from meshrec.pipeline.stages.running import GENERATOR, StageError, StageRun
from meshrec.pipeline.stages.samples import join
from meshrec.pipeline.stages.values import Gradients, Inputs

Criterion = Callable[[Any, Any], Tensor]


class Lane:
    """The process groups of a rank: its lane, the ranks with the same stage in other lanes, and all ranks.

    All methods are collective.
    """

    def __init__(
        self, stages: dist.ProcessGroup, others: dist.ProcessGroup | None, everyone: dist.ProcessGroup
    ) -> None:
        self.stages, self.others, self.everyone = stages, others, everyone

    def shared_seed(self) -> int:
        """Draw one seed for all stages of the lane."""
        seed = torch.empty((), dtype=torch.int64).random_()
        dist.broadcast(seed, dist.get_global_rank(self.stages, 0), group=self.stages)
        return int(seed)

    def shared_loss(self, loss: Tensor | None) -> Tensor:
        """Return the loss of the last stage on all stages of the lane."""
        value = torch.zeros(()) if loss is None else loss.detach().float().clone()
        source = dist.get_global_rank(self.stages, self.stages.size() - 1)
        dist.broadcast(value, source, group=self.stages)
        return value

    def raise_together(self, error: str | None, cause: BaseException | None) -> None:
        """Raise StageError on all ranks if one has an ``error``; ``cause``: of the rank where it began."""
        if not any_of(error is not None, self.everyone):
            return
        texts: list[Any] = [None] * self.everyone.size()
        dist.all_gather_object(texts, (error, cause is not None), group=self.everyone)
        first = next((text for text, is_cause in texts if is_cause), None)
        raise StageError(first or next(text for text, _ in texts if text)) from cause


class SplitLosses:
    """The outputs of the model and the losses of the splits, on the last stage.

    Args:
        output: the node that the model returns.
        inputs: the batch.
        targets: the target of each split; empty if there is none.
        criterion: see `StagedOverRanks`.
        train: whether to compute gradients.

    Attributes:
        gradients: gradients of the values that the stages returned, by split and name.
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
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        self.gradients: dict[int, dict[str, Gradients]] = {}

    def loss(self) -> Tensor | None:
        """Return the mean loss over the batch; None except on the last stage."""
        if not self._losses:
            return None
        sizes = self._inputs.sizes
        return torch.stack(
            [loss * (n / sum(sizes)) for loss, n in zip(self._losses, sizes, strict=True)]
        ).sum()

    def output(self) -> Any:
        """Return the model's output for the whole batch."""
        return join(self._outputs, self._inputs.sizes) if self._outputs else None

    def add(self, k: int, results: dict[tuple[str, int], Any]) -> None:
        """Compute the loss of a split, and its gradient with respect to the values that the stages
        returned.
        """
        made = {n.name for n in self._output.all_input_nodes if (n.name, k) in results}
        leaves: dict[str, list[Any]] = {}
        values: dict[str, Any] = {}
        for name in made:
            flat, spec = pytree.tree_flatten(results.pop((name, k)))
            leaves[name] = [
                leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
                for leaf in flat
            ]
            values[name] = pytree.tree_unflatten(leaves[name], spec)

        def value(node: fx.Node) -> Any:
            return values[node.name] if node.name in made else self._inputs.splits[node.name][k]

        output = fx.node.map_arg(self._output.args[0], value)
        self._outputs.append(
            pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, output)
        )
        loss = self._loss_of(output, k)
        if loss is None:
            return
        self._losses.append(loss.detach())
        if self._train:
            share = self._inputs.sizes[k] / sum(self._inputs.sizes)
            wanted = [e for own in leaves.values() for e in own if isinstance(e, Tensor) and e.requires_grad]
            found = iter(torch.autograd.grad(loss * share, wanted, allow_unused=True))
            self.gradients[k] = {
                name: [next(found) if isinstance(e, Tensor) and e.requires_grad else None for e in own]
                for name, own in leaves.items()
            }

    def _loss_of(self, output: Any, k: int) -> Tensor | None:
        criterion = self._criterion
        if criterion is not None:
            if not self._targets:
                if not self._train:
                    return None
                raise ValueError("the criterion compares with a target: give step(..., target=...).")
            loss: Any = criterion(output, self._targets[k])
        else:
            loss = output[0] if isinstance(output, tuple) else output
        if not isinstance(loss, Tensor) or loss.dim():
            if not self._train and criterion is None:
                return None
            what = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(type(loss).__name__)
            raise ValueError(f"the loss is {what}; it must be one number, the mean over samples.")
        return loss


class RankStep:
    """One batch on one rank.

    Args:
        flow: the values that this rank's stage exchanges with the others.
        exchange: exchange with other stages.
        lane: the process groups.
        run: the batch in this rank's stage.
        losses: the losses of the splits.
        train: whether there is a backward pass.
        draws: whether splits carry a generator of random numbers.
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
        draws: bool,
    ) -> None:
        self._flow, self._exchange, self._lane, self._run, self._losses = flow, exchange, lane, run, losses
        self._train, self._generator = train, GENERATOR if draws else None

    def __call__(self) -> None:
        """Run the whole schedule. Raises StageError on every rank if it fails on one."""
        flow, exchange, stage = self._flow, self._exchange, self._flow.stage
        exchange.begin()
        cause: BaseException | None = None
        for action, k in schedule(stage.index, flow.last + 1, self._run.num_splits, train=self._train):
            messages = messages_of(flow, action, k, generator=self._generator)
            if action == "agree":
                # Gradients are exchanged with other lanes next, and tables after that: all or none.
                group = self._lane.others if k else None
                if any_of(exchange.error is not None, group) and exchange.error is None:
                    exchange.error = "another lane failed"
                continue
            if exchange.error is None:
                try:
                    self._do(action, k)
                except ElsewhereError as error:
                    exchange.error = str(error)
                except Exception as error:
                    cause, where = error, self._run.where
                    exchange.error = (
                        f"stage {stage.index} ({stage.name}), {where}: {type(error).__name__}: {error}"
                    )
            if exchange.error is not None:
                exchange.settle(messages)
        exchange.finish()
        self._lane.raise_together(exchange.error, cause)
        if self._train:
            self._run.tables_backward()

    def _do(self, action: str, k: int) -> None:
        run = self._run
        if action == "tables":
            run.tables()
        elif action == "forward":
            run.forward(k)
            if self._flow.is_last:
                self._losses.add(k, run.values.results)
        elif action == "backward":
            run.backward(k, self._losses.gradients.pop(k, {}))
        elif action == "collect":
            run.values.collect()


def schedule(index: int, num_stages: int, num_splits: int, *, train: bool) -> list[tuple[str, int]]:
    """Return the actions of a stage in order, each with its split, or with the number of splits for the whole
    batch.

    "agree" comes before the last backward pass, in which gradients are exchanged with other lanes.
    """
    if not train:
        return [("tables", num_splits), *(("forward", k) for k in range(num_splits))]
    ahead = min(num_stages - 1 - index, num_splits)
    order = [("forward", k) for k in range(ahead)]
    for k in range(num_splits - ahead):
        order += [("forward", ahead + k), ("backward", k)]
    order += [("backward", k) for k in range(num_splits - ahead, num_splits)]
    return [("tables", num_splits), *order[:-1], ("agree", 1), order[-1], ("collect", num_splits)]


def any_of(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether the flag is set on any rank of the group. Collective."""
    if group is None:
        return flag
    tensor = torch.tensor(int(flag))
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return bool(tensor)
