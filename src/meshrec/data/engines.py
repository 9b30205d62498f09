"""Engines that fit features on a cluster: functions like ``map``; see `meshrec.data.features.fitting`.

The tasks are blocks of the data, such as Parquet row groups. A worker reads its blocks itself, so it must
reach the files. Results come back in any order, as statistics merge exactly in any order. Both engines repeat
tasks whose worker has died.
"""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from meshrec.data.faults import needs


def ray_engine(num_workers: int) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]:
    """Return an engine that runs tasks on the connected Ray cluster.

    Call ``ray.init`` before, and hand the engine to `meshrec.data.features.fitting.fit_features`.

    Args:
        num_workers: maximum number of tasks at the same time. A task takes a CPU.
    """
    ray: Any = needs("ray", "ray")

    def engine(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        # Sent to every node once: it contains the footers of all files.
        shared = ray.put(function)
        remote = ray.remote(max_retries=_RETRIES)(_call)
        remaining = deque(tasks)
        running: list[Any] = []
        while remaining or running:
            while remaining and len(running) < num_workers:
                running.append(remote.remote(shared, remaining.popleft()))
            finished, running = ray.wait(running, num_returns=1)
            for result in finished:
                try:
                    yield ray.get(result)
                except ray.exceptions.RayTaskError as error:
                    # The error of the task, without Ray's traceback in its message.
                    raise error.cause from error

    return engine


def dask_engine(num_workers: int) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]:
    """Return an engine that runs tasks on the Dask cluster at DASK_SCHEDULER_ADDRESS.

    Args:
        num_workers: maximum number of tasks at the same time.

    Raises:
        ValueError: DASK_SCHEDULER_ADDRESS is not set.
    """
    distributed: Any = needs("distributed", "dask")
    address = os.environ.get(_DASK_ADDRESS)
    if not address:
        # Without an address, Dask would start processes on this machine that any local user can reach.
        raise ValueError(
            f"{_DASK_ADDRESS} is not set. Set it to the address of a Dask scheduler, such as "
            "tcp://10.0.0.1:8786. On this machine alone, use --nproc."
        )

    def engine(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        remaining = deque(tasks)
        if not remaining:
            return
        with distributed.Client(address, set_as_default=False) as client:
            # Sent to every worker once: it contains the footers of all files.
            shared = client.scatter(function, broadcast=True, hash=False)
            submitted = [
                client.submit(_call, shared, remaining.popleft(), pure=False, retries=_RETRIES)
                for _ in range(min(num_workers, len(remaining)))
            ]
            running = distributed.as_completed(submitted, loop=client.loop)
            # Dask keeps a result as long as its future exists.
            del submitted
            for finished in running:
                if remaining:
                    running.add(
                        client.submit(_call, shared, remaining.popleft(), pure=False, retries=_RETRIES)
                    )
                yield finished.result()

    return engine


_RETRIES = 3
"""Times that a task is started again after its worker has died."""
_DASK_ADDRESS = "DASK_SCHEDULER_ADDRESS"
"""Variable that Dask's own tools read, too."""


def _call(function: Callable[[Any], Any], task: Any) -> Any:
    """Run a task on a worker."""
    return function(task)
