"""Load a run's model on any number of ranks, and score new data in data order."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from meshrec.checkpoint import find_checkpoint, load, read_manifest
from meshrec.modules.embedding_modules import TableCollection
from meshrec.optim import SGD
from meshrec.runs.fitting import description_of_run, features_of
from meshrec.runs.saved_recipe import describe_data, load_recipe
from meshrec.train.building import build_model
from meshrec.train.evaluation import Scored, score
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import DataSource, FittedSource, Recipe
from meshrec.train.run_folder import CONFIG, RunFolder

if TYPE_CHECKING:
    from meshrec.data import Batch, Dataset
    from meshrec.data.dataset import Paths
    from meshrec.data.faults import OnError
    from meshrec.data.features import Features, Vocabulary

_UNSEEN_WARNING_SHARE = 0.5
"""A feature gets a warning if at least this share of the values did not occur in training."""
_logger = logging.getLogger("meshrec")
# Sharding types under which a single rank sums all rows for a column, in the same order as a single process.
# Scores are then the same for any number of ranks.
_EXACT_SHARDING_TYPES = ("data_parallel", "table_wise", "column_wise", "table_column_wise")


class Scorer(NamedTuple):
    """A run's model, and the data to score.

    Attributes:
        model: model with trained weights.
        recipe: the run's recipe.
        dataset: dataset whose training part, ``dataset.train``, is the data to score.
        step: the weights' training step; None if the checkpoint does not record it.
        features: fitted features by which the data is read; None if the recipe has none.
    """

    model: nn.Module
    recipe: Recipe
    dataset: "Dataset"
    step: int | None
    features: "Features | None" = None


def load_scorer(
    run: RunFolder,
    ranks: Ranks,
    paths: "Paths",
    *,
    labelled: bool,
    on_error: "OnError | None" = None,
    step: int | None = None,
    last: bool = False,
) -> Scorer:
    """Load a run's model on the current ranks, and open the data to score. Collective.

    If the number of ranks is the same as in training, the run's sharding plan is used. Otherwise a new plan
    is made, which splits no table by rows, so that sums have the same order as in a single process.

    Args:
        run: the run.
        ranks: the ranks, from `join`.
        paths: data to score: files, folders or patterns, in the form of the run's training data.
        labelled: whether to read labels.
        on_error: how to handle damaged rows; None: as in the recipe.
        step, last: which weights to load if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.

    Raises:
        ValueError: the run or the checkpoint does not exist, or the data has another form.
    """
    recipe = load_recipe(run)
    dataset = open_data(_with_on_error(recipe.data, on_error), run, paths, labelled=labelled)
    model, step = load_model(run, ranks, recipe, dataset, step=step, last=last)
    features = features_of(run) if isinstance(recipe.data, FittedSource) else None
    return Scorer(model, recipe, dataset, step, features)


def load_model(
    run: RunFolder, ranks: Ranks, recipe: Recipe, dataset: "Dataset", *, step: int | None, last: bool
) -> tuple[nn.Module, int | None]:
    """Build a run's model on the current ranks, and load the weights. Collective.

    Args:
        run: the run.
        ranks: the ranks, from `join`.
        recipe: the run's recipe.
        dataset: dataset with the run's features, which determine the tables.
        step, last: which weights to load if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.

    Returns:
        The model, sharded if there are several ranks or hashed tables, and the weights' training step.
    """
    checkpoint = find_checkpoint(run.path, step=step, last=last)
    # Plain SGD, because scoring updates nothing and SGD allocates no optimizer state.
    scored = replace(recipe, tables=SGD(lr=0.0), training=replace(recipe.training, clip_norm=None))
    # Hashed tables exist only in sharded models, even on a single rank.
    sharded = ranks.size > 1 or any(feature.keys is not None for feature in dataset.features)
    model, _ = build_model(_with_placement(scored, run, ranks, sharded=sharded), dataset, ranks)
    load(checkpoint, {"model": model})
    return model, read_manifest(checkpoint).step


class TrainedModel(NamedTuple):
    """A run's unsharded model with trained weights, and the recipe it was trained with.

    Attributes:
        model: unsharded model on the CPU.
        recipe: the run's recipe.
        checkpoint: path of the checkpoint with the weights.
    """

    model: nn.Module
    recipe: Recipe
    checkpoint: Path


def load_trained_model(run: RunFolder, *, step: int | None = None, last: bool = False) -> TrainedModel:
    """Load a run's model into a single process, unsharded, with the reported weights.

    Args:
        run: the run.
        step: load the weights of this step instead.
        last: load the last weights instead of the best.
    """
    checkpoint = find_checkpoint(run.path, step=step, last=last)
    recipe = load_recipe(run)
    model = recipe.model.build(description_of_run(recipe.data, run))
    for child in model.modules():
        if isinstance(child, TableCollection):
            # Tables are built on the meta device. The checkpoint has values for all rows.
            child.to_empty(device=torch.device("cpu"))
    load(checkpoint, {"model": model})
    return TrainedModel(model, recipe, checkpoint)


def _with_on_error(source: DataSource, on_error: "OnError | None") -> DataSource:
    """Return a copy of a data source with another ``on_error`` option, or the source itself for None."""
    if on_error is None:
        return source
    if not hasattr(source, "on_error"):
        raise ValueError(
            f"{type(source).__name__} has no on_error: it cannot skip damaged rows. Leave --on-error out, "
            "and repair the data."
        )
    return replace(source, on_error=on_error)  # type: ignore[call-arg]


def open_data(source: DataSource, run: RunFolder, paths: "Paths", *, labelled: bool) -> "Dataset":
    """Open new data with the form of a run's training data.

    Args:
        source: the recipe's data source.
        run: the run.
        paths: new data: files, folders, patterns or a table.
        labelled: whether to read labels.

    Returns:
        Dataset with the new data as its training part.

    Raises:
        ValueError: the source cannot read files, or the columns no longer match the run.
    """
    if isinstance(source, FittedSource):
        return source.dataset_for_scoring(features_of(run), paths, labelled=labelled)
    dataset = source.load()
    if dataset.open is None:
        raise ValueError(
            f"{type(source).__name__} reads no files, so other data cannot be scored. Train "
            "on files, such as Parquet; or score in Python: Trainer.predict(reader)."
        )
    trained = (run.read_json(CONFIG) or {}).get("data", {})
    today = describe_data(dataset)
    # Sizes may differ for new data, but not the columns.
    for name in ("features", "num_dense"):
        if name in trained and trained[name] != today[name]:
            raise ValueError(
                f"{run.path} was trained on other columns: {name} were {trained[name]}, and its recipe has "
                f"{today[name]} now. Score with the recipe as it was, or train again."
            )
    return replace(dataset, train=dataset.open(paths, labelled), validation=None, test=None)


def _with_placement(recipe: Recipe, run: RunFolder, ranks: Ranks, *, sharded: bool) -> Recipe:
    """Return a recipe whose placement options (how tables are distributed) fit the current ranks.

    The run's plan is used if the run had as many ranks. Otherwise a new plan may use only sharding types
    under which scores do not depend on the number of ranks. A recipe that restricts types or memory itself
    keeps its restrictions instead.
    """
    placement = replace(recipe.placement, sharded=sharded)
    if sharded and placement.plan is None:
        if run.plan.is_file() and (run.read_json(CONFIG) or {}).get("ranks") == ranks.size:
            placement = replace(placement, plan=run.plan)
        elif placement.sharding_types is None and placement.memory_gib is None:
            placement = replace(placement, sharding_types=_EXACT_SHARDING_TYPES, replicate_mib=None)
    # Round up to a multiple of the current number of ranks, which may differ from the run's.
    batch = -(-recipe.training.batch_size // ranks.size) * ranks.size
    return replace(recipe, placement=placement, training=replace(recipe.training, batch_size=batch))


def gather_scores(scorer: Scorer, ranks: Ranks) -> Iterator[Scored]:
    """Score the data on all ranks, a global batch at a time.

    Collective: every rank must exhaust the iterator. At the end, rank 0 warns about features for which most
    values did not occur in training.

    Yields:
        On rank 0, the scores of a global batch, in data order. Other ranks yield nothing.
    """
    # Every rank counts local samples. The counts are summed at the end.
    unseen = _UnseenValues(scorer.features)
    for local_outputs in score(scorer.model, scorer.dataset.train, ranks, watch=unseen):
        outputs_by_rank = ranks.collect(local_outputs)
        if ranks.is_first:
            yield Scored.concat(outputs_by_rank)
    unseen.warn(ranks)


def _vocabularies(features: "Features") -> "list[Vocabulary]":
    """Return the features that map values to table rows by a vocabulary."""
    from meshrec.data.features import Vocabulary

    return [feature for feature in features.ids if isinstance(feature, Vocabulary)]


class _UnseenValues:
    """Counts, per feature, the scored values and how many of them are not in the training vocabulary.

    Call it with every batch.
    """

    def __init__(self, features: "Features | None") -> None:
        self._features = [] if features is None else _vocabularies(features)
        # Two counts per feature: values, and unseen values.
        self._counts = [0.0] * (2 * len(self._features))

    def __call__(self, batch: "Batch") -> None:
        for number, feature in enumerate(self._features):
            ids = batch.sparse[feature.name].values()
            # ID 0 stands for a missing value, and the next `num_unseen` IDs for values unseen in training.
            self._counts[2 * number] += int((ids > 0).sum())
            self._counts[2 * number + 1] += int(((ids > 0) & (ids <= feature.num_unseen)).sum())

    def warn(self, ranks: Ranks) -> None:
        """Log a warning for every feature for which at least half of the values are unseen. Collective."""
        # Collective, so all ranks call it, although only rank 0 warns.
        counts = ranks.sum(self._counts) if self._counts else []
        for number, feature in enumerate(self._features):
            # Two counts per feature: all values, and the unseen ones.
            num, unseen = counts[2 * number : 2 * number + 2]
            if ranks.is_first and num and unseen / num >= _UNSEEN_WARNING_SHARE:
                examples = feature.vocabulary.slice(0, 3).to_pylist()
                _logger.warning(
                    "feature %r: %.1f %% of the %s values of column %r did not occur in training, and are "
                    "all alike to the model. Compare the column with the training data, which holds %s, or "
                    "train anew on newer data.",
                    feature.name,
                    100 * unseen / num,
                    f"{num:,.0f}",
                    feature.source,
                    ", ".join(map(repr, examples)),
                )
