"""Hyperparameter search. Optuna proposes trials, stores them in a file, and prunes those that lag behind."""

import contextlib
import dataclasses
import errno
import json
import logging
import os
import sqlite3
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshrec.data.faults import did_you_mean, needs
from meshrec.metrics.named import quality
from meshrec.train.observers import Evaluated, Event
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import Recipe
from meshrec.train.stopping import StopRequest
from meshrec.train.trainer import Trainer

if TYPE_CHECKING:
    import optuna

    from meshrec.data import Dataset

Tell = Callable[[str], None]


class Range(NamedTuple):
    """Search space for an option: all values from ``low`` to ``high``, integers only if both are integers.

    Attributes:
        low: smallest value.
        high: largest value, inclusive.
        log: whether values are drawn uniformly on a logarithmic scale.
    """

    low: float
    high: float
    log: bool

    def suggest(self, trial: "optuna.Trial", name: str) -> Any:
        """Let Optuna propose a value for a trial."""
        if isinstance(self.low, int) and isinstance(self.high, int):
            return trial.suggest_int(name, self.low, self.high, log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


class Choices(NamedTuple):
    """Search space for an option: listed values."""

    values: tuple[Any, ...]

    def suggest(self, trial: "optuna.Trial", name: str) -> Any:
        """Let Optuna propose a value for a trial."""
        return trial.suggest_categorical(name, self.values)


Space = Mapping[str, Range | Choices]


class Spread(NamedTuple):
    """Mean and standard deviation of a metric over several seeds.

    Attributes:
        mean: mean value.
        deviation: standard deviation.
        values: value per seed.
    """

    mean: float
    deviation: float
    values: list[float]


def read_space(words: Sequence[str], recipe: Recipe) -> dict[str, Range | Choices]:
    """Parse the command-line description of a search space.

    Args:
        words: a description per option, such as ``tables.lr=1e-4..1e-1:log`` or
            ``model.embedding_dim=8,16,32``. If empty, search both learning rates, from a tenth to ten times
            the recipe's values.
        recipe: the recipe, which must have the options.

    Returns:
        Search space by option name.

    Raises:
        ValueError: a word has another form, or the recipe has no such option.
    """
    if not words:
        # Logarithmic, because learning rates matter by their ratio.
        rates = {"tables.lr": float(recipe.tables.lr), "dense.lr": recipe.dense.lr}
        return {name: Range(rate / 10, rate * 10, True) for name, rate in rates.items()}
    space: dict[str, Range | Choices] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not values:
            raise ValueError(
                f"--space {word}: write it as tables.lr=1e-4..1e-1:log, or as model.embedding_dim=8,16,32."
            )
        # Raises if there is no such option, before the first trial starts.
        get_option(recipe, name)
        space[name] = _parse_values(values, word)
    return space


def _parse_values(text: str, word: str) -> Range | Choices:
    """Parse the values of an option: ``LOW..HIGH``, ``LOW..HIGH:log`` or ``A,B,C``."""
    ends, _, scale = text.partition(":")
    low, dots, high = ends.partition("..")
    if not dots:
        return Choices(tuple(_parse_literal(part) for part in text.split(",")))
    first, last = _parse_literal(low), _parse_literal(high)
    if not isinstance(first, int | float) or not isinstance(last, int | float) or scale not in ("", "log"):
        raise ValueError(f"--space {word}: a range is LOW..HIGH or LOW..HIGH:log, of numbers. Correct it.")
    if not first < last or (scale and first <= 0):
        raise ValueError(f"--space {word}: LOW must be below HIGH, and above 0 for log. Correct it.")
    return Range(first, last, bool(scale))


def _parse_literal(text: str) -> Any:
    """Parse a value as JSON, or else as a string."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def get_option(recipe: Recipe, name: str) -> Any:
    """Return a recipe option's value by dotted name, such as "tables.lr".

    Raises:
        ValueError: the option does not exist.
    """
    value: Any = recipe
    for part in name.split("."):
        if not dataclasses.is_dataclass(value) or part not in {
            field.name for field in dataclasses.fields(value)
        }:
            raise ValueError(
                f"recipe {recipe.name!r} has no option {name!r}. `meshrec train RECIPE --help` lists them."
                f"{did_you_mean(name, _option_names(recipe))}"
            )
        value = getattr(value, part)
    return value


def _option_names(holder: Any, prefix: str = "") -> Iterator[str]:
    """Yield all dotted option names in a recipe, or in a part of it."""
    for field in dataclasses.fields(holder):
        value, name = getattr(holder, field.name), f"{prefix}{field.name}"
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield from _option_names(value, f"{name}.")
        else:
            yield name


def with_options(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """Return a copy of a recipe with other values for some options.

    Args:
        recipe: the recipe.
        values: new values by dotted option name.

    Raises:
        ValueError: an option does not exist, or its value has a wrong type or is not allowed.
    """
    for name, value in values.items():
        present = get_option(recipe, name)
        try:
            recipe = _with_value(recipe, name.split("."), value)
        except TypeError as error:  # a check of the recipe that compares values
            raise ValueError(f"{name} is {value!r}; it must be a value such as {present!r}.") from error
    return recipe


def _with_value(holder: Any, path: Sequence[str], value: Any) -> Any:
    """Return a copy of nested dataclasses with a new value for the field at a path."""
    first, *inner = path
    new = _with_value(getattr(holder, first), inner, value) if inner else value
    return dataclasses.replace(holder, **{first: new})


class BestTrial(NamedTuple):
    """Best trial in a study.

    Attributes:
        values: option values by name.
        worth: result of the trial; higher is better.
        trial: trial number.
        num_trials: number of all trials in the study.
    """

    values: dict[str, Any]
    worth: float
    trial: int
    num_trials: int


def tune(
    recipe: Recipe,
    ranks: Ranks,
    space: Space,
    *,
    trials: int,
    storage: Path,
    seed: int = 0,
    tell: Tell = lambda text: None,
) -> BestTrial:
    """Search for the best option values. Train variants of a recipe, and record the results. Collective.

    A variant is called a trial, and all trials together are a study. If ``storage`` already has a study of
    this recipe, the search continues this study, and its finished trials count. The result of a trial is the
    best validation AUC, or the negative loss for numeric labels. A trial that lags behind the others is
    pruned (ended early).

    Args:
        recipe: the recipe to tune.
        ranks: the ranks, which train all trials together. Rank 0 proposes the values.
        space: search space by option name; see `read_space`.
        trials: number of trials in the study, including those of earlier calls.
        storage: SQLite file for the study.
        seed: seed for the proposals.
        tell: prints a line for the user.

    Returns:
        The best trial, equal on all ranks.

    Raises:
        ValueError: ``trials`` is below 1, the file is not a study, or the recipe has no validation data.
    """
    if trials < 1:
        raise ValueError(f"--trials is {trials}; it must be at least 1.")
    search = needs("optuna", "tune")
    # Load the data once for all trials, unless trials change data options.
    dataset = None if any(name.startswith("data.") for name in space) else recipe.data.load()

    def train(values: Mapping[str, Any], trial: "optuna.Trial | None" = None) -> float:
        """Train the variant with these option values, and return the result of `_train_trial`."""
        variant = with_options(recipe, values)
        variant.check(ranks.size)
        return _train_trial(variant, dataset or variant.data.load(), ranks, trial)

    # Other ranks follow rank 0: they train the values that it shares until it shares None, and then the
    # result.
    if not ranks.is_first:
        while (values := ranks.broadcast(None)) is not None:
            train(values)
        # The value that rank 0 shares last.
        best: BestTrial = ranks.broadcast(None)
        return best
    search.logging.set_verbosity(search.logging.WARNING)
    with _preserved_logging(), _named_errors(storage):
        study: optuna.Study = search.create_study(
            study_name=recipe.name,
            storage=f"sqlite:///{storage}",
            direction="maximize",
            load_if_exists=True,
            sampler=search.samplers.TPESampler(seed=seed),
            # Pruning starts after five trials, and after the first evaluation of a trial.
            pruner=search.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1),
        )
    # Trials that were interrupted in an earlier call do not count.
    num_finished = sum(trial.state.is_finished() for trial in study.trials)

    def objective(trial: "optuna.Trial") -> float:
        """Propose option values, share them with all ranks, and return the trial's result."""
        values = ranks.broadcast({name: options.suggest(trial, name) for name, options in space.items()})
        worth = train(values, trial)
        tell(f"trial {trial.number}: {worth:.5f}  {_format_values(values)}")
        return worth

    with _named_errors(storage):
        # Errors of a trial end the search, except pruning.
        study.optimize(objective, n_trials=max(0, trials - num_finished), catch=())
    ranks.broadcast(None)
    number = study.best_trial.number
    result: BestTrial = ranks.broadcast(
        BestTrial(study.best_params, study.best_value, number, len(study.trials))
    )
    return result


@contextlib.contextmanager
def _named_errors(storage: Path) -> Iterator[None]:
    """Context manager that converts SQLite errors: to an OSError if the disk is full, else to a ValueError.

    The new error names the file.
    """
    try:
        yield
    # Optuna and SQLAlchemy wrap the error of SQLite, so the chain of causes is searched.
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, sqlite3.Error):
            cause = cause.__cause__
        if cause is None:
            raise
        if "disk is full" in str(cause):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(storage)) from error
        raise ValueError(
            f"--storage {storage}: {cause}. Give the SQLite file of a study, or a path without a file."
        ) from error


@contextlib.contextmanager
def _preserved_logging() -> Iterator[None]:
    """Context manager that keeps Optuna from configuring logging, which would disable other loggers."""
    # It configures logging only if the root logger has no handler.
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)


def _train_trial(recipe: Recipe, dataset: "Dataset", ranks: Ranks, trial: "optuna.Trial | None") -> float:
    """Train a variant of the recipe for a trial. Collective.

    Returns:
        Best validation metric on rank 0; 0 on other ranks.
    """
    search = needs("optuna", "tune")
    best: list[float] = []
    # Pruning uses a stop request, so that all ranks stop at the same step.
    stop = StopRequest()

    def observe(event: Event) -> None:
        """Report validation results to Optuna, and request a stop if the trial should be pruned."""
        assert trial is not None
        if isinstance(event, Evaluated) and event.line["kind"] == "validation":
            worth = quality(dict(event.line))
            if worth is not None:
                best.append(worth)
                # The best value so far, because a finished trial returns the best value, too. Pruning then
                # compares like with like.
                trial.report(max(best), len(best))
                if trial.should_prune():
                    stop.request()

    trainer = Trainer(recipe, dataset, ranks, observer=observe if ranks.is_first else None, stop=stop)
    trainer.run()
    if trial is None:
        return 0.0
    if trainer.stopped:
        raise search.TrialPruned
    if not best:
        raise ValueError("nothing was evaluated: tuning needs validation data. Give the recipe some.")
    return max(best)


def train_seeds(
    recipe: Recipe, ranks: Ranks, num: int, *, tell: Tell = lambda text: None
) -> dict[str, Spread]:
    """Train a recipe with several seeds, to measure how much the metrics vary. Collective.

    The seed determines initial weights and sample order. The data is the same.

    Args:
        recipe: the recipe.
        ranks: the ranks, from `join`.
        num: seed count, at least 2.
        tell: prints a line for the user.

    Returns:
        Mean and standard deviation of every test metric, or without test data, of every validation metric.

    Raises:
        ValueError: ``num`` is below 2.
    """
    if num < 2:
        raise ValueError(f"--seeds is {num}; a deviation needs at least 2.")
    # One dataset for all seeds: the spread is that of training, not of the split or the samples.
    dataset = recipe.data.load()
    values_by_metric: dict[str, list[float]] = {}
    for seed in range(num):
        trainer = Trainer(with_options(recipe, {"training.seed": seed}), dataset, ranks)
        trainer.run()
        metrics = trainer.test or trainer.validation
        tell(f"seed {seed}: {_format_values(metrics)}")
        for name, value in metrics.items():
            values_by_metric.setdefault(name, []).append(value)
    return {
        name: Spread(statistics.fmean(values), statistics.stdev(values), values)
        for name, values in values_by_metric.items()
        # Leave out metrics that are undefined for some seeds.
        if len(values) == num
    }


def _format_values(values: Mapping[str, Any]) -> str:
    """Format values by name on a single line."""
    return "  ".join(
        f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in values.items()
    )
