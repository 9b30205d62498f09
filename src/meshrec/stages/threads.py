"""Run stages in a single process, with a worker thread per stage, and carrier threads between devices.

Every stage runs splits forward in order, and backward from the last split to the first. Results therefore do
not depend on thread speeds, and equal those in sequential execution.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from typing_extensions import override

from meshrec.stages.links import StageLink
from meshrec.stages.programs import StageFlow, StageProgram, Staging
from meshrec.stages.running import GENERATOR, Caller, Mode, StageError, StageRun
from meshrec.stages.timeline import Timeline
from meshrec.stages.values import Exchange, Gradients, Inputs, Message, StageValues, add_gradients


class Workers:
    """Worker threads, with ``num_threads`` torch threads per worker. A single worker runs all stages."""

    def __init__(self, num_workers: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pools = [ThreadPoolExecutor(1, f"meshrec-stage-{s}") for s in range(num_workers)]
        # A thread per (source, destination), created on first use and kept for later batches.
        self._carriers: dict[tuple[int, int], ThreadPoolExecutor] = {}
        for pool in self._pools:
            pool.submit(torch.set_num_threads, num_threads).result()

    def run(self, jobs: Mapping[int, Callable[[], None]], failed: Callable[[], None], *, here: bool) -> None:
        """Run a job per stage, in the stages' threads or sequentially in this thread.

        If jobs fail, calls ``failed`` and raises the first error once all jobs have ended.

        Args:
            jobs: job by stage.
            failed: called when a job fails, to end the others.
            here: whether to run all jobs in this thread.
        """
        if here:
            try:
                for job in jobs.values():
                    job()
            except BaseException:
                failed()
                raise
            return
        errors: list[BaseException] = []

        def guarded(job: Callable[[], None]) -> None:
            try:
                job()
            except BaseException as error:
                errors.append(error)
                failed()

        before = torch.get_num_threads()
        # MKL's thread count is per process, so set the workers' count while they run.
        if before != self.num_threads:
            torch.set_num_threads(self.num_threads)
        try:
            futures = [
                self._pools[min(stage, len(self._pools) - 1)].submit(guarded, job)
                for stage, job in jobs.items()
            ]
            for future in futures:
                future.result()
        finally:
            if before != self.num_threads:
                torch.set_num_threads(before)
        if errors:
            raise errors[0]

    def carrier(self, source: int, destination: int) -> ThreadPoolExecutor:
        """Return the carrier thread between two stages."""
        if (source, destination) not in self._carriers:
            name = f"meshrec-link-{source}-{destination}"
            self._carriers[source, destination] = ThreadPoolExecutor(1, name)
        return self._carriers[source, destination]


class ThreadExchange(Exchange):
    """Passes values and gradients between stage threads, with a future per message.

    Args:
        workers: owner of the carrier threads.
        devices: device per stage.
        link: carries tensors to the receiving stage's device, in a carrier thread. None: the receiving stage
            gets the same tensors.
        timeline: records copies.
    """

    def __init__(
        self, workers: Workers, devices: Sequence[torch.device], link: StageLink | None, timeline: Timeline
    ) -> None:
        self._workers, self._devices, self._link, self._timeline = workers, devices, link, timeline
        # Created by the sender or the receiver, whichever comes first.
        self._futures: dict[Message, Future[Callable[[], Any]]] = {}
        self._lock = threading.Lock()
        # Set by `stop`; from then on, every wait is cancelled.
        self._broken = False

    @override
    def put(self, message: Message, value: Any) -> None:
        future, link = self._future(message), self._link
        # The generator state is always on the host.
        if (
            link is None
            or message.name == GENERATOR
            or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        ):
            if not future.cancelled():
                future.set_result(lambda: value)
            return
        # Gradients travel from a value's reader back to the source.
        source, destination = message.source, message.destination
        if message.kind == "gradient":
            source, destination = destination, source
        # The link carries detached data; the receiving stage restores requires_grad.
        flags = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves(value)]
        plain = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, value)
        ready = link.ready(plain)

        def carry() -> None:
            start = time.perf_counter()
            try:
                arrive = link.carry(plain, ready, self._devices[destination])
            except BaseException as error:
                future.set_exception(error)
                return
            self._timeline.add(source, "copy", message.k, start)
            if not future.cancelled():
                future.set_result(lambda: _flagged(arrive(), flags))

        self._workers.carrier(source, destination).submit(carry)

    @override
    def get(self, message: Message) -> Any:
        return self._future(message).result()()

    def stop(self) -> None:
        """Cancel all current and future waits."""
        with self._lock:
            self._broken = True
            for future in self._futures.values():
                future.cancel()

    def _future(self, message: Message) -> "Future[Callable[[], Any]]":
        with self._lock:
            future = self._futures.setdefault(message, Future())
            if self._broken:
                future.cancel()
            return future


class ProgramCaller(Caller):
    """Runs a stage's programs directly."""

    def __init__(self, stage: StageProgram) -> None:
        self._stage = stage

    @override
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        program = self._stage.whole if which == "whole" else self._stage.split
        assert program is not None
        results: Sequence[Any] = program.module(*arguments)
        return results

    @override
    def parameters(self) -> list[nn.Parameter]:
        return list(self._stage.split.module.parameters())

    @override
    def before_backward(self, *, last: bool) -> None:
        pass  # `StageRun.add_to_grad` adds the gradients


class ThreadedBatch:
    """A single batch's forward and backward passes through all stages.

    Args:
        staging: the model's stages.
        workers: threads running the stages.
        inputs: batch, whole and split.
        mode: gradients, random seed and autocast.
        devices: device per stage.
        link: carries values between devices; None: stages share tensors.

    Attributes:
        timeline: the batch's events.
        runs: the batch in each stage, by stage index.
    """

    def __init__(
        self,
        staging: Staging,
        workers: Workers,
        inputs: Inputs,
        *,
        mode: Mode,
        devices: Sequence[torch.device],
        link: StageLink | None,
    ) -> None:
        self._workers, self._sizes, self._devices = workers, inputs.sizes, devices
        self.timeline = Timeline()
        self._exchange = ThreadExchange(workers, devices, link, self.timeline)
        flows = [StageFlow(staging, stage.index) for stage in staging.stages]
        self.runs = [
            StageRun(
                flow,
                ProgramCaller(flow.stage),
                StageValues(flow, inputs, self._exchange),
                mode=mode,
                timeline=self.timeline,
            )
            for flow in flows
        ]

    @property
    def num_splits(self) -> int:
        """Split count."""
        return len(self._sizes)

    def forward(self) -> None:
        """Run all splits forward. Raises StageError if a stage fails."""

        def job(run: StageRun) -> None:
            run.tables()
            for k in range(self.num_splits):
                run.forward(k)

        self._run_in_stages(job, self.runs, here=False)

    def result(self, name: str, k: int) -> Any:
        """Return the value ``name`` in the model's output, for split ``k``.

        If the batch runs with gradients, the value is attached to the autograd graph in the stage which
        computed it. The graph ends at this stage's inputs.
        """
        by_stage = [run.values.results for run in self.runs]
        return next(results[name, k] for results in by_stage if (name, k) in results)

    def backward(self, gradients: Mapping[tuple[str, int], Gradients]) -> dict[tuple[str, int], Gradients]:
        """Run all splits backward, then the tables.

        Parameter gradients are added to ``grad``.

        Args:
            gradients: gradients for values in the model's output, by value name and split.

        Returns:
            Gradients for batch values, by value name and split.

        Raises:
            StageError: a stage failed.
        """
        by_split: list[dict[str, Gradients]] = [{} for _ in self._sizes]
        for (name, k), given in gradients.items():
            by_split[k][name] = given

        def job(run: StageRun) -> None:
            for k in reversed(range(self.num_splits)):
                run.backward(k, by_split[k])
            run.add_to_grad()
            run.values.collect()

        here = autograd_uses_threads(self._devices)
        self._run_in_stages(job, self.runs[::-1], here=here)
        # Last, so that a failure leaves the tables unchanged.
        self._run_in_stages(lambda run: run.tables_backward(), self.runs, here=here)
        input_gradients: dict[tuple[str, int], Gradients] = {}
        for run in self.runs:
            for key, stage_gradients in run.values.input_gradients.items():
                input_gradients[key] = add_gradients(input_gradients.get(key), stage_gradients) or []
        return input_gradients

    def _run_in_stages(
        self, job: Callable[[StageRun], None], runs: Sequence[StageRun], *, here: bool
    ) -> None:
        def named(run: StageRun) -> None:
            try:
                job(run)
            except Exception as error:
                stage = run.stage
                raise StageError(
                    f"stage {stage.index} ({stage.name}), {run.where}: {type(error).__name__}: {error}"
                ) from error

        jobs = {run.stage.index: lambda r=run: named(r) for run in runs}
        self._workers.run(jobs, self._exchange.stop, here=here)


def autograd_uses_threads(devices: Sequence[torch.device]) -> bool:
    """Return whether autograd runs backward passes in a separate thread, as for GPUs.

    `ThreadedBatch.backward` then runs in this thread, and must run all stages backward itself: in other
    threads, they would wait for this thread, and it for them. It only launches kernels, so devices
    still run at the same time.
    """
    return any(device.type == "cuda" for device in devices)


def _flagged(value: Any, flags: Sequence[bool]) -> Any:
    flat, spec = pytree.tree_flatten(value)
    for leaf, flag in zip(flat, flags, strict=True):
        if flag:
            leaf.requires_grad_()
    return pytree.tree_unflatten(flat, spec)
