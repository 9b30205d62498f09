"""Run stages in a single process: a worker thread per stage, and copy threads which copy between devices.

Every stage runs its forward passes from the first split to the last, and its backward passes from the last
split to the first. Sums over splits are therefore added in the same order in every run, and results do not
depend on thread speeds.
See [Note: units, stages, splits and lanes] in ``stages/__init__.py`` for the terms.
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
    """Threads which run stages, and copy threads which copy values between stages.

    The threads stay alive for later batches.
    """

    def __init__(self, num_workers: int, num_threads: int) -> None:
        self.num_threads = num_threads
        # One thread per pool, so that a stage's jobs always run in the same thread.
        self._pools = [ThreadPoolExecutor(1, f"meshrec-stage-{s}") for s in range(num_workers)]
        # A thread per (source, destination), created on first use and kept for later batches.
        self._copy_threads: dict[tuple[int, int], ThreadPoolExecutor] = {}
        for pool in self._pools:
            # Set in the thread itself, because OpenMP's thread count belongs to the calling thread.
            pool.submit(torch.set_num_threads, num_threads).result()

    def run(self, jobs: Mapping[int, Callable[[], None]], failed: Callable[[], None], *, here: bool) -> None:
        """Run a job for every stage, and wait until all jobs have ended. Raise the first error, if any.

        Args:
            failed: called when a job fails. It must end the other jobs, because they may wait for values
                which the failed job does not send.
            here: if True, run the jobs one after another in the calling thread.
        """
        if here:
            try:
                for job in jobs.values():
                    job()
            except BaseException:
                failed()
                raise
            return
        # In the order of failure. Later errors are usually consequences of the first, such as cancelled
        # waits.
        errors: list[BaseException] = []

        def guarded(job: Callable[[], None]) -> None:
            """Run a job. If it fails, store the error and call ``failed``."""
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
            # With a single worker, the pool runs the jobs one after another, in the order of ``jobs``.
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

    def copy_thread(self, source: int, destination: int) -> ThreadPoolExecutor:
        """Return the thread which copies values from stage ``source`` to stage ``destination``."""
        if (source, destination) not in self._copy_threads:
            name = f"meshrec-link-{source}-{destination}"
            self._copy_threads[source, destination] = ThreadPoolExecutor(1, name)
        return self._copy_threads[source, destination]


class ThreadExchange(Exchange):
    """Exchange of values and gradients between stage threads.

    Every message has a future, which the sender fills and on which the receiver waits.

    Args:
        link: copies tensors to the receiving stage's device, in a copy thread. If None, the receiving
            stage gets the sender's tensors without a copy.
    """

    def __init__(
        self, workers: Workers, devices: Sequence[torch.device], link: StageLink | None, timeline: Timeline
    ) -> None:
        self._workers, self._devices, self._link, self._timeline = workers, devices, link, timeline
        # For every message of the batch. Created by the sender or the receiver, whichever comes first.
        self._futures: dict[Message, Future[Callable[[], Any]]] = {}
        self._lock = threading.Lock()
        # Set by `stop`; from then on, every wait is cancelled.
        self._broken = False

    @override
    def put(self, message: Message, value: Any) -> None:
        """Make a value or its gradients available to the receiving stage, on that stage's device.

        A copy between devices runs in a copy thread. Without a link or tensors, nothing is copied.
        """
        future, link = self._future(message), self._link
        # The generator state is always on the host.
        if (
            link is None
            or message.name == GENERATOR
            or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        ):
            # Cancelled after a failure elsewhere; nobody waits any more.
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
        # In the sending stage's thread, because its CUDA stream is the current one there.
        ready = link.ready(plain)

        # Runs in a copy thread, so that the sending stage continues meanwhile.
        def carry() -> None:
            """Copy the value to the receiving stage's device, record the copy, and fulfill the future."""
            start = time.perf_counter()
            try:
                arrive = link.carry(plain, ready, self._devices[destination])
            except BaseException as error:
                # The receiving stage raises the error, and names the stage.
                future.set_exception(error)
                return
            self._timeline.add(source, "copy", message.k, start)
            if not future.cancelled():
                future.set_result(lambda: _set_requires_grad(arrive(), flags))

        self._workers.copy_thread(source, destination).submit(carry)

    @override
    def get(self, message: Message) -> Any:
        """Wait for a value or its gradients, and return them on the receiving stage's device."""
        # The first call waits for the message, the second runs `StageLink`'s function in this thread.
        return self._future(message).result()()

    def stop(self) -> None:
        """Cancel all waits for messages, now and later, so that no stage hangs after another has failed."""
        with self._lock:
            self._broken = True
            for future in self._futures.values():
                future.cancel()

    def _future(self, message: Message) -> "Future[Callable[[], Any]]":
        """Return the future for a message. Its result is a function which returns the value."""
        with self._lock:
            future = self._futures.setdefault(message, Future())
            if self._broken:
                future.cancel()
            return future


class ProgramCaller(Caller):
    """Caller of a stage's programs without a wrapper such as DistributedDataParallel."""

    def __init__(self, stage: StageProgram) -> None:
        self._stage = stage

    @override
    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        program = self._stage.batch_program if which == "whole" else self._stage.split_program
        assert program is not None
        results: Sequence[Any] = program.module(*arguments)
        return results

    @override
    def parameters(self) -> list[nn.Parameter]:
        """Return all parameters except tables."""
        return list(self._stage.split_program.module.parameters())

    @override
    def before_backward(self, *, last: bool) -> None:
        pass  # `StageRun.add_to_grad` adds the gradients


class ThreadedBatch:
    """Run of a batch through all stages, forward and then backward. Create an object for every batch.

    Args:
        link: copies values between devices. If None, stages share tensors.

    Attributes:
        timeline: events recorded for the batch.
        runs: a `StageRun` for every stage, in stage order.
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
        # A new exchange for every batch, so a failed batch leaves no messages behind.
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
        return len(self._sizes)

    def forward(self) -> None:
        """Look up the tables, and run the forward passes for all splits in all stages.

        Raises:
            StageError: a stage failed.
        """

        def job(run: StageRun) -> None:
            """Look up a stage's tables, and run the stage's forward passes."""
            run.tables()
            for k in range(self.num_splits):
                run.forward(k)

        self._run_in_stages(job, self.runs, here=False)

    def result(self, name: str, k: int) -> Any:
        """Return the value ``name``, which the model returns, for split ``k``.

        If gradients are enabled, the value's autograd graph reaches back to the inputs of the stage which
        computed it, and no further.
        """
        by_stage = [run.values.results for run in self.runs]
        return next(results[name, k] for results in by_stage if (name, k) in results)

    def backward(self, gradients: Mapping[tuple[str, int], Gradients]) -> dict[tuple[str, int], Gradients]:
        """Run the backward passes for all splits in all stages, and then for the table lookups.

        Parameter gradients are added to ``parameter.grad``, and tables with a fused optimizer are updated.

        Returns:
            Gradients for the batch values read by stages, by (value name, split index).

        Raises:
            StageError: a stage failed. The tables are unchanged, unless the table update itself failed.
        """
        by_split: list[dict[str, Gradients]] = [{} for _ in self._sizes]
        for (name, k), given in gradients.items():
            by_split[k][name] = given

        def job(run: StageRun) -> None:
            """Run a stage's backward passes, and collect the gradients for the stage's table lookups."""
            for k in reversed(range(self.num_splits)):
                run.backward(k, by_split[k])
            run.add_to_grad()
            # Gradients for this stage's table lookups from other stages, which tables_backward() needs.
            run.values.collect()

        here = autograd_uses_threads(self._devices)
        # Reversed, because in a single thread a stage needs the gradients of later stages first.
        self._run_in_stages(job, self.runs[::-1], here=here)
        # Last, so that a failure leaves the tables unchanged.
        self._run_in_stages(lambda run: run.tables_backward(), self.runs, here=here)
        input_gradients: dict[tuple[str, int], Gradients] = {}
        for run in self.runs:
            # Several stages may read the same batch value.
            for key, stage_gradients in run.values.input_gradients.items():
                input_gradients[key] = add_gradients(input_gradients.get(key), stage_gradients) or []
        return input_gradients

    def _run_in_stages(
        self, job: Callable[[StageRun], None], runs: Sequence[StageRun], *, here: bool
    ) -> None:
        """Run ``job`` for every stage, and raise StageError with the stage and the split if a job fails."""

        def run_job(run: StageRun) -> None:
            """Run the job for a stage, and raise StageError with the stage's name if the job fails."""
            try:
                job(run)
            except Exception as error:
                stage = run.stage
                raise StageError(
                    f"stage {stage.index} ({stage.name}), {run.where}: {type(error).__name__}: {error}"
                ) from error

        # A default argument, because a closure would see only the last run of the loop.
        jobs = {run.stage.index: lambda r=run: run_job(r) for run in runs}
        self._workers.run(jobs, self._exchange.stop, here=here)


def autograd_uses_threads(devices: Sequence[torch.device]) -> bool:
    """Return whether autograd runs backward passes in a thread per device: True if any device is CUDA.

    `ThreadedBatch.backward` is itself called by autograd, in the thread for a device. Backward passes in
    worker threads would need the same device thread and wait for it forever. All stages must then run
    backward in the calling thread. That thread only launches kernels, so the devices still compute at the
    same time.
    """
    return any(device.type == "cuda" for device in devices)


def _set_requires_grad(value: Any, flags: Sequence[bool]) -> Any:
    """Set ``requires_grad`` in place on every leaf with a True flag, and return ``value``.

    ``flags`` has an entry per leaf.
    """
    flat, spec = pytree.tree_flatten(value)
    for leaf, flag in zip(flat, flags, strict=True):
        if flag:
            leaf.requires_grad_()
    return pytree.tree_unflatten(flat, spec)
