"""``Staged``: a model cut into stages which run at the same time in one process.

See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from meshrec.stages.batch_norm import batch_norms, deferred_statistics
from meshrec.stages.choosing import StageChoice, max_stages
from meshrec.stages.links import DeviceLink, StageLink
from meshrec.stages.profiling import measure_and_choose
from meshrec.stages.programs import Staging, shared_parameters, stage_programs, stages_at_cuts
from meshrec.stages.running import Mode
from meshrec.stages.samples import batch_size, join_leaves, split, split_sizes
from meshrec.stages.threads import ThreadedBatch, Workers
from meshrec.stages.timeline import Timeline
from meshrec.stages.tracing import PartProgram, Traced, trace
from meshrec.stages.values import Inputs


class NamedAsModel(nn.Module):
    """Base class for model wrappers. Parameters, buffers and state dict keep the wrapped model's names."""

    @property
    def _named_module(self) -> nn.Module:
        """The wrapped module."""
        raise NotImplementedError

    @override
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self._named_module.named_parameters(*args, **kwargs)

    @override
    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        return self._named_module.named_buffers(*args, **kwargs)

    @override
    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self._named_module.state_dict(*args, **kwargs)

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._named_module.load_state_dict(*args, **kwargs)


class Staged(NamedAsModel):
    """Pipeline-parallel model in a single process, with a thread or a device per stage.

    A batch is divided by samples into splits (microbatches). While a stage works on a split, the other stages
    work on other splits. Use it like the model: ``loss = criterion(staged(x), y); loss.backward();
    optimizer.step()``. Results and gradients equal those of ``model``, except that batch norm uses the
    mean and variance of the split. ``backward`` adds to ``parameter.grad``; ``torch.autograd.grad`` with
    respect to parameters is not supported.

    Embedding tables are looked up and updated once per batch. If the model returns a 0-d tensor, such as a
    loss, it is taken for a mean over samples. Dropout and other random values are drawn for every split from
    a generator which travels with the split. The values equal those ``model`` draws on the samples of split
    ``k`` after ``torch.manual_seed(split_seed(seed, k))``.

    Args:
        model: model which torch.fx can trace. A submodule which cannot be traced stays whole in one stage.
        cuts: names of the submodules at which a new stage starts, in execution order. "auto" chooses the
            stages by measuring the first training batch.
        num_stages: stage count for ``cuts="auto"``; by default, the number of devices, or else 2.
        split_size: samples per split; the last split may be smaller. "auto" chooses by measuring.
        devices: device of every stage; by default, the CPU for all stages.
        link: moves values between the devices; by default a `DeviceLink` if devices differ.
        deferred_batch_norm: whether batch norm updates running statistics once per batch, by the
            statistics of the whole batch, instead of once per split.
        num_workers: threads which run the stages. Either one per stage, which is the default, or 1, which
            runs the stages in sequence with equal results.
        num_threads: torch threads per worker thread.

    Attributes:
        timeline: passes of all stages in the last batch, with start and end.
        choice: measured choice of cuts and split count, with the predicted step time; None if nothing was
            chosen.
        seed: random seed of the last batch, from which `split_seed` derives the split seeds. None if
            the model draws no random values.

    Raises:
        ValueError: a cut is not a submodule name, a stage would be empty, several stages use a parameter, or
            there are more stages than units or devices.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        cuts: Sequence[str] | Literal["auto"] = "auto",
        num_stages: int | None = None,
        split_size: int | Literal["auto"] = "auto",
        devices: Sequence[torch.device | str] | None = None,
        link: StageLink | None = None,
        deferred_batch_norm: bool = False,
        num_workers: int | None = None,
        num_threads: int = 1,
    ) -> None:
        super().__init__()
        self._traced: Traced = trace(model)
        self._num_stages = _checked_num_stages(self._traced, cuts, num_stages, devices)
        if isinstance(split_size, int) and split_size < 1:
            raise ValueError(f"split_size is {split_size}; it must be at least 1, or 'auto'.")
        if num_workers not in (None, 1, self._num_stages):
            raise ValueError(
                f"num_workers is {num_workers}; it must be 1, or {self._num_stages} (one per stage)."
            )
        # Registered under a name which NamedAsModel leaves out of parameter names.
        self.module = model
        self._split_size: int | Literal["auto"] = split_size
        self._devices = [torch.device(d) for d in devices or ["cpu"] * self._num_stages]
        self._link = link or (DeviceLink() if len(set(self._devices)) > 1 else None)
        self._num_workers, self._num_threads = num_workers or self._num_stages, num_threads
        self._deferred = deferred_batch_norm
        # Threads, from the first batch on. Copies and pickles drop them.
        self._workers: Workers | None = None
        # Set here for given cuts, otherwise by the first training batch.
        self._staging: Staging | None = None
        self._draws: bool | None = None  # whether the model draws random values; None before the first batch
        self.timeline = Timeline()
        # Set by the first batch if the cuts or the split size are "auto".
        self.choice: StageChoice | None = None
        # Set by every batch.
        self.seed: int | None = None
        if cuts != "auto":
            self._stage(stages_at_cuts(self._traced, cuts))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on a batch, and return the model's output.

        If the cuts or the split size are "auto", the first call chooses them by measuring on its batch.

        Args:
            args: the model's positional arguments.
            kwargs: the model's keyword arguments.

        Raises:
            ValueError: the batch cannot be split by samples.
            StageError: a stage failed. The message names the stage and the split.
        """
        batch = batch_size(args, kwargs)
        batch_values = extract_values(self._traced.input_program, args, kwargs)
        # May choose the stages, so it must come before the splits are used.
        sizes = split_sizes(batch, self._choose_split_size(batch, batch_values))
        assert self._staging is not None
        splits = {name: split(value, sizes, f"the input {name!r}") for name, value in batch_values.items()}
        run = self._batch(Inputs(batch_values, splits, sizes))
        deferred = deferred_statistics(batch_norms(self.module)) if self._deferred and self.training else None
        with deferred or nullcontext():
            outputs = self._run(run, splits)
        if self.seed is not None:
            self._draws = any(stage.drew for stage in run.runs)
        self.timeline = run.timeline
        return self._join_outputs(outputs, batch_values, sizes)

    @property
    def stages(self) -> list[str]:
        """Description of every stage, such as "bottom to over_arch"; empty until the cuts are chosen."""
        return [] if self._staging is None else [stage.name for stage in self._staging.stages]

    @property
    @override
    def _named_module(self) -> nn.Module:
        return self.module

    def _stage(self, stage_of: Sequence[int]) -> None:
        """Build the programs of the stages, and move parameters and buffers to the stages' devices."""
        self._staging = stage_programs(self._traced, stage_of)
        for stage, device in zip(self._staging.stages, self._devices, strict=True):
            for program in (stage.batch_program, stage.split_program):
                if program is not None and device.type != "cpu":
                    program.module.to(device)

    def _choose_split_size(self, batch: int, batch_values: Mapping[str, Any]) -> int:
        """Return the samples per split for a batch.

        If the cuts or the split size are "auto", the first call chooses them by measuring on this batch.
        """
        if self._staging is None or (self._split_size == "auto" and self.choice is None):
            self.choice = measure_and_choose(
                self._traced,
                batch_values,
                batch,
                num_stages=self._num_stages,
                staging=self._staging,
                split_size=self._split_size,
                num_threads=self._num_threads,
            )
            # The cuts were "auto"; given cuts stay.
            if self._staging is None:
                self._stage(self.choice.stage_of)
        if self._split_size != "auto":
            return self._split_size
        assert self.choice is not None
        # A batch with another size, such as the last in an epoch, has the same split count.
        return max(1, -(-batch // self.choice.num_splits))

    def _batch(self, inputs: Inputs) -> ThreadedBatch:
        """Return a batch which is ready to run.

        Starts the threads if necessary, and draws the random seed if the model may draw random values.
        """
        assert self._staging is not None
        if self._workers is None:
            self._workers = Workers(self._num_workers, self._num_threads)
        # Before the first batch it is unknown whether the model draws random values, so assume it does.
        draws = self.training and self._draws is not False
        self.seed = int(torch.empty((), dtype=torch.int64).random_()) if draws else None
        mode = Mode.now(grad=torch.is_grad_enabled(), seed=self.seed)
        return ThreadedBatch(
            self._staging, self._workers, inputs, mode=mode, devices=self._devices, link=self._link
        )

    def _run(self, run: ThreadedBatch, splits: Mapping[str, Sequence[Any]]) -> "Callable[[str, int], Any]":
        """Run the forward pass of all stages.

        Returns:
            Function from (value name, split index) to a value returned by the model. If gradients are
            enabled, autograd can differentiate these values with respect to the batch.
        """
        assert self._staging is not None
        # Only values computed by stages. The model may also return batch values.
        names = [
            n.name for n in self._staging.output.all_input_nodes if n.name in self._staging.producer_stage()
        ]
        # Batch tensors for which the caller wants gradients, such as outputs of another module.
        inputs = [
            (name, k, i, leaf)
            for name, parts in splits.items()
            for k, part in enumerate(parts)
            for i, leaf in enumerate(pytree.tree_leaves(part))
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        if not torch.is_grad_enabled():
            run.forward()
            return run.result
        form = _ResultLayout(names, [entry[:3] for entry in inputs])
        # Autograd calls backward only if some input requires a gradient, and the batch's tensors usually do
        # not.
        anchor = torch.empty(0, requires_grad=True)
        tensors = _RunStages.apply(run, form, anchor, *(entry[3] for entry in inputs))  # type: ignore[no-untyped-call]
        form.give(list(tensors))
        return form.result

    def _join_outputs(
        self, result: "Callable[[str, int], Any]", batch_values: Mapping[str, Any], sizes: Sequence[int]
    ) -> Any:
        """Join the results of all splits, and return the model's output for the whole batch."""
        assert self._staging is not None
        producer_stage = self._staging.producer_stage()

        def value(node: torch.fx.Node) -> Any:
            """Return a node's value for the whole batch, joined over all splits."""
            # No stage computes it: the model returns an input, or a part of one.
            if node.name not in producer_stage:
                return batch_values[node.name]
            parts = [result(node.name, k) for k in range(len(sizes))]
            flat, specs = zip(*(pytree.tree_flatten(part) for part in parts), strict=True)
            return pytree.tree_unflatten(
                [join_leaves(leaves, sizes) for leaves in zip(*flat, strict=True)], specs[0]
            )

        return torch.fx.node.map_arg(self._staging.output.args[0], value)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle and copy, without threads. The copy starts new threads when needed."""
        return {**self.__dict__, "_workers": None}


def extract_values(
    input_program: PartProgram, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the batch values read by stages, by value name.

    If the model's argument is a container such as ``batch``, this may be ``{"batch_sparse": batch.sparse}``.

    Args:
        input_program: program which extracts the values; see `Traced`.

    Raises:
        ValueError: the model does not accept these arguments.
    """
    names = input_program.input_names
    given = dict(zip(names, args, strict=False))
    if len(args) > len(names) or set(kwargs) - set(names) or given.keys() & kwargs.keys():
        raise ValueError(
            f"the model takes {names}; got {len(args)} by position, and {sorted(kwargs)} by name."
        )
    return dict(zip(input_program.output_names, input_program.module(**given, **kwargs), strict=True))


class _ResultLayout:
    """Layout of the results of all splits (microbatches) in a flat tuple of tensors.

    Autograd functions return only tensors, so the results are flattened into the tuple, and restored from it.
    Call `take`, then `give`, then `result`.

    Args:
        inputs: (value name, split index, leaf index) for every batch tensor which requires a gradient.

    Attributes:
        positions: (value name, split index, leaf index) for every tensor in the tuple; set by `take`.
    """

    def __init__(self, names: Sequence[str], inputs: Sequence[tuple[str, int, int]]) -> None:
        self.names, self.inputs = names, inputs
        # By value name and split. `take` stores leaves from the stages, `give` replaces the tensors in them.
        self._specs: dict[tuple[str, int], Any] = {}
        self._leaves: dict[tuple[str, int], list[Any]] = {}
        self.positions: list[tuple[str, int, int]] = []

    def take(self, run: ThreadedBatch, num_splits: int) -> list[Tensor]:
        """Return the tensors in all results of a batch as a flat list, detached."""
        tensors = []
        for name in self.names:
            for k in range(num_splits):
                leaves, self._specs[name, k] = pytree.tree_flatten(run.result(name, k))
                self._leaves[name, k] = leaves
                for i, leaf in enumerate(leaves):
                    if isinstance(leaf, Tensor):
                        self.positions.append((name, k, i))
                        tensors.append(leaf.detach())
        return tensors

    def give(self, tensors: Sequence[Tensor]) -> None:
        """Replace the stored tensors by the `_RunStages` outputs, which have an autograd graph."""
        for (name, k, i), tensor in zip(self.positions, tensors, strict=True):
            self._leaves[name, k][i] = tensor

    def result(self, name: str, k: int) -> Any:
        """Return the value ``name`` for split ``k``, after `give`."""
        return pytree.tree_unflatten(self._leaves[name, k], self._specs[name, k])

    def by_value(self, grads: Sequence[Tensor | None]) -> dict[tuple[str, int], list[Tensor | None]]:
        """Group gradients for the flat tuple by (value name, split index).

        Returns:
            For every value and split, a list with a gradient per leaf; None for leaves without a gradient.
        """
        grouped: dict[tuple[str, int], list[Tensor | None]] = {
            key: [None] * len(leaves) for key, leaves in self._leaves.items()
        }
        for (name, k, i), gradient in zip(self.positions, grads, strict=True):
            grouped[name, k][i] = gradient
        return grouped


class _RunStages(torch.autograd.Function):
    """Autograd function that runs all stages as a single operation.

    Inputs are the batch tensors which require gradients. Outputs are the result tensors for all splits
    (microbatches).
    """

    @staticmethod
    @override
    def forward(ctx: Any, run: ThreadedBatch, form: _ResultLayout, anchor: Tensor, *leaves: Tensor) -> Any:
        """Run the forward passes, and return the result tensors for all splits as a tuple.

        Args:
            anchor: empty tensor which requires a gradient, so that autograd always calls `backward`.
        """
        # Autograd disables gradients inside a Function, but every stage builds its own graph.
        with torch.enable_grad():
            run.forward()
        ctx.run, ctx.form, ctx.num_leaves = run, form, len(leaves)
        # Results without a gradient stay None, instead of zeros which every stage would process.
        ctx.set_materialize_grads(False)
        tensors = form.take(run, run.num_splits)
        ctx.mark_non_differentiable(*(t for t in tensors if not t.is_floating_point()))
        return tuple(tensors)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        """Run the backward passes, and return the gradients for the batch tensors."""
        input_gradients = ctx.run.backward(ctx.form.by_value(grads))
        given = [(input_gradients.get((name, k)) or {}) for name, k, _ in ctx.form.inputs]
        leaves = [g[i] if g else None for g, (_, _, i) in zip(given, ctx.form.inputs, strict=True)]
        # A gradient for each argument of ``forward``; the first three need none.
        return None, None, None, *leaves


def _checked_num_stages(
    traced: Traced,
    cuts: Sequence[str] | Literal["auto"],
    num_stages: int | None,
    devices: Sequence[torch.device | str] | None,
) -> int:
    """Return the stage count, or raise ValueError if the arguments of `Staged` do not fit the model."""
    if isinstance(cuts, str) and cuts != "auto":
        raise ValueError(f"cuts must be 'auto' or a sequence of submodules' names, got {cuts!r}.")
    requested = num_stages
    if cuts != "auto":
        requested = len(cuts) + 1
        if num_stages not in (None, requested):
            raise ValueError(
                f"{len(cuts)} cuts make {requested} stages, but num_stages is {num_stages}. Leave it out."
            )
    if requested is None:
        requested = len(devices) if devices is not None else 2
    if requested < 1:
        raise ValueError(f"num_stages is {requested}; it must be at least 1.")
    if devices is not None and len(devices) != requested:
        raise ValueError(
            f"there are {requested} stages and {len(devices)} devices. Give one device per stage."
        )
    if requested > len(traced.units):
        raise ValueError(
            f"the model has {len(traced.units)} parts that could be stages, fewer than {requested} stages: "
            f"{[unit.name for unit in traced.units]}. Take fewer stages."
        )
    shared = shared_parameters(traced)
    if cuts == "auto" and shared:
        most = max_stages([unit.needs for unit in traced.units], shared)
        if requested > most:
            raise ValueError(
                f"several parts of the model use {', '.join(map(repr, shared))}, but a parameter must be in "
                f"one stage: the model can have at most {most}, fewer than {requested} stages. Take fewer "
                "stages, or use separate parameters."
            )
    return requested
