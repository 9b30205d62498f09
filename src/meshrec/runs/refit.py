"""Second fit of a run on all rows, after validation data has selected the number of steps.

The refit is a run itself, in the folder ``final`` inside the run: features, regression, trees and embeddings
learn from training, validation and test rows. No rows are left to evaluate it, so the run's metrics stay
those of the first fit.
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
        num_rows: training rows of the refit.
        num_first_rows: training rows of the first fit.
        is_stopped: whether a stop request ended the refit early.
    """

    recipe: Recipe
    step: int
    num_rows: int
    num_first_rows: int
    is_stopped: bool


def check_refit(job: Job) -> None:
    """Check that a run can be refitted on all rows, before the first fit.

    Raises:
        ValueError: the data has no source of all rows, or the run folder has no checkpoints.
    """
    if job.final is None:
        return
    job.recipe.data.all_rows()
    if not job.keep or job.store is not None:
        given = "--no-checkpoints" if not job.keep else f"--out {job.store}"
        raise ValueError(
            f"--final all with {given}: the fit on all rows is stored in the run's folder. Leave one of them "
            "out."
        )


def refit_recipe(recipe: Recipe, trainer: Trainer, dataset: "Dataset") -> Recipe:
    """Return the recipe for the refit on all rows.

    The refit makes as many passes over its rows as the first fit made up to the reported weights: steps and
    learning rate schedule grow with the number of rows.

    Args:
        recipe: recipe of the first fit, with all rows as training data.
        trainer: the finished first fit.
        dataset: all rows.
    """
    # The refit sees more rows, so as many passes take more steps.
    growth = dataset.train.num_samples / trainer.dataset.train.num_samples
    step = trainer.evaluator.weights_step
    training = recipe.training
    max_steps = None if training.max_steps is None else max(1, round(training.max_steps * growth))
    # Options from a checkpoint have lists instead of tuples.
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
    """Refit on all rows into the run folder, or continue from a checkpoint there. Collective.

    Args:
        job: run options.
        trainer: the finished first fit.
        folder: run folder.
        ranks: the ranks, from `join`.
        stop: stop request for an early end.
        tell: called with the finished share of the work.
    """
    final = RunFolder(folder.path / FINAL, folder.is_trusted)
    if ranks.is_first and not final.path.exists():
        make_folder(final.path)
    # Rank 0 creates the folder, from which the other ranks read.
    ranks.wait_for_all()
    recipe = replace(job.recipe, data=job.recipe.data.all_rows())
    dataset = load_data(recipe.data, final, ranks)
    recipe = refit_recipe(recipe, trainer, dataset)
    observers: list[Callable[[Event], None]] = [FolderObserver(final)] if ranks.is_first else []

    def observe(event: Event) -> None:
        if isinstance(event, Stepped):
            tell(event.step / max(again.num_steps, 1))
        for observer in observers:
            observer(event)

    again = Trainer(recipe, dataset, ranks, folder=final, observer=observe, stop=stop)
    config = final.read_json(CONFIG)
    if config is not None:
        check_data(config, dataset, final.path)
    again.resume()
    if ranks.is_first:
        _write_config(job, recipe, again, folder, final)
    ranks.wait_for_all()
    again.run()
    if ranks.is_first:
        state: StateName = "stopped" if again.stopped else "finished"
        final.write_json(SUMMARY, _summary(job, again, state))
        final.write_state(state, step=again.progress.step)
    ranks.wait_for_all()
    first_rows = trainer.dataset.train.num_samples
    return Refit(recipe, again.progress.step, dataset.train.num_samples, first_rows, again.stopped)


def _write_config(job: Job, recipe: Recipe, again: Trainer, folder: RunFolder, final: RunFolder) -> None:
    """Write ``config.json`` of the refit.

    Args:
        job: run options.
        recipe: recipe of the refit.
        again: trainer of the refit.
        folder: run folder.
        final: folder of the refit.
    """
    before = final.read_json(CONFIG) or {}
    plan = again.built.plan
    config = {
        "recipe": to_json(recipe),
        "all_rows": True,
        "source": job.source,
        "code": copy_source(final, job.source, before.get("code")),
        "data": describe_data(again.dataset),
        "ranks": again.ranks.size,
        "device": again.ranks.device.type,
        "baselines": False,
        "began": before.get("began", timestamp()),
        "first_fit": folder.path.name,
        "commands": {},
    }
    final.write_json(CONFIG, config, seal=True)
    final.write_state("running", step=again.progress.step)
    if plan is not None:
        save_plan(plan, final.plan)


def _summary(job: Job, again: Trainer, state: str) -> dict[str, Any]:
    """Return the content of the refit's ``summary.json``, which has no metrics."""
    progress = again.progress
    return {
        "state": state,
        "error": None,
        "recipe": job.recipe.name,
        "ranks": again.ranks.size,
        "step": progress.step,
        "num_steps": again.num_steps,
        "samples": progress.num_samples,
        "best_step": progress.step,
        "weights_step": progress.step,
        "ended_because": again.ended_because,
        "validation": {},
        "test": {},
        "curves": {},
    }


def refit_summary(result: Refit, folder: RunFolder, summary: dict[str, Any]) -> dict[str, Any]:
    """Return the entry for the refit in the summary of the first fit, with a sentence for the user.

    Args:
        result: the refit.
        folder: run folder.
        summary: summary of the first fit.
    """
    honest = " and ".join(
        f"{data} {leading_text(summary[data])}" for data in ("validation", "test") if summary[data]
    )
    step, first = result.step, summary["weights_step"]
    text = (
        f"fitted again on all {result.num_rows:,} rows, where the first fit had {result.num_first_rows:,}: "
        f"{step:,} steps for {first:,}, as many passes over the rows. Export and predictions use this second "
        f"fit. The figures of this run ({honest or 'none'}) are those of the first fit, which did not learn "
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
    """Return whether a run held back rows for validation or test, which a refit would learn from."""
    samples = (run.read_json(CONFIG) or {}).get("data", {}).get("samples", {})
    if not samples.get("validation") and not samples.get("test"):
        return False
    try:
        recipe.data.all_rows()
    except ValueError:
        return False
    return True
