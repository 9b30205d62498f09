"""Start a run from the weights, optimizer state and vocabularies of an earlier run.

The data and the features may differ from those of the earlier run. ``checkpoint/matching.py`` loads the
weights that fit, and `Features.continued` extends vocabularies and keeps other fitted values.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import nn

from meshrec.checkpoint import find_checkpoint, read_manifest
from meshrec.modules.boosted_trees import BoostedTrees
from meshrec.runs.fitting import FEATURES, features_of, of_first
from meshrec.runs.job import Job
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.run_folder import CONFIG, RunFolder
from meshrec.train.trainer import Trainer

if TYPE_CHECKING:
    from meshrec.train.stream_trainer import StreamTrainer

# Tensors with initial values that the screen lists.
_MAX_LINES = 10


def check_model(recipe: Recipe, earlier: RunFolder) -> None:
    """Check that an earlier run has a model of the recipe's kind, and a checkpoint.

    Raises:
        ValueError: the model is of another kind, or the run has no checkpoint.
    """
    config = earlier.read_json(CONFIG) or {}
    kind, now = config.get("recipe", {}).get("model", {}).get("type"), type(recipe.model).__name__
    if kind != now:
        raise ValueError(
            f"{earlier.path} was trained with the model {kind}, and the recipe has {now}: its weights do not "
            "fit. Start from a run of the same model, or without --from."
        )
    find_checkpoint(earlier.path)


def warm_start(
    job: Job, trainer: "Trainer | StreamTrainer", folder: RunFolder, ranks: Ranks
) -> dict[str, Any]:
    """Load the weights and optimizer state of the run ``job.warm_start`` into a new trainer. Collective.

    Args:
        job: run options.
        trainer: trainer of the new run, before its first step.
        folder: folder of the new run, with its fitted features.
        ranks: the ranks, from `join`.

    Returns:
        Plain values by name: the earlier run, and all differences from it; see `lines_of`.

    Raises:
        ValueError: the weights do not fit the new model or its features; raised on every rank.
    """
    earlier = job.warm_start
    assert earlier is not None
    # Other hosts may not see the features in the run folder.
    features: dict[str, Any] = of_first(ranks, lambda: _compare_features(trainer, earlier, folder))
    _check_positions(trainer.built.model, features, earlier)
    weights, last = find_checkpoint(earlier.path), find_checkpoint(earlier.path, last=True)
    if read_manifest(weights).step == read_manifest(last).step:
        weights = last
    # As many inputs as before, but others: the shapes do not tell that weights belong to other inputs.
    replaced = any(before != now and len(before) == len(now) for before, now in features["inputs"].values())
    differences = trainer.warm_start(
        weights, last, fresh_tables=features["fresh_tables"], tables_only=replaced
    )
    return {
        "folder": str(earlier.path.resolve()),
        "step": read_manifest(weights).step,
        "tables_only": replaced,
        "state_step": read_manifest(last).step,
        **{name: value for name, value in features.items() if name != "fresh_tables"},
        **asdict(differences),
    }


def _compare_features(
    trainer: "Trainer | StreamTrainer", earlier: RunFolder, folder: RunFolder
) -> dict[str, Any]:
    """Return the differences between the features of two runs, as plain values.

    Returns:
        ``added``, ``removed`` and ``changed``, names of features; ``inputs``, by "dense" and "ids" the names
        before and now in model order; and ``fresh_tables``, names of tables whose rows have another meaning.
    """
    saved = (earlier.read_json(CONFIG) or {}).get("data", {})
    ids_before, ids = list(saved.get("features", {})), [feature.name for feature in trainer.dataset.features]
    dense_before: Sequence[str] = [f"number {n}" for n in range(saved.get("num_dense", 0))]
    dense: Sequence[str] = [f"number {n}" for n in range(trainer.dataset.num_dense)]
    changed: list[str] = []
    fresh_tables: list[str] = []
    # Sources without fitted features describe only their ID features.
    if folder.read_json(FEATURES) is not None:
        before, now = features_of(earlier), features_of(folder)
        dense_before, dense = before.dense_names, now.dense_names
        changed = now.changed_since(before)
        fresh_tables = [feature.table or feature.name for feature in now.ids if feature.name in changed]
    names_before, names = [*dense_before, *ids_before], [*dense, *ids]
    return {
        "added": [name for name in names if name not in names_before],
        "removed": [name for name in names_before if name not in names],
        "changed": changed,
        "inputs": {"dense": [list(dense_before), list(dense)], "ids": [ids_before, ids]},
        "fresh_tables": fresh_tables,
    }


def _check_positions(model: nn.Module, features: Mapping[str, Any], earlier: RunFolder) -> None:
    """Check that weights that belong to an input by its position still belong to the same input."""
    for kind, (before, now) in features["inputs"].items():
        common = [name for name in now if name in before]
        if common != [name for name in before if name in now]:
            raise ValueError(
                f"the {kind} features of {earlier.path} are {before}, and the recipe has them in another "
                f"order, {now}: weights belong to positions. Order them as before, or start without --from."
            )
    trees = any(isinstance(module, BoostedTrees) for module in model.modules())
    if trees and (features["added"] or features["removed"]):
        raise ValueError(
            f"the model has boosted trees, which read features by position. Since {earlier.path}, features "
            f"{features['added']} were added and {features['removed']} removed. Take the same features, or "
            "start without --from."
        )


def lines_of(start: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines for the user that tell from which run training started, and every difference from it."""
    yield f"starting from {start['folder']}, weights of step {start['step']:,}"
    if start["state_step"] != start["step"]:
        yield f"optimizer state of step {start['state_step']:,}, the run's last"
    for name, about in (
        ("added", "new features"),
        ("removed", "features left out"),
        ("changed", "features with other options, which start again"),
    ):
        if start[name]:
            yield f"{about}: {', '.join(start[name])}"
    for table, (before, now) in start["grown"].items():
        yield f"table {table}: {before:,} rows continue, {now - before:,} are new"
    if start["tables_only"]:
        yield "features were replaced by others: only the tables continue, and all other weights start again"
    for name, (before, now) in list(start["fresh"].items())[:_MAX_LINES]:
        was = "new" if before is None else f"was {list(before)}"
        yield f"{name} {list(now)} has initial values ({was})"
    if len(start["fresh"]) > _MAX_LINES:
        yield f"and {len(start['fresh']) - _MAX_LINES} more tensors, which are in summary.json"
    if start["dropped"]:
        yield f"left out: {', '.join(start['dropped'])}"
    if start["fresh_state"]:
        yield f"without earlier optimizer state: {', '.join(start['fresh_state'])}"
