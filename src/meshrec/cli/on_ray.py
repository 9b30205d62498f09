"""``meshrec train --on ray``: the ranks are workers of Ray."""

import dataclasses
import os
from collections.abc import Iterable

from meshrec.data.faults import needs
from meshrec.runs.job import Job
from meshrec.train.ray import trainer

_FIELDS = ("source", "name", "resume", "changes", "profile", "baselines", "track", "rank_timeout", "keep")
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def train_on_ray(job: Job, num_workers: int, min_workers: int | None, max_failures: int) -> int:
    """Train on the cluster of Ray that RAY_ADDRESS names, or on a local one; return the exit code.

    Args:
        job: the options of the run.
        num_workers: the number of workers.
        min_workers: the smallest number of workers to continue with.
        max_failures: how often Ray starts the workers again.
    """
    least = num_workers if min_workers is None else min_workers
    if not 1 <= least <= num_workers:
        raise ValueError(
            f"--num-workers {num_workers}, --min-workers {least}: the first must be at least 1, "
            "and the second "
            "from 1 to the first."
        )
    for number in {least, num_workers}:
        job.recipe.check(number)
    module = None if job.source is None else job.source.rpartition(":")[0]
    _connect(with_current_folder=bool(module) and not str(module).endswith(".py"))
    train = needs("ray.train", "ray")
    scaling = train.ScalingConfig(
        num_workers=num_workers if least == num_workers else (least, num_workers),
        use_gpu=job.device == "cuda",
    )
    run_config = train.RunConfig(
        name=job.name,
        storage_path=str((job.runs / ".ray").absolute()),
        failure_config=train.FailureConfig(max_failures=max_failures),
    )
    options = {name: getattr(job, name) for name in _FIELDS}
    recipe = dataclasses.replace(job.recipe)
    try:
        result = trainer(recipe, scaling, out=job.runs, run_config=run_config, **options).fit()
    except train.TrainingFailedError as error:
        raise ValueError(f"the run on Ray failed: {_last_error_line(error)}") from error
    metrics = {name: value for name, value in (result.metrics or {}).items() if isinstance(value, float)}
    print(", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))
    return 0


def _connect(*, with_current_folder: bool) -> None:
    """Connect to the cluster that RAY_ADDRESS names, or start one that only this machine reaches.

    Ray puts the folder in which it is started first in its workers' ``sys.path``, so that a stray
    ``torch.py`` there would run. Only a recipe of a module, which the user has named, is looked for in it.

    Args:
        with_current_folder: whether workers import modules of the current folder.
    """
    is_local = "RAY_ADDRESS" not in os.environ
    if is_local:
        # Read when Ray is imported. If it is 0, as on macOS, a node's address is that of the loopback.
        os.environ[_CLUSTER_VARIABLE] = "0"
    ray = needs("ray", "ray")
    if ray.is_initialized():
        return
    job = needs("ray.job_config", "ray").JobConfig()
    if not with_current_folder:
        job._py_driver_sys_path = _WithoutCurrentFolder()
    options = {"address": "local", "include_dashboard": False} if is_local else {}
    ray.init(job_config=job, **options)


class _WithoutCurrentFolder(list[str]):
    """Folders of modules for Ray's workers. Ray adds the current folder, and has no option against that."""

    def extend(self, paths: Iterable[str]) -> None:
        super().extend(path for path in paths if path != os.getcwd())


def _last_error_line(error: BaseException) -> str:
    """Return the last line of a worker's error, or of the error itself."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        lines = str(failure).strip().splitlines()
        if lines:
            return lines[-1]
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
