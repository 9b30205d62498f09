"""Stages over ranks: the ``stage`` axis of a mesh, beside ``replicate`` and ``shard``."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from meshrec.comms.mesh import ShardingEnv
from meshrec.model_parallel import DistributedModelParallel, Sharder
from meshrec.pipeline.stages.batch_norm import batch_norms, deferred_statistics
from meshrec.pipeline.stages.messages import ElsewhereError, RankExchange, messages_of
from meshrec.pipeline.stages.programs import StageProgram, Staging, at_cuts, stage_programs
from meshrec.pipeline.stages.running import (
    GENERATOR,
    Caller,
    Gradients,
    Inputs,
    Mode,
    StageError,
    StageRun,
)
from meshrec.pipeline.stages.samples import join, num_samples, split, split_sizes
from meshrec.pipeline.stages.staged import take_apart
from meshrec.pipeline.stages.timeline import Timeline
from meshrec.pipeline.stages.tracing import PartProgram, trace
from meshrec.plan.sharding_plan import ShardingPlan

Criterion = Callable[[Any, Any], Tensor]


class StepResult(NamedTuple):
    """Result of a step. ``loss``: of the lane's batch, on all its stages. ``output``: the model's detached
    output, on the last stage only.
    """

    loss: Tensor
    output: Any


class StagedOverRanks(nn.Module):
    """A model whose stages are on different ranks. Each stage may itself be sharded and replicated.

    Ranks of the ``stage`` axis with equal other coordinates form a lane. A lane shares a batch: every rank of
    it gets the whole batch, and reads what its stage needs. ``step`` runs a batch with one forward and one
    backward split in turn (1F1B: Narayanan et al., "PipeDream", 2019). Afterwards the parameters have the
    gradients of the mean loss over all lanes, and the tables are updated::

        staged = StagedOverRanks(model, mesh=mesh, cuts=["over_arch"], split_size=512, criterion=loss)
        optimizer = torch.optim.Adam(staged.dense_param_groups())
        for batch, target in loader:
            optimizer.zero_grad()
            loss, _ = staged.step(batch, target=target)
            optimizer.step()

    A rank holds the parameters of its stage, under the names of the model.

    Args:
        model: the model, built alike on all ranks (same seed).
        mesh: mesh with an axis ``stage``. Its other axes are those of `ShardingEnv.from_mesh`, and apply to
            each stage as in DistributedModelParallel: ``shard`` splits the stage's tables, ``replicate``
            replicates them.
        cuts: names of the submodules at which a new stage begins: one fewer than the ``stage`` axis has
            ranks.
        split_size: samples per split; the last split has the rest.
        criterion: maps (result, target) to the mean loss over samples. None: the model returns the loss,
            alone or first in a tuple.
        plan, sharders, dense, dense_options: as for DistributedModelParallel. A stage uses the part of the
            plan that is about its tables.
        deferred_batch_norm: see `Staged`.

    Raises:
        ValueError: as for `Staged`, or the number of cuts does not fit the mesh.
    """

    holds_part = True  # of the model's names; checkpoints put the ranks' together

    def __init__(
        self,
        model: nn.Module,
        *,
        mesh: DeviceMesh,
        cuts: Sequence[str],
        split_size: int,
        criterion: Criterion | None = None,
        plan: ShardingPlan | None = None,
        sharders: Sequence[Sharder] | None = None,
        dense: Literal["ddp", "fsdp2"] = "ddp",
        dense_options: Mapping[str, Any] | None = None,
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        names = mesh.mesh_dim_names or ()
        if "stage" not in names:
            raise ValueError(f"the mesh has the axes {names}; stages need one called 'stage'.")
        self._group = mesh.get_group("stage")
        num_stages = self._group.size()
        if len(cuts) + 1 != num_stages:
            raise ValueError(
                f"{len(cuts)} cuts make {len(cuts) + 1} stages, but the mesh's 'stage' axis has {num_stages} "
                f"ranks. Give {num_stages - 1} cuts."
            )
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1.")
        traced = trace(model)
        self._taking = traced.taking
        self._staging: Staging = stage_programs(traced, at_cuts(traced, cuts))
        self._stage: StageProgram = self._staging.stages[self._group.rank()]
        self._split_size, self._criterion, self._deferred = split_size, criterion, deferred_batch_norm
        makers, last = self._staging.makers(), num_stages - 1
        returned = [node.name for node in self._staging.output.all_input_nodes]
        given = set(self._staging.stages[last].split.takes)
        self._carried = [n for n in returned if makers.get(n, last) != last and n not in given]
        others = tuple(name for name in names if name != "stage")
        env = ShardingEnv.from_mesh(mesh[others]) if others else ShardingEnv.single_process()
        self._lanes = env.world.group
        self._everyone = mesh._flatten("everyone").get_group() if others else self._group
        part = StagePart(model, self._stage)
        tables = [path for path in (plan.plan if plan is not None else ()) if _has(part, path)]
        own_plan = ShardingPlan({path: plan.plan[path] for path in tables}) if plan is not None else None
        if not part.holds_tables:
            own_plan = ShardingPlan({})
        self.part = DistributedModelParallel(
            part, env=env, plan=own_plan, sharders=sharders, dense=dense, dense_options=dense_options
        )
        self._caller = _PartCaller(self.part)
        self._exchange = RankExchange(self._group, [*makers, GENERATOR])
        self._draws: bool | None = None
        self.timeline = Timeline()

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run a batch of this lane forward and backward. Collective over the mesh.

        Raises:
            ValueError: the batch cannot be split by samples; raised before anything runs.
            StageError: a stage of some lane failed; raised on every rank, with the stage and the split.
                Tables are unchanged. Clear the gradients, and the next step works.
        """
        return self._run(args, kwargs, target, train=True)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run a batch forward only, without gradients. Collective over the mesh."""
        return self._run(args, kwargs, target, train=False)

    @property
    def stage(self) -> int:
        """Index of this rank's stage."""
        return self._stage.index

    @property
    def fused_optimizer(self) -> Any:
        """Fused optimizer of this stage's tables, see DistributedModelParallel."""
        return self.part.fused_optimizer

    def dense_param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter groups for this rank's dense optimizer: all parameters except the tables, in
        one group.

        The group is empty on a stage that has only tables.
        """
        tables = {p for module in self.part.sharded_modules.values() for p in module.parameters()}
        return [{"params": [p for p in self.part.parameters() if p not in tables]}]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of this stage under the names of the model."""
        return self.part.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of this stage under the names of the model."""
        return self.part.named_buffers(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of this stage under the names of the model. The states of all stages make up the
        model's.
        """
        return self.part.state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this stage's part of a state dict, which may be that of the whole model."""
        own = self.part.state_dict()
        return self.part.load_state_dict({k: v for k, v in state_dict.items() if k in own}, *args, **kwargs)

    def _run(self, args: Any, kwargs: Mapping[str, Any], target: Any, *, train: bool) -> StepResult:
        batch = num_samples([args, kwargs])
        if batch is None:
            raise ValueError("the batch has no tensor with samples in its first dimension: give one.")
        sizes = split_sizes(batch, self._split_size)
        taken = take_apart(self._taking, args, kwargs)
        wanted = {*self._stage.split.takes, *(node.name for node in self._staging.output.all_input_nodes)}
        splits = {n: split(v, sizes, f"the input {n!r}") for n, v in taken.items() if n in wanted}
        targets = split(target, sizes, "the target") if self._is_last and target is not None else []
        norms = batch_norms(self.part.module) if self._deferred and train else None
        step = _Step(self, Inputs(taken, splits, sizes), targets, train=train)
        with deferred_statistics(norms) if norms is not None else nullcontext():
            step.run()
        if self._draws is None and train and self.training:
            self._draws = bool(_largest(int(step.stage_run.drew), self._group))
        return StepResult(self._shared(step.loss()), step.output())

    @property
    def _is_last(self) -> bool:
        return self._stage.index == len(self._staging.stages) - 1

    def _shared(self, loss: Tensor | None) -> Tensor:
        value = torch.zeros(()) if loss is None else loss.detach().float().clone()
        source = dist.get_global_rank(self._group, self._group.size() - 1)
        dist.broadcast(value, source, group=self._group)
        return value


class _Step:
    """One batch on one rank."""

    def __init__(
        self, owner: StagedOverRanks, inputs: Inputs, targets: Sequence[Any], *, train: bool
    ) -> None:
        self._owner, self._inputs, self._targets, self._train = owner, inputs, targets, train
        self._losses: list[Tensor] = []
        self._outputs: list[Any] = []
        self._result_gradients: dict[int, dict[str, Gradients]] = {}
        draws = train and owner.training and owner._draws is not False
        seed = _shared_seed(owner._group) if draws else None
        self._generator = GENERATOR if seed is not None else None
        owner.timeline = Timeline()
        owner._exchange.begin()
        self.stage_run = StageRun(
            owner._staging,
            owner._stage,
            owner._caller,
            inputs,
            owner._exchange,
            mode=Mode(train, seed),
            timeline=owner.timeline,
            carried=owner._carried,
        )

    def run(self) -> None:
        """Run the whole schedule. Raises StageError on every rank if it fails on one."""
        owner, exchange, num_splits = self._owner, self._owner._exchange, self.stage_run.num_splits
        index, num_stages = owner._stage.index, len(owner._staging.stages)
        cause: BaseException | None = None
        for action, k in schedule(index, num_stages, num_splits, train=self._train):
            messages = messages_of(
                owner._staging, owner._stage, action, k, carried=owner._carried, generator=self._generator
            )
            if action == "agree":
                # Gradients are exchanged with other lanes next, and tables after that: all or none.
                group = owner._lanes if k else None
                if _largest(int(exchange.error is not None), group) and exchange.error is None:
                    exchange.error = "another lane failed"
                continue
            if exchange.error is None:
                try:
                    self._do(action, k)
                except ElsewhereError as error:
                    exchange.error = str(error)
                except Exception as error:
                    cause, stage = error, owner._stage
                    where = self.stage_run.where
                    exchange.error = (
                        f"stage {stage.index} ({stage.name}), {where}: {type(error).__name__}: {error}"
                    )
            if exchange.error is not None:
                exchange.settle(messages)
        exchange.finish()
        self._raise_together(cause)
        if self._train:
            self.stage_run.tables_backward()

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

    def _do(self, action: str, k: int) -> None:
        run = self.stage_run
        if action == "tables":
            run.tables()
        elif action == "forward":
            run.forward(k)
            if self._owner._is_last:
                self._judge(k)
        elif action == "backward":
            run.backward(k, self._result_gradients.pop(k, {}))
        elif action == "collect":
            run.collect()

    def _judge(self, k: int) -> None:
        """Compute the loss of a split, and its gradient with respect to the values that the stages
        returned.
        """
        staging, results = self._owner._staging, self.stage_run.results
        made = {n.name for n in staging.output.all_input_nodes if (n.name, k) in results}
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

        output = fx.node.map_arg(staging.output.args[0], value)
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
            self._result_gradients[k] = {
                name: [next(found) if isinstance(e, Tensor) and e.requires_grad else None for e in own]
                for name, own in leaves.items()
            }

    def _loss_of(self, output: Any, k: int) -> Tensor | None:
        criterion = self._owner._criterion
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

    def _raise_together(self, cause: BaseException | None) -> None:
        """Raise the first failure on all ranks. Collective."""
        error, everyone = self._owner._exchange.error, self._owner._everyone
        if not _largest(int(error is not None), everyone):
            return
        texts: list[Any] = [None] * everyone.size()
        dist.all_gather_object(texts, (error, cause is not None), group=everyone)
        first = next((text for text, is_cause in texts if is_cause), None)
        raise StageError(first or next(text for text, _ in texts if text)) from cause


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


class StagePart(nn.Module):
    """The submodules that a stage holds, at their places in the model. It runs the program "whole" or
    "split".
    """

    def __init__(self, model: nn.Module, stage: StageProgram) -> None:
        super().__init__()
        self._programs: dict[str, PartProgram] = {"split": stage.split}
        if stage.whole is not None:
            self._programs["whole"] = stage.whole
        self.holds_tables = stage.whole is not None
        for program in self._programs.values():
            for node in program.module.graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _adopt(self, model, str(node.target))

    def forward(self, which: str, *arguments: Any) -> Any:
        """Return the values that the program gives."""
        # The generated code looks submodules up by their names: here those that were put in their place.
        return type(self._programs[which].module).forward(self, *arguments)


def _adopt(part: nn.Module, model: nn.Module, target: str) -> None:
    *path, last = target.split(".")
    for name in path:
        if not hasattr(part, name):
            part.add_module(name, nn.Module())
        part, model = getattr(part, name), getattr(model, name)
    value = getattr(model, last)
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        part.register_buffer(last, value, persistent=last not in model._non_persistent_buffers_set)
    else:
        setattr(part, last, value)


def _has(part: nn.Module, path: str) -> bool:
    try:
        part.get_submodule(path)
    except AttributeError:
        return False
    return True


class _PartCaller(Caller):
    """Runs a stage's part, whose dense parameters are replicated over lanes.

    Gradients are exchanged in the backward pass of the last split, and only there.
    """

    direct = True

    def __init__(self, part: DistributedModelParallel) -> None:
        self._part = part

    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the values that the program gives."""
        wrapped = self._part._dmp_wrapped_module
        with wrapped.no_sync() if isinstance(wrapped, nn.parallel.DistributedDataParallel) else nullcontext():
            results: Sequence[Any] = self._part(which, *arguments)
        return results

    def parameters(self) -> list[nn.Parameter]:
        """Return no parameters: backward passes accumulate their gradients."""
        return []

    def before_backward(self, *, last: bool) -> None:
        """Switch the gradient exchange on for the last split."""
        wrapped: Any = self._part._dmp_wrapped_module
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            if last:
                wrapped.reducer.prepare_for_backward([])
        elif hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_is_last_backward(last)


def _largest(number: int, group: dist.ProcessGroup | None) -> int:
    if group is None:
        return number
    tensor = torch.tensor(number)
    dist.all_reduce(tensor, dist.ReduceOp.MAX, group=group)
    return int(tensor)


def _shared_seed(group: dist.ProcessGroup) -> int:
    """Return one seed for all stages of a lane."""
    seed = torch.empty((), dtype=torch.int64).random_()
    dist.broadcast(seed, dist.get_global_rank(group, 0), group=group)
    return int(seed)
