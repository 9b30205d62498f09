"""``meshrec train --on ray``: train with Ray workers as ranks."""

import dataclasses
import os
from collections.abc import Iterable

from meshrec.data.faults import needs
from meshrec.runs.job import Job
from meshrec.train.ray import trainer

# Job fields that are passed on to the workers. The others have separate arguments, or do not apply to Ray.
_FIELDS = ("source", "name", "resume", "changes", "profile", "baselines", "track", "rank_timeout", "keep")
# The name says Windows and macOS, but Ray reads the variable on every system; see `connect`.
_CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def train_on_ray(job: Job, num_workers: int, min_workers: int | None, max_failures: int) -> int:
    """Train on the Ray cluster at RAY_ADDRESS, or on a local cluster, and return the exit code.

    Args:
        job: recipe and run options.
        num_workers: number of workers.
        min_workers: minimum number of workers with which to continue after failures; None: all workers.
        max_failures: how many times Ray restarts the workers after a failure.

    Raises:
        ValueError: a number is out of range, the recipe does not fit it, or the run failed.
    """
    least = num_workers if min_workers is None else min_workers
    if not 1 <= least <= num_workers:
        raise ValueError(
            f"--num-workers {num_workers}, --min-workers {least}: the first must be at least 1, "
            "and the second "
            "from 1 to the first."
        )
    # Check here, because errors in workers are harder to read.
    for number in {least, num_workers}:
        job.recipe.check(number)
    connect(job.source)
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
    # Show the worker's error instead of Ray's traceback.
    except train.TrainingFailedError as error:
        raise ValueError(f"the run on Ray failed: {_last_error_line(error)}") from error
    metrics = {name: value for name, value in (result.metrics or {}).items() if isinstance(value, float)}
    print(", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))
    return 0


def connect(source: str | None) -> None:
    """Connect to the Ray cluster at RAY_ADDRESS, or start a cluster which only this machine can reach.

    Ray puts the current folder first in the workers' ``sys.path``, so a stray ``torch.py`` there would be
    imported. This is prevented, unless the user has named a recipe module, which may be in this folder.

    Args:
        source: recipe name as the user has given it; None: the recipe is not from a module.
    """
    module = "" if source is None else source.rpartition(":")[0]
    with_current_folder = bool(module) and not module.endswith(".py")
    is_local = "RAY_ADDRESS" not in os.environ
    if is_local:
        # Ray reads this variable on import. With 0, as on macOS, nodes use the loopback address.
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
    """List of module folders for Ray workers that ignores the current folder.

    Ray adds the current folder to its list by ``extend``, and does not have an option against this.
    """

    def extend(self, paths: Iterable[str]) -> None:
        """Append the paths, except for the current folder."""
        super().extend(path for path in paths if path != os.getcwd())


def _last_error_line(error: BaseException) -> str:
    """Return the last line of a failed worker's error, or of ``error`` itself if no worker failed."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        lines = str(failure).strip().splitlines()
        if lines:
            return lines[-1]
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
