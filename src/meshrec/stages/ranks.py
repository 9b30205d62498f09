"""``StagedOverRanks``: a model whose stages run on different ranks, along the ``stage`` axis of a device
mesh.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
"""

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
    """Result of a training or evaluation step.

    Attributes:
        loss: mean loss over the samples in this lane's batch (0-d, float32). All ranks in the lane get it.
        output: model output for the batch, detached, on the last stage. None on other stages.
    """

    loss: Tensor
    output: Any


class StagedOverRanks(NamedAsModel):
    """Pipeline-parallel model: every rank runs a stage, which may also be sharded and replicated.

    Ranks on the ``stage`` axis with equal coordinates on the other axes form a lane, which has a copy of all
    stages. All ranks in a lane get the same whole batch; a rank uses only the values that its stage needs.
    ``step`` divides the batch into splits (microbatches), and every stage alternates between forward and
    backward passes (1F1B: Narayanan et al., "PipeDream", 2019). After ``step``, the parameters have the
    gradients of the mean loss over all lanes, and the tables are already updated::

        staged = StagedOverRanks(model, mesh=mesh, cuts=["over_arch"], split_size=512, criterion=loss)
        optimizer = torch.optim.Adam(staged.dense_param_groups())
        for batch, target in loader:
            optimizer.zero_grad()
            loss, _ = staged.step(batch, target=target)
            optimizer.step()

    A rank holds only the parameters of its stage, under the names they have in the model.

    Args:
        model: complete model, built with the same seed on all ranks.
        mesh: mesh with an axis ``stage``, which has a rank per stage. The other axes are as in
            `ShardingEnv.from_mesh`, and apply to every stage as in DistributedModelParallel: ``shard`` splits
            the stage's tables, and ``replicate`` copies them.
        cuts: names of the submodules at which a new stage starts, in execution order; one fewer than there
            are stages.
        split_size: samples per split; the last split may be smaller.
        criterion: function from (model output, target) to the mean loss over samples. None if the model
            returns the loss, either alone or as the first entry of a tuple.
        plan, sharders, dense, dense_options: as for DistributedModelParallel. A stage uses the plan entries
            for its tables.
        deferred_batch_norm: whether batch norm updates running statistics once per batch, by the
            statistics of the whole batch, instead of once per split.

    Attributes:
        part: this rank's stage, as a DistributedModelParallel module.
        timeline: events on this rank in the last batch.

    Raises:
        ValueError: the number of cuts does not fit the mesh, a cut is not a submodule name, a stage would be
            empty, or several stages use the same parameter.
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
        self._input_program = traced.input_program
        # Every rank traces the whole model, so all ranks agree on value names without communication.
        staging = stage_programs(traced, stages_at_cuts(traced, cuts))
        self._split_size, self._criterion, self._deferred = split_size, criterion, deferred_batch_norm
        self._flow = StageFlow(staging, group.rank(), _passed_through(staging))
        # The axes over which the stage itself is sharded and replicated.
        other_axes = tuple(name for name in names if name != "stage")
        env = ShardingEnv.from_mesh(mesh[other_axes]) if other_axes else ShardingEnv.single_process()
        # Collective, so all ranks must build the groups in this order.
        all_ranks = mesh._flatten("everyone").get_group() if other_axes else group
        self._lane = Lane(group, env.world.group, all_ranks)
        # Contains only the modules which this stage uses.
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
        self._exchange = RankExchange(group, [*self._flow.producer_stage, GENERATOR])
        # Whether any stage draws random numbers; None until the first training batch has shown it.
        self._draws: bool | None = None
        # Replaced by every batch.
        self.timeline = Timeline()

    def step(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run this lane's batch forward and backward, and update the tables. Collective over the mesh.

        Args:
            args: the model's positional arguments, the same on all ranks in the lane.
            target: second argument of the criterion. Only the last stage uses it.
            kwargs: the model's keyword arguments.

        Raises:
            ValueError: the batch cannot be split by samples. Nothing has run.
            StageError: a stage in some lane failed. All ranks raise it, and the message names the stage and
                the split. Tables are unchanged. Clear the gradients before the next step.
        """
        return self._run(args, kwargs, target, train=True)

    @torch.no_grad()
    def evaluate(self, *args: Any, target: Any = None, **kwargs: Any) -> StepResult:
        """Run a batch forward only, without gradients. Collective over the mesh; see `step` for arguments."""
        return self._run(args, kwargs, target, train=False)

    @property
    def stage(self) -> int:
        """Number of the stage which this rank runs."""
        return self._flow.stage.index

    @property
    def fused_optimizer(self) -> Any:
        """Optimizer that updates this stage's tables in the backward pass; see DistributedModelParallel."""
        return self.part.fused_optimizer

    def dense_param_groups(self) -> list[dict[str, Any]]:
        """Return a list with one parameter group for an optimizer: this stage's parameters except its tables.

        The group is empty on a stage that has only tables.
        """
        # Table parameters have their own optimizers.
        tables = {p for module in self.part.sharded_modules.values() for p in module.parameters()}
        return [{"params": [p for p in self.part.parameters() if p not in tables]}]

    @property
    @override
    def _named_module(self) -> nn.Module:
        return self.part

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load the entries of this stage from a state dict, which may be that of the whole model.

        Args:
            state_dict: tensors by the names they have in the model. Entries of other stages are ignored.
            args: further arguments of ``nn.Module.load_state_dict``.
            kwargs: further arguments of ``nn.Module.load_state_dict``.
        """
        local = self.part.state_dict()
        return self.part.load_state_dict({k: v for k, v in state_dict.items() if k in local}, *args, **kwargs)

    def _run(self, args: Any, kwargs: Mapping[str, Any], target: Any, *, train: bool) -> StepResult:
        """Run a batch, with a backward pass if ``train``; see `step` for the arguments."""
        # Check the batch before any collective, so an error leaves no rank waiting.
        sizes = split_sizes(batch_size(args, kwargs), self._split_size)
        batch_values = extract_values(self._input_program, args, kwargs)
        # In the first batch it is unknown whether the model draws random values, so assume it does.
        flow, draws = self._flow, train and self.training and self._draws is not False
        needed = {*flow.stage.split_program.input_names, *flow.output_names}
        splits = {n: split(v, sizes, f"the input {n!r}") for n, v in batch_values.items() if n in needed}
        targets = split(target, sizes, "the target") if flow.is_last and target is not None else []
        norms = batch_norms(self.part.module) if self._deferred and train else None
        inputs = Inputs(batch_values, splits, sizes)
        # Drawn on the first stage, so random numbers do not depend on other ranks' generators.
        mode = Mode.now(grad=train, seed=self._lane.broadcast_seed() if draws else None)
        self.timeline = Timeline()
        run = StageRun(
            flow, self._caller, StageValues(flow, inputs, self._exchange), mode=mode, timeline=self.timeline
        )
        losses = SplitLosses(flow.output, inputs, targets, self._criterion, train=train)
        step = RankStep(
            flow, self._exchange, self._lane, run=run, losses=losses, train=train, draws_random=draws
        )
        with deferred_statistics(norms) if norms is not None else nullcontext():
            step()
        if self._draws is None and train and self.training:
            # All stages in the lane must agree. Otherwise a stage that expects a generator state would wait
            # forever for a stage that does not send it.
            self._draws = any_rank(run.drew, self._lane.stages)
        return StepResult(self._lane.broadcast_loss(losses.loss()), losses.output())


def _passed_through(staging: Staging) -> list[str]:
    """Return the names of the values which the last stage receives only because the model returns them."""
    producer_stage, last = staging.producer_stage(), len(staging.stages) - 1
    given = set(staging.stages[last].split_program.input_names)
    returned = [node.name for node in staging.output.all_input_nodes]
    return [name for name in returned if producer_stage.get(name, last) != last and name not in given]


class StagePart(nn.Module):
    """Module with the submodules, parameters and buffers that a stage uses, at the paths they have in the
    model.

    The forward method runs one of the two stage programs: "whole" looks up tables for the whole batch, and
    "split" runs all other units for a split (microbatch).

    Attributes:
        holds_tables: whether the stage has embedding tables.
    """

    def __init__(self, model: nn.Module, stage: StageProgram) -> None:
        super().__init__()
        self._programs: dict[str, PartProgram] = {"split": stage.split_program}
        if stage.batch_program is not None:
            self._programs["whole"] = stage.batch_program
        self.holds_tables = stage.batch_program is not None
        for program in self._programs.values():
            for node in program.module.graph.nodes:
                if node.op in ("call_module", "get_attr"):
                    _adopt(self, model, str(node.target))

    def forward(self, which: str, *arguments: Any) -> Any:
        """Run a stage program.

        Args:
            which: "whole" or "split"; see the class.

        Returns:
            Tuple of program outputs, in the order of `PartProgram.output_names`.
        """
        # The generated code looks up submodules by name, which resolves to the modules adopted here.
        return type(self._programs[which].module).forward(self, *arguments)


def _adopt(part: nn.Module, model: nn.Module, target: str) -> None:
    """Add the model's submodule, parameter or buffer at the path ``target`` to ``part``, at the same path."""
    *path, last = target.split(".")
    for name in path:
        if not hasattr(part, name):
            part.add_module(name, nn.Module())
        part, model = getattr(part, name), getattr(model, name)
    value = getattr(model, last)
    # A plain assignment would not register a buffer. Its persistence is kept, so that state dicts have the
    # same names.
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
        part.register_buffer(last, value, persistent=last not in model._non_persistent_buffers_set)
    else:
        setattr(part, last, value)


def _has_submodule(part: nn.Module, path: str) -> bool:
    """Return whether the stage has a submodule at ``path``."""
    try:
        part.get_submodule(path)
    except AttributeError:
        return False
    return True


class _PartCaller(Caller):
    """Caller of a stage whose dense parameters DDP or FSDP2 keeps equal in all lanes.

    Lanes exchange gradients only in the backward pass of the last split (microbatch).
    """

    direct = True

    def __init__(self, part: DistributedModelParallel) -> None:
        self._part = part

    @override
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the stage's program ``which``, without preparing a gradient exchange between lanes."""
        wrapped = self._part._dmp_wrapped_module
        with wrapped.no_sync() if isinstance(wrapped, nn.parallel.DistributedDataParallel) else nullcontext():
            results: Sequence[Any] = self._part(which, *arguments)
        return results

    @override
    def before_backward(self, *, last: bool) -> None:
        """Make DDP or FSDP2 exchange gradients in the next backward pass if ``last``, and not otherwise."""
        wrapped: Any = self._part._dmp_wrapped_module
        # DDP reduces when the reducer has been prepared. Outside the last split, it must not be.
        if isinstance(wrapped, nn.parallel.DistributedDataParallel):
            if last:
                # Only the last split starts the all-reduce. The gradients of earlier splits are already in
                # ``grad``, so the all-reduce covers the sum over all splits.
                wrapped.reducer.prepare_for_backward([])
        # FSDP2's switches for the same purpose.
        elif hasattr(wrapped, "set_requires_gradient_sync"):
            wrapped.set_requires_gradient_sync(last)
            wrapped.set_is_last_backward(last)
