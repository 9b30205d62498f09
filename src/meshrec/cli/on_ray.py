"""``meshrec train --on ray``: the ranks are workers of Ray."""

import dataclasses

from meshrec.data.faults import needs
from meshrec.runs.job import Job
from meshrec.train.ray import trainer

_FIELDS = ("source", "name", "resume", "changes", "profile", "baselines", "track", "rank_timeout", "keep")


def train_on_ray(job: Job, num_workers: int, min_workers: int | None, max_failures: int) -> int:
    """Train on the cluster of Ray that RAY_ADDRESS names, or on a local one; return the exit code.

    Args:
        job: the options of the run.
        num_workers: the number of workers.
        min_workers: the smallest number of workers to go on with.
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
        raise ValueError(f"the run on Ray failed: {_cause(error)}") from error
    metrics = {name: value for name, value in (result.metrics or {}).items() if isinstance(value, float)}
    print(", ".join(f"{name} {value:.4f}" for name, value in sorted(metrics.items())))
    return 0


def _cause(error: BaseException) -> str:
    """Return the last line of a worker's error, or of the error itself."""
    failures = getattr(error, "worker_failures", None) or {}
    for failure in failures.values():
        lines = str(failure).strip().splitlines()
        if lines:
            return lines[-1]
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]
