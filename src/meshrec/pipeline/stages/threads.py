"""Stages in one process: one worker thread per stage, and carrier threads between devices.

Every stage processes the splits in order. The backward passes run from the last split to the first, so that
results equal those of the splits one after the other, whatever the speed of the workers.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshrec.pipeline.stages.links import StageLink
from meshrec.pipeline.stages.programs import StageFlow, StageProgram, Staging
from meshrec.pipeline.stages.running import GENERATOR, Caller, Mode, StageError, StageRun
from meshrec.pipeline.stages.timeline import Timeline
from meshrec.pipeline.stages.values import Exchange, Gradients, Inputs, StageValues, added


class Workers:
    """Worker threads, with ``num_threads`` torch threads each. A single worker runs all stages in turn."""

    def __init__(self, num_workers: int, num_threads: int) -> None:
        self.num_threads = num_threads
        self._pools = [ThreadPoolExecutor(1, f"meshrec-stage-{s}") for s in range(num_workers)]
        self._carriers: dict[tuple[int, int], ThreadPoolExecutor] = {}
        for pool in self._pools:
            pool.submit(torch.set_num_threads, num_threads).result()

    def run(self, jobs: Mapping[int, Callable[[], None]], failed: Callable[[], None], *, here: bool) -> None:
        """Run the jobs in the stages' threads, or one after the other in this thread.

        Raises the first error after calling ``failed``.
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
        # MKL's number of threads is the process's: the workers' holds while they work.
        if before != self.num_threads:
            torch.set_num_threads(self.num_threads)
        try:
            own = [
                self._pools[min(stage, len(self._pools) - 1)].submit(guarded, job)
                for stage, job in jobs.items()
            ]
            for future in own:
                future.result()
        finally:
            if before != self.num_threads:
                torch.set_num_threads(before)
        if errors:
            raise errors[0]

    def carrier(self, source: int, destination: int) -> ThreadPoolExecutor:
        """Return the carrier thread from one stage to the other."""
        if (source, destination) not in self._carriers:
            name = f"meshrec-link-{source}-{destination}"
            self._carriers[source, destination] = ThreadPoolExecutor(1, name)
        return self._carriers[source, destination]


class ThreadExchange(Exchange):
    """Values in futures. With a link, a separate thread carries them."""

    def __init__(
        self, workers: Workers, devices: Sequence[torch.device], link: StageLink | None, timeline: Timeline
    ) -> None:
        self._workers, self._devices, self._link, self._timeline = workers, devices, link, timeline
        self._futures: dict[tuple[str, int, int, int, str], Future[Callable[[], Any]]] = {}
        self._lock = threading.Lock()
        self._broken = False

    def put(self, name: str, k: int, value: Any, source: int, destination: int) -> None:
        future = self._future(name, k, source, destination, "value")
        if name == GENERATOR:  # its state is on the host, whatever the device
            if not future.cancelled():
                future.set_result(lambda: value)
            return
        self._send(future, value, source, destination, k)

    def get(self, name: str, k: int, source: int, destination: int) -> Any:
        return self._future(name, k, source, destination, "value").result()()

    def put_gradients(self, name: str, k: int, gradients: Gradients, source: int, destination: int) -> None:
        self._send(self._future(name, k, source, destination, "gradient"), gradients, destination, source, k)

    def get_gradients(self, name: str, k: int, source: int, destination: int) -> Gradients:
        found: Gradients = self._future(name, k, source, destination, "gradient").result()()
        return found

    def stop(self) -> None:
        """Cancel all current and future waits."""
        with self._lock:
            self._broken = True
            for future in self._futures.values():
                future.cancel()

    def _future(self, *key: Any) -> "Future[Callable[[], Any]]":
        with self._lock:
            future = self._futures.setdefault(key, Future())
            if self._broken:
                future.cancel()
            return future

    def _send(self, future: "Future[Any]", value: Any, source: int, destination: int, k: int) -> None:
        link = self._link
        if link is None or not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value)):
            if not future.cancelled():
                future.set_result(lambda: value)
            return
        # The link carries data; the graph is cut by the stage that takes it.
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
            self._timeline.add(source, "copy", k, start)
            if not future.cancelled():
                future.set_result(lambda: _flagged(arrive(), flags))

        self._workers.carrier(source, destination).submit(carry)


class ProgramCaller(Caller):
    """Runs the programs of a stage directly."""

    def __init__(self, stage: StageProgram) -> None:
        self._stage = stage

    def __call__(self, which: str, arguments: Sequence[Any]) -> Sequence[Any]:
        """Return the values that the program gives."""
        program = self._stage.whole if which == "whole" else self._stage.split
        assert program is not None
        results: Sequence[Any] = program.module(*arguments)
        return results

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of the program for splits."""
        return list(self._stage.split.module.parameters())

    def before_backward(self, *, last: bool) -> None:
        """Do nothing, because `StageRun.deliver` hands over the gradients."""


class ThreadedBatch:
    """One batch through all stages, forward and backward."""

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
        """Number of splits of the batch."""
        return len(self._sizes)

    def forward(self) -> None:
        """Run all stages. Raises StageError if one fails."""

        def job(run: StageRun) -> None:
            run.tables()
            for k in range(self.num_splits):
                run.forward(k)

        self._all(job, self.runs, here=False)

    def result(self, name: str, k: int) -> Any:
        """Return a value that the model returns for a split, with its graph."""
        found = [run.values.results for run in self.runs]
        return next(results[name, k] for results in found if (name, k) in results)

    def backward(self, gradients: Mapping[tuple[str, int], Gradients]) -> dict[tuple[str, int], Gradients]:
        """Return the gradients of the batch from those of the results, by name and split.

        The gradients of parameters are added to ``grad``.
        """
        by_split: list[dict[str, Gradients]] = [{} for _ in self._sizes]
        for (name, k), given in gradients.items():
            by_split[k][name] = given

        def job(run: StageRun) -> None:
            for k in reversed(range(self.num_splits)):
                run.backward(k, by_split[k])
            run.deliver()
            run.values.collect()

        here = has_own_backward_threads(self._devices)
        self._all(job, self.runs[::-1], here=here)
        # Tables are updated after everything else went well.
        self._all(lambda run: run.tables_backward(), self.runs, here=here)
        found: dict[tuple[str, int], Gradients] = {}
        for run in self.runs:
            for key, own in run.values.input_gradients.items():
                found[key] = added(found.get(key), own) or []
        return found

    def _all(self, job: Callable[[StageRun], None], runs: Sequence[StageRun], *, here: bool) -> None:
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


def has_own_backward_threads(devices: Sequence[torch.device]) -> bool:
    """Return whether autograd runs backward passes in threads of its own, as it does for every GPU.

    Such a thread calls `ThreadedBatch.backward`. Stages in other threads would wait for it, and it for them.
    It can run their passes itself: it only launches kernels, and the devices work side by side.
    """
    return any(device.type == "cuda" for device in devices)


def _flagged(value: Any, flags: Sequence[bool]) -> Any:
    flat, spec = pytree.tree_flatten(value)
    for leaf, flag in zip(flat, flags, strict=True):
        if flag:
            leaf.requires_grad_()
    return pytree.tree_unflatten(flat, spec)
