"""Refit: train a run's model again on all rows, after validation data has selected the number of steps.

The refit is a run itself, in the folder ``final`` inside the run folder. Features, regression, trees and
embeddings learn from training, validation and test rows. No rows are left to evaluate the refit, so the
reported metrics are those of the first fit.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from meshrec.metrics.named import leading_text
from meshrec.planner import save_plan
from meshrec.runs.fitting import load_data
from meshrec.runs.job import Job
from meshrec.runs.saved_recipe import check_data, describe_data
from meshrec.runs.source import copy_source
from meshrec.runs.warm_start import warm_start
from meshrec.train.observers import Event, FolderObserver, Stepped
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import (
    CONFIG,
    FINAL,
    SUMMARY,
    RunFolder,
    StateName,
    make_folder,
    timestamp,
    to_json,
)
from meshrec.train.stopping import StopRequest
from meshrec.train.trainer import Trainer

if TYPE_CHECKING:
    from meshrec.data import Dataset


class Refit(NamedTuple):
    """Result of a refit on all rows.

    Attributes:
        recipe: recipe of the refit.
        step: last step of the refit.
        num_rows: number of training rows in the refit.
        num_first_rows: number of training rows in the first fit.
        is_stopped: whether a stop request ended the refit early.
    """

    recipe: Recipe
    step: int
    num_rows: int
    num_first_rows: int
    is_stopped: bool


def check_refit(job: Job) -> None:
    """Check that the requested refit on all rows is possible. Called before the first fit starts.

    Does nothing if no refit is requested.

    Raises:
        ValueError: the data source cannot provide all rows, or no checkpoints are saved in the run folder.
    """
    if job.final is None:
        return
    # Raises ValueError if the source does not support it.
    job.recipe.data.all_rows()
    if not job.keep or job.store is not None:
        given = "--no-checkpoints" if not job.keep else f"--out {job.store}"
        raise ValueError(
            f"--final all with {given}: the fit on all rows is stored in the run's folder. Leave one of them "
            "out."
        )


def _refit_recipe(recipe: Recipe, trainer: Trainer, dataset: "Dataset") -> Recipe:
    """Return the recipe for the refit on all rows.

    The refit makes as many passes over its rows as the first fit needed to reach the reported weights. The
    number of steps and the length of the learning rate schedule therefore grow with the number of rows.
    Evaluations, early stopping and publishing are switched off.

    Args:
        recipe: recipe of the first fit, but with all rows as training data.
    """
    # More rows need more steps for the same number of passes.
    growth = dataset.train.num_samples / trainer.dataset.train.num_samples
    step = trainer.evaluator.weights_step
    training = recipe.training
    max_steps = None if training.max_steps is None else max(1, round(training.max_steps * growth))
    # Model options found by `ModelConfig.start` in the first fit. From a checkpoint, tuples come as lists.
    options = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in trainer.progress.start_options.items()
    }
    return replace(
        recipe,
        model=replace(recipe.model, **options),
        training=replace(
            training,
            max_steps=max_steps,
            end_step=max(1, round(step * growth)) if step else 0,
            # No data is left for evaluations. Only the first fit publishes deltas.
            evaluate_every=None,
            patience=None,
            chance_patience=None,
            publish_every=None,
        ),
    )


def refit(
    job: Job,
    trainer: Trainer,
    folder: RunFolder,
    ranks: Ranks,
    *,
    stop: StopRequest,
    tell: Callable[[float], None],
) -> Refit:
    """Train the model again on all rows, in the folder ``final`` inside the run folder. Collective.

    If the folder has a checkpoint of an interrupted refit, continue from it.

    Args:
        job: run options.
        trainer: trainer of the first fit, which has finished.
        folder: run folder.
        ranks: the ranks, from `join`.
        stop: the user's request to stop, after which the refit ends early.
        tell: called with the finished share, from 0 to 1.
    """
    from meshrec.models.settings import copy_settings

    final = RunFolder(folder.path / FINAL, folder.is_trusted)
    if ranks.is_first and not final.path.exists():
        make_folder(final.path)
    # Rank 0 creates the folder, from which the other ranks read.
    ranks.wait_for_all()
    recipe = replace(job.recipe, data=job.recipe.data.all_rows())
    dataset = load_data(recipe.data, final, ranks, earlier=job.warm_start)
    recipe = _refit_recipe(recipe, trainer, dataset)
    observers: list[Callable[[Event], None]] = [FolderObserver(final)] if ranks.is_first else []

    def observe(event: Event) -> None:
        """Report the finished share of the steps to ``tell``, and pass the event to the observers."""
        if isinstance(event, Stepped):
            # `refit_trainer` is created below, before the first event.
            tell(event.step / max(refit_trainer.num_steps, 1))
        for observer in observers:
            observer(event)

    refit_trainer = Trainer(recipe, dataset, ranks, folder=final, observer=observe, stop=stop)
    # The refit has no validation data to select them on.
    copy_settings(trainer.built.model, refit_trainer.built.model)
    config = final.read_json(CONFIG)
    if config is not None:
        # An interrupted refit continues only on the same data.
        check_data(config, dataset, final.path)
    if not refit_trainer.resume() and job.warm_start is not None:
        warm_start(job, refit_trainer, final, ranks)
    if ranks.is_first:
        _write_config(job, recipe, refit_trainer, folder, final)
    ranks.wait_for_all()
    refit_trainer.run()
    if ranks.is_first:
        state: StateName = "stopped" if refit_trainer.stopped else "finished"
        final.write_json(SUMMARY, _summary(job, refit_trainer, state))
        final.write_state(state, step=refit_trainer.progress.step)
    ranks.wait_for_all()
    first_rows = trainer.dataset.train.num_samples
    return Refit(
        recipe, refit_trainer.progress.step, dataset.train.num_samples, first_rows, refit_trainer.stopped
    )


def _write_config(
    job: Job, recipe: Recipe, refit_trainer: Trainer, folder: RunFolder, final: RunFolder
) -> None:
    """Write the refit's ``config.json``, state and sharding plan. Rank 0 only."""
    # An earlier start of the same refit; empty for the first start.
    before = final.read_json(CONFIG) or {}
    plan = refit_trainer.built.plan
    config = {
        "recipe": to_json(recipe),
        "all_rows": True,
        "source": job.source,
        "code": copy_source(final, job.source, before.get("code")),
        "data": describe_data(refit_trainer.dataset),
        "ranks": refit_trainer.ranks.size,
        "device": refit_trainer.ranks.device.type,
        "baselines": False,
        "began": before.get("began", timestamp()),
        "first_fit": folder.path.name,
        "commands": {},
    }
    final.write_json(CONFIG, config, seal=True)
    final.write_state("running", step=refit_trainer.progress.step)
    if plan is not None:
        save_plan(plan, final.plan)


def _summary(job: Job, refit_trainer: Trainer, state: str) -> dict[str, Any]:
    """Return the content of the refit's ``summary.json``. It has no metrics, because no rows are left."""
    progress = refit_trainer.progress
    return {
        "state": state,
        "error": None,
        "recipe": job.recipe.name,
        "ranks": refit_trainer.ranks.size,
        "step": progress.step,
        "num_steps": refit_trainer.num_steps,
        "samples": progress.num_samples,
        "best_step": progress.step,
        "weights_step": progress.step,
        "ended_because": refit_trainer.ended_because,
        "validation": {},
        "test": {},
        "curves": {},
    }


def refit_summary(result: Refit, folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the entry for the refit in the summary of the first fit.

    Args:
        result: result of the refit.
        folder: run folder.
        summary: summary of the first fit.

    Returns:
        Plain values by name. ``text`` is an explanation for the user.
    """
    metrics = " and ".join(
        f"{data} {leading_text(summary[data])}" for data in ("validation", "test") if summary[data]
    )
    step, first = result.step, summary["weights_step"]
    text = (
        f"fitted again on all {result.num_rows:,} rows, where the first fit had {result.num_first_rows:,}: "
        f"{step:,} steps for {first:,}, as many passes over the rows. Export and predictions use this second "
        f"fit. The figures of this run ({metrics or 'none'}) are those of the first fit, which did not learn "
        "from these rows; nothing is left to judge the second."
    )
    return {
        "folder": str(folder.path / FINAL),
        "step": step,
        "first_step": first,
        "rows": result.num_rows,
        "first_rows": result.num_first_rows,
        "text": text,
    }


def can_refit(run: RunFolder, recipe: Recipe) -> bool:
    """Return whether a refit would learn from more rows: the run held back rows for validation or test."""
    samples = (run.read_json(CONFIG) or {}).get("data", {}).get("samples", {})
    if not samples.get("validation") and not samples.get("test"):
        return False
    # Some kinds of data sources cannot train on the rows they hold out.
    try:
        recipe.data.all_rows()
    except ValueError:
        return False
    return True
