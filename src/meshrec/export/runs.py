"""From a training run to a package."""

from pathlib import Path

import torch

from meshrec.checkpoint import find_checkpoint, load, read_manifest
from meshrec.export.package import export
from meshrec.modules.embedding_modules import TableCollection
from meshrec.train.fitting import data_of_run
from meshrec.train.losses import Tasks
from meshrec.train.run_folder import RunFolder
from meshrec.train.saved_recipe import load_recipe


def export_run(
    run: RunFolder, folder: str | Path, *, step: int | None = None, last: bool = False, compile: bool = True
) -> Path:
    """Writes the package of a run's model, with the weights that the run reports.

    Whatever the plan and the number of ranks of the run: this is one process, with whole tables.

    Args:
        run: the run.
        folder: the package, which must not be there yet.
        step, last: other weights, see ``meshrec.checkpoint.find_checkpoint``.
        compile: see `export`.

    Raises:
        ValueError: for a run whose recipe or checkpoint is not there, one of several labels, and as `export`.
    """
    checkpoint = find_checkpoint(run.path, step=step, last=last)
    recipe = load_recipe(run)
    if isinstance(recipe.loss, Tasks):
        raise ValueError(
            f"{run.path} learned {[task.name for task in recipe.loss.tasks]}, and a package gives one score. "
            "Export a module that returns one of them with meshrec.export.export, or use `meshrec predict`."
        )
    dataset = data_of_run(recipe.data, run)
    model = recipe.model.build(dataset)
    for child in model.modules():
        if isinstance(child, TableCollection):
            child.to_empty(device=torch.device("cpu"))
    load(checkpoint, {"model": model})
    about = {
        "run": run.path.name,
        "recipe": recipe.name,
        "step": read_manifest(checkpoint).step,
        "checkpoint": checkpoint.name,
    }
    features = [feature.name for feature in dataset.features]
    return export(
        model,
        folder,
        features=features,
        num_dense=dataset.num_dense,
        scores=recipe.loss.scores,
        about=about,
        compile=compile,
    )
