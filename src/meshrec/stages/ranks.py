"""Stages over ranks: the ``stage`` axis of a mesh, next to ``replicate`` and ``shard``."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from meshrec.comms.mesh import ShardingEnv
from meshrec.model_parallel import DistributedModelParallel, Sharder
from meshrec.plan.sharding_plan import ShardingPlan
from meshrec.stages.batch_norm import batch_norms, deferred_statistics
from meshrec.stages.messages import RankExchange
from meshrec.stages.programs import StageFlow, StageProgram, Staging, stage_programs, stages_at_cuts
from meshrec.stages.rank_step import Criterion, Lane, RankStep, SplitLosses, any_rank
from meshrec.stages.running import GENERATOR, Caller, Mode, StageRun
from meshrec.stages.samples import batch_size, split, split_sizes
from meshrec.stages.staged import NamedAsModel, extract_values
from meshrec.stages.timeline import Timeline
from meshrec.stages.tracing import PartProgram, trace
from meshrec.stages.values import Inputs, StageValues


class StepResult(NamedTuple):
    """Step result.

    Attributes:
        loss: mean loss over the lane's batch, on all stages in the lane.
        output: model output, detached, on the last stage; None on other stages.
    """

    loss: Tensor
    output: Any


class StagedOverRanks(NamedAsModel):
    """A model whose stages are on different ranks. A stage may also be sharded and replicated.

    Ranks on the ``stage`` axis with equal other coordinates form a lane. A lane shares a batch: every rank in
    the lane gets the whole batch, and reads the values for the rank's stage. ``step`` runs a batch with one
    forward and one backward split in turn (1F1B: Narayanan et al., "PipeDream", 2019). Afterwards the
    parameters have the gradients from the mean loss over all lanes, and the tables are updated::

        staged = StagedOverRanks(model, mesh=mesh, cuts=["over_arch"], split_size=512, criterion=loss)
        optimizer = torch.optim.Adam(staged.dense_param_groups())
        for batch, target in loader:
            optimizer.zero_grad()
            loss, _ = staged.step(batch, target=target)
            optimizer.step()

    A rank holds the parameters for the rank's stage, under the model's names.

    Args:
        model: the model, built alike on all ranks (same seed).
        mesh: mesh with an axis ``stage``. The other axes are as in `ShardingEnv.from_mesh`, and apply to
            every stage as in DistributedModelParallel: ``shard`` splits the stage's tables, ``replicate``
            replicates them.
        cuts: submodule names at which a new stage begins: one fewer than the ``stage`` axis has ranks.
        split_size: samples per split; the last split has the rest.
        criterion: maps (result, target) to the mean loss over samples. None: the model returns the loss,
            alone or first in a tuple.
        plan, sharders, dense, dense_options: as for DistributedModelParallel. A stage uses the plan entries
            for the stage's tables.
        deferred_batch_norm: see `Staged`.

    Raises:
        ValueError: as for `Staged`, or the cut count does not fit the mesh.
    """

    holds_part = True  # a rank has only some model names; checkpoints merge them

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
        group = mesh.get_group("stage")
        num_stages = group.size()
        if len(cuts) + 1 != num_stages:
            raise ValueError(
                f"{len(cuts)} cuts make {len(cuts) + 1} stages, but the mesh's 'stage' axis has {num_stages} "
                f"ranks. Give {num_stages - 1} cuts."
            )
        if split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1.")
        traced = trace(model)
        self._taking = traced.taking
        staging = stage_programs(traced, stages_at_cuts(traced, cuts))
        self._split_size, self._criterion, self._deferred = split_size, criterion, deferred_batch_norm
        self._flow = StageFlow(staging, group.rank(), _passed_through(staging))
        other_axes = tuple(name for name in names if name != "stage")
        env = ShardingEnv.from_mesh(mesh[other_axes]) if other_axes else ShardingEnv.single_process()
        # Collective, so all ranks must build the groups in this order.
        all_ranks = mesh._flatten("everyone").get_group() if other_axes else group
        self._lane = Lane(group, env.world.group, all_ranks)
        part = StagePart(model, self._flow.stage)
        tables = [path for path in (plan.plan if plan is not None else ()) if _has_submodule(part, path)]
        local_plan = ShardingPlan({path: plan.plan[path] for path in tables}) if plan is not None else None
        # An empty plan, because None would start the planner on a part without tables.
        if not part.holds_tables:
            local_plan = ShardingPlan({})
        self.part = DistributedModelParallel(
            part, env=env, plan=local_plan, sharders=sharders, dense=dense, dense_options=dense_options
        )
        self._caller = _PartCaller(self.part)
        # All ranks pass the same names, because tags are numbered by them.
        self._exchange = RankExchange(group, [*self._flow.makers, GENERATOR])
        # Whether any stage draws random numbers; None until the first training batch has shown it.
        self._draws: bool | None = None
        self.timeline = Timeline()

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run this lane's batch forward and backward. Collective over the mesh.

        Raises:
            ValueError: the batch cannot be split by samples; raised before anything runs.
            StageError: a stage in some lane failed; raised on every rank, with stage and split. Tables are
                unchanged. Clear the gradients, and the next step works.
        """
        return self._run(args, kwargs, target, train=True)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run a batch forward only, without gradients. Collective over the mesh."""
        return self._run(args, kwargs, target, train=False)

    @property
    def stage(self) -> int:
        """This rank's stage index."""
        return self._flow.stage.index

    @property
    def fused_optimizer(self) -> Any:
        """Fused optimizer for this stage's tables, see DistributedModelParallel."""
        return self.part.fused_optimizer

    def dense_param_groups(self) -> list[dict[str, Any]]:
        """Return the parameter group for this rank's dense optimizer: all parameters except tables.

        The group is empty on a stage with only tables.
        """
        tables = {p for module in self.part.sharded_modules.values() for p in module.parameters()}
        return [{"params": [p for p in self.part.parameters() if p not in tables]}]

    @property
    @override
    def _named_module(self) -> nn.Module:
        return self.part

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load this stage's part of a state dict, which may be the whole model's."""
        local = self.part.state_dict()
        return self.part.load_state_dict({k: v for k, v in state_dict.items() if k in local}, *args, **kwargs)

    def _run(self, args: Any, kwargs: Mapping[str, Any], target: Any, *, train: bool) -> StepResult:
        sizes = split_sizes(batch_size(args, kwargs), self._split_size)
        taken = extract_values(self._taking, args, kwargs)
        flow, draws = self._flow, train and self.training and self._draws is not False
        needed = {*flow.stage.split.takes, *flow.returned}
        splits = {n: split(v, sizes, f"the input {n!r}") for n, v in taken.items() if n in needed}
        targets = split(target, sizes, "the target") if flow.is_last and target is not None else []
        norms = batch_norms(self.part.module) if self._deferred and train else None
        inputs = Inputs(taken, splits, sizes)
        mode = Mode.now(grad=train, seed=self._lane.broadcast_seed() if draws else None)
        self.timeline = Timeline()
        run = StageRun(
            flow,
            self._caller,
            StageValues(flow, inputs, self._exchange),
            mode=mode,
            timeline=self.timeline,
        )
        losses = SplitLosses(flow.output, inputs, targets, self._criterion, train=train)
        step = RankStep(flow, self._exchange, self._lane, run=run, losses=losses, train=train, draws=draws)
        with deferred_statistics(norms) if norms is not None else nullcontext():
            step()
        if self._draws is None and train and self.training:
            # Agreed on by the lane: a stage which expects a generator would otherwise wait for it forever.
            self._draws = any_rank(run.drew, self._lane.stages)
        return StepResult(self._lane.broadcast_loss(losses.loss()), losses.output())


def _passed_through(staging: Staging) -> list[str]:
    """Return the value names from earlier stages, received by the last stage only to return them."""
    makers, last = staging.makers(), len(staging.stages) - 1
    given = set(staging.stages[last].split.takes)
    returned = [node.name for node in staging.output.all_input_nodes]
    return [name for name in returned if makers.get(name, last) != last and name not in given]


class StagePart(nn.Module):
    """A stage's submodules, at the paths in the model.

    The forward method runs the program "whole" or "split".
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
        """Run a program, and return the values."""
        # The generated code looks up submodules by name, which resolves to the modules adopted here.
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


def _has_submodule(part: nn.Module, path: str) -> bool:
    try:
        part.get_submodule(path)
    except AttributeError:
        return False
    return True


class _PartCaller(Caller):
    """Runs the stage part with dense parameters replicated over lanes (DDP or FSDP2).

    Lanes exchange gradients only in the last split's backward pass.
    """

    direct = True

    def __init__(self, part: DistributedModelParallel) -> None:
        self._part = part

    @override
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        wrapped = self._part._dmp_wrapped_module
        with wrapped.no_sync() if isinstance(wrapped, nn.parallel.DistributedDataParallel) else nullcontext():
            results: Sequence[Any] = self._part(which, *arguments)
        return results

    @override
    def before_backward(self, *, last: bool) -> None:
        wrapped: Any = self._part._dmp_wrapped_module
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            if last:
                # Only the last split reduces. Its gradients are accumulated on top of earlier splits'
                # gradients.
                wrapped.reducer.prepare_for_backward([])
        elif hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_is_last_backward(last)
