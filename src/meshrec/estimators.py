"""scikit-learn estimators for Python programs and notebooks.

`fit` runs the functions behind `meshrec inspect` and `meshrec train` in a temporary folder, with the same
defaults. So scores are bitwise equal to those from the commands. The folder is removed with the estimator.
"""

import io
import json
import logging
import os
import random
import re
import sys
import tarfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from meshrec.cli.inspect import InspectOptions, inspect_table, recipe_text
from meshrec.cli.inspect_log import NextItemModel, recipe_of_log
from meshrec.data.faults import needs
from meshrec.data.frames import to_table
from meshrec.data.locations import is_address
from meshrec.data.log_columns import LogColumns
from meshrec.data.propose import propose
from meshrec.data.propose_label import Task
from meshrec.durable import durable_folder, make_scratch, remove_scratch
from meshrec.metrics.named import leading_text
from meshrec.runs.calibrated import CalibrationKind, Curve, fit_run_curve
from meshrec.runs.contributions import contributions
from meshrec.runs.evaluating import evaluate_scorer
from meshrec.runs.job import Job
from meshrec.runs.recommending import (
    load_recommender,
    recommendation_tables,
    recommendations,
    similar_items,
)
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.scoring import Scorer, gather_scores, load_scorer, open_data
from meshrec.runs.worker import run_rank
from meshrec.train.evaluation import Scored
from meshrec.train.observers import Evaluated, Event, Finished, Reported, Started, Stepped
from meshrec.train.ranks import choose_device, join
from meshrec.train.run_folder import CONFIG, RunFolder, finished_refit
from meshrec.train.tuning import with_options

# A missing package is an error that names the extra to install. It is raised on import, because
# scikit-learn's base classes are needed for the classes below.
_base = needs("sklearn.base", "estimators")
_checks = needs("sklearn.utils.validation", "estimators")
_multiclass = needs("sklearn.utils.multiclass", "estimators")

# Shape legend: n rows, C classes, d columns.

# Names in the temporary folder: training data, run folder, and description for ``load``.
_DATA, _RUN, _ABOUT = "data.parquet", "run", "estimator.json"
# An option of a command in an error message, such as --skip-unlabelled.
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z-]*(?:\.[a-z-]+)*)")
E = TypeVar("E", bound="_Estimator")
_logger = logging.getLogger("meshrec")


class _Estimator(_base.BaseEstimator):  # type: ignore[misc, name-defined]
    """Base class for estimators.

    `fit` trains a run in a temporary folder; pickles and `save` include the run.
    """

    _folder: Path | None = None
    """Temporary folder, set by `fit` or `load`. Removed when the estimator is garbage-collected."""
    _library = "pyarrow"
    """Library of the data given to `fit`, which results also use: "pandas", "polars" or "pyarrow"."""

    @property
    def run_(self) -> Path:
        """Folder with the trained run, for commands such as `meshrec export RUN --out model`.

        With ``final="all"``, the folder with the refit on all rows.
        """
        _checks.check_is_fitted(self)
        assert self._folder is not None
        final = finished_refit(RunFolder(self._folder / _RUN))
        return self._folder / _RUN if final is None else final.path

    def __sklearn_is_fitted__(self) -> bool:
        return self._folder is not None

    def _new_folder(self) -> Path:
        """Create a new temporary folder, and remove the folder from an earlier `fit`."""
        # ``_opened``: model, recipe, step and features. Loaded by the first prediction, dropped by the next
        # `fit`.
        before, self._opened = self._folder, list[Any]()
        folder = make_scratch("meshrec-estimator")
        # Also runs at interpreter exit.
        weakref.finalize(self, remove_scratch, folder)
        if before is not None:
            remove_scratch(before)
        self._folder = folder
        return folder

    @contextmanager
    def _fit_folder(self) -> Iterator[Path]:
        """Create a new temporary folder for `fit`, and remove it if the ``with`` block raises an error."""
        folder = self._new_folder()
        try:
            with self._python_messages():
                yield folder
        except BaseException:
            # So the estimator counts as not fitted.
            self._folder = None
            remove_scratch(folder)
            raise

    @contextmanager
    def _python_messages(self) -> Iterator[None]:
        """Reword errors in the ``with`` block: arguments instead of options, and no temporary paths."""
        try:
            yield
        except Exception as error:
            if error.args and isinstance(error.args[0], str):
                text = _without_options(error.args[0])
                files = [] if self._folder is None else [*self._folder.rglob(_DATA)]
                # The file of the caller's table, which some messages name without its folder.
                for name in [*map(str, files), *([_DATA] if files else [])]:
                    text = text.replace(name, "the table")
                if self._folder is not None:
                    text = text.replace(str(self._folder / _RUN), "the model")
                error.args = (text, *error.args[1:])
            raise

    def _paths(self, data: Any, folder: Path) -> tuple[str, ...]:
        """Return paths of the training data."""
        if _are_paths(data):
            return tuple(_absolute_path(path) for path in ([data] if isinstance(data, str | Path) else data))
        pq.write_table(to_table(data), folder / _DATA)
        return (str(folder / _DATA),)

    def _train(self, text: str, folder: Path) -> None:
        """Train a recipe with this estimator's options, and set ``recipe_`` and ``summary_``."""
        names: dict[str, Any] = {}
        # Safe, because recipe_text or recipe_of_log has generated this code.
        exec(compile(text, "recipe.py", "exec"), names)
        recipe = with_options(names["recipe"](), self.options or {})
        # Check for a single rank: an estimator trains in this process.
        recipe.check(1)
        self.recipe_ = text
        # With a source that is not code, the run's configuration holds the whole recipe, and `load` executes
        # no code.
        job = Job(
            recipe=recipe, source="recipe.yaml", name=_RUN, runs=folder, device=self.device, final=self.final
        )
        # An observer shows the progress: a line on standard error, or nothing.
        with _preserved_random_state():
            self.summary_ = run_rank(job, lambda _: _ProgressLine() if self.verbose else _silent)

    def _evaluate_run(self, data: Any) -> dict[str, float]:
        """Compute metrics on labelled data.

        Warns if the model was fitted on all rows, without held-out data.
        """
        if (RunFolder(self.run_).read_json(CONFIG) or {}).get("all_rows"):
            _logger.warning(
                "%s was fitted on all rows of its data: figures on these rows are too good. summary_ has "
                "those of rows that the first fit did not learn from.",
                type(self).__name__,
            )
        with self._python_messages():
            ranks = join(choose_device(self.device))
            evaluated = evaluate_scorer(self._scorer(data, labelled=True), ranks)
        assert evaluated is not None
        return evaluated.metrics

    def _scorer(self, data: Any, *, labelled: bool) -> Scorer:
        """Return a scorer for some data with the trained model. The model is loaded only once."""
        run = RunFolder(self.run_)
        # Tables are converted to Arrow. Files are read while scoring.
        paths = data if _are_paths(data) else to_table(data)
        if not self._opened:
            scorer = load_scorer(run, join(choose_device(self.device)), paths, labelled=labelled)
            self._opened += (scorer.model, scorer.recipe, scorer.step, scorer.features)
            return scorer
        model, recipe, step, features = self._opened
        dataset = open_data(recipe.data, run, paths, labelled=labelled)
        return Scorer(model, recipe, dataset, step, features)

    def save(self, folder: str | Path) -> None:
        """Write the trained model to a new folder, for `load`. Training data is not included.

        Args:
            folder: folder to create. It must not exist, or be empty.

        Raises:
            FileExistsError: the folder has files, or is a file.
        """
        path = Path(folder)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise FileExistsError(f"{folder} exists already, and is no empty folder. Name another folder.")
        # ``load`` needs the constructor arguments, and the attributes set by ``fit``.
        about = {
            "class": type(self).__name__,
            "params": self.get_params(),
            "fitted": self._fitted_attributes(),
        }
        run = self.run_
        with durable_folder(path) as parts:
            (parts / _ABOUT).write_text(json.dumps(about, default=_to_json) + "\n", encoding="utf-8")
            _unpack_run(_pack_run(run), parts)

    @classmethod
    def load(cls: type[E], folder: str | Path) -> E:
        """Load an estimator from a folder written by `save`. No code in the folder is executed.

        Args:
            folder: the folder.

        Raises:
            ValueError: no estimator, or one of another class, was saved there.
        """
        if not (Path(folder) / _ABOUT).is_file():
            raise ValueError(f"{folder} holds no saved estimator. Name a folder that `save` wrote.")
        about = json.loads((Path(folder) / _ABOUT).read_text(encoding="utf-8"))
        if about["class"] != cls.__name__:
            raise ValueError(
                f"{folder} holds a {about['class']}, not a {cls.__name__}. Call "
                f"meshrec.{about['class']}.load."
            )
        estimator = cls(**about["params"])
        _unpack_run(_pack_run(Path(folder) / _RUN), estimator._new_folder())
        for name, value in about["fitted"].items():
            # JSON turns these arrays into lists.
            setattr(estimator, name, np.array(value) if name in ("classes_", "feature_names_in_") else value)
        return estimator

    def _fitted_attributes(self) -> dict[str, Any]:
        """Return the attributes that `fit` has set and `save` must store, by name."""
        # scikit-learn's convention: attributes set by ``fit`` end with an underscore.
        names = ("_library", "_positive", "_target")
        return {
            name: value
            for name, value in vars(self).items()
            if name in names or (name.endswith("_") and name[0] != "_")
        }

    def _to_library(self, table: pa.Table) -> Any:
        """Convert an Arrow table to the library of the data given to `fit`."""
        if self._library == "pandas":
            return table.to_pandas()
        return needs("polars", "data").from_arrow(table) if self._library == "polars" else table

    def __sklearn_tags__(self) -> Any:
        # Tells scikit-learn's tools and tests what data the estimator accepts.
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        tags.input_tags.string = tags.input_tags.categorical = True
        tags.non_deterministic = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        # Leave out the loaded model, because the packed run contains the weights.
        state = {name: value for name, value in super().__getstate__().items() if name != "_opened"}
        if self._folder is not None:
            state["_folder"] = _pack_run(self.run_)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        # In a pickle, ``_folder`` is the packed run instead of a path.
        packed = state.pop("_folder", None)
        super().__setstate__(state)
        if packed is not None:
            _unpack_run(packed, self._new_folder())


class _TableEstimator:
    """Mixin for estimators that learn a table column: they give a score per row, or per row and class."""

    def _fit(self: Any, X: Any, y: Any, task: Task | None, query: str | None = None) -> Any:
        """Propose a recipe for the data, train it, and return the estimator.

        Args:
            y: labels [n]; None: they are in ``X``, in the column ``label``.
            task: kind of label; None: infer it from the data.
            query: column that groups rows, for ranking.
        """
        self._target, self._library = self.label, _library_of(X)
        table = X if y is None else self._with_label(X, y)
        if self._target is None:
            raise ValueError(
                f"{type(self).__name__} requires y to be passed, but the target y is None, and no label is "
                f"named. Give fit(X, y), or {type(self).__name__}(label=COLUMN)."
            )
        for name, column in (("label", self._target), ("time", self.time), ("query", query)):
            if column is not None and not isinstance(column, str):
                raise ValueError(
                    f"{name} is {column!r}; it must be a column name as text, such as {str(column)!r}."
                )
        with self._fit_folder() as folder:
            options = InspectOptions(
                data=self._paths(table, folder),
                label=self._target,
                time=self.time,
                task=task,
                query=query,
                out=folder / "recipe.py",
            )
            data_profile, proposal = inspect_table(options)
            is_classifier = isinstance(self, Classifier)
            # More than two values are classes, whatever task was inferred from them.
            if is_classifier and data_profile.labels is not None and len(data_profile.labels.values) > 2:
                proposal = propose(data_profile, label=self._target, time=self.time, task="classes")
            self.remarks_ = [_without_options(text) for text in proposal.warnings]
            self._train(recipe_text(options, proposal, data_profile.num_rows), folder)
            if is_classifier:
                self._set_classes(data_profile.labels, proposal.features.labels[0])
                self._calibrate()
        return self

    def _with_label(self: Any, X: Any, y: Any) -> pa.Table:
        """Return ``X`` as a table with the labels ``y`` as an additional column."""
        if _are_paths(X):
            raise ValueError(
                "fit(X, y) takes a table or an array X. Name the column of a file's labels: label=..."
            )
        table = self._table(X, reset=True)
        values = _checks.column_or_1d(y, warn=True)
        _checks.check_consistent_length(X, values)
        # Without a name for the label, the new column is called "label".
        self._target = self._target or "label"
        if self._target in table.column_names:
            raise ValueError(
                f"the table has a column {self._target!r}, and y has the labels. Leave one of them out, or "
                "set label."
            )
        return table.append_column(
            self._target, pa.array(values.tolist() if values.dtype == object else values)
        )

    def _table(self: Any, X: Any, *, reset: bool) -> Any:
        """Return the data as a table. Paths, and tables that need no validation, are returned unchanged.

        Args:
            reset: whether to set the number and names of features (in ``fit``), or to check them.
        """
        is_frame = hasattr(X, "__arrow_c_stream__") or type(X).__module__.split(".")[0] in (
            "pandas",
            "datasets",
        )
        if _are_paths(X) or (is_frame and not reset and not hasattr(self, "n_features_in_")):
            return X
        # A data frame may have columns of any type, which scikit-learn's array check would refuse.
        if is_frame:
            _checks.validate_data(self, X, reset=reset, skip_check_array=True)
            return to_table(X)
        # A fit needs at least two rows.
        least = 2 if reset else 1
        array = _checks.validate_data(
            self, X, reset=reset, dtype=None, ensure_all_finite="allow-nan", ensure_min_samples=least
        )
        # Use the column names pandas would give the array: a table's seed depends on the table name.
        names = map(str, range(array.shape[1]))
        return pa.table({name: _to_arrow(array[:, number]) for number, name in enumerate(names)})

    def _scores(self: Any, X: Any) -> npt.NDArray[np.float32]:
        """Return the model's scores for all rows, fp32 [n], or [n, C] for several classes."""
        _checks.check_is_fitted(self)
        table = self._table(X, reset=False)
        with self._python_messages():
            scorer = self._scorer(table, labelled=False)
            # Calibration needs logits, so take these instead of probabilities.
            logits = Scored.concat(list(gather_scores(scorer, join(choose_device(self.device))))).logits_B
        # Only a Classifier with ``calibration`` has a curve.
        if getattr(self, "curve_", None) is not None:
            logits = Curve(*self.curve_).calibrate_logits(logits)
        scores: npt.NDArray[np.float32] = scorer.recipe.loss.scores(logits).float().numpy()
        return scores

    def evaluate(self: Any, data: Any, y: Any = None) -> dict[str, float]:
        """Compute metrics on labelled data, as `meshrec evaluate` does.

        Args:
            data: a table with the label, or paths. With ``y``: a table or an array without the label.
            y: labels [n]; None: they are in ``data``.

        Returns:
            Values by metric name.
        """
        _checks.check_is_fitted(self)
        if y is not None:
            table = to_table(self._table(data, reset=False))
            data = table.append_column(self._target, pa.array(np.asarray(y).tolist()))
        metrics: dict[str, float] = self._evaluate_run(data)
        return metrics

    def explain(self: Any, X: Any, *, background: Any = None, num_orders: int = 32) -> Any:
        """Compute how much each column contributes to the prediction for each row, as Shapley values.

        Args:
            X: rows to explain: a table, an array or paths. A row costs some hundreds of predictions.
            background: rows to compare with. None: the training data, which is unavailable after `load`.
            num_orders: number of random column orders. Four times as many halve the error.

        Returns:
            A table with a contribution per row and column, in logits or in label units. The column ``(base)``
            holds the mean output for the background rows, and ``(output)`` the sum of all other columns; see
            `meshrec.runs.contributions`. The table is of the same library as the data given to ``fit``.
        """
        _checks.check_is_fitted(self)
        rows = self._table(X, reset=False)
        background_rows = None if background is None else self._table(background, reset=False)
        if background_rows is None and not _has_training_data(RunFolder(self.run_)):
            raise ValueError("the saved model has no training data to compare with. Give background rows.")
        run = RunFolder(self.run_)
        with self._python_messages():
            table = contributions(run, rows, background=background_rows, num_orders=num_orders)
        return self._to_library(table)


class Classifier(_base.ClassifierMixin, _TableEstimator, _Estimator):  # type: ignore[misc, name-defined]
    """Classifier for table rows with IDs, strings, lists, times and numbers.

    The model is the wide & deep model that `meshrec inspect` proposes for the data. Any two values make a
    binary label. A tenth of the rows is validation data, by which the best weights are selected. Another
    tenth is test data, for the metrics in ``summary_["test"]``. With ``time`` these are the latest rows,
    otherwise random rows.

    Args:
        label: column to learn; None: ``fit`` gets the classes as ``y``.
        time: column with times, by which the held-out rows are selected; None: select them at random.
        calibration: how to calibrate binary probabilities on the validation data: ``isotonic`` (for thousands
            of rows) or ``platt``; None: no calibration.
        options: changes to the proposed recipe, by command-line name, such as ``{"training.epochs": 2}``.
        device: ``cpu`` or ``cuda``; None: ``cuda`` where torch sees a GPU.
        verbose: print progress.
        final: ``all``: refit on all rows, as `meshrec train --final all` does. Metrics in ``summary_`` belong
            to the first fit.

    Attributes:
        classes_: classes, ascending, [C].
        recipe_: recipe as Python source, for `meshrec train`.
        remarks_: hints about the data.
        summary_: run summary, with validation and test metrics.
        run_: run folder, which is removed with the estimator.

    Example::

        import numpy as np
        import pyarrow as pa
        import meshrec

        user = np.arange(600) % 30
        table = pa.table({"user": user, "clicked": np.where(user % 3 == 0, "yes", "no")})
        model = meshrec.Classifier(label="clicked", options={"training.epochs": 2}).fit(table)
        print(model.predict_proba(table.drop_columns("clicked"))[:, 1])
    """

    def __init__(
        self,
        label: str | None = None,
        time: str | None = None,
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        verbose: bool = False,
        *,
        calibration: CalibrationKind | None = None,
        final: Literal["all"] | None = None,
    ) -> None:
        self.label, self.time, self.options, self.calibration = label, time, options, calibration
        self.device, self.verbose, self.final = device, verbose, final

    def fit(self, X: Any, y: Any = None) -> "Classifier":
        """Propose a model for the data, and train it.

        Args:
            X: a pandas, polars or Arrow table, an array [n, d], or paths to Parquet or CSV files.
            y: classes [n]; None: they are in the column ``label``.

        Raises:
            ValueError: the data cannot be learned from; the message says why.
        """
        kinds = get_args(CalibrationKind)
        # Before training, which may take hours.
        if self.calibration is not None and self.calibration not in kinds:
            raise ValueError(f"calibration is {self.calibration!r}; it must be one of {kinds}, or None.")
        if y is not None:
            _multiclass.check_classification_targets(y)
        self._fit(X, y, None)
        return self

    def predict(self, X: Any) -> npt.NDArray[Any]:
        """Return the most probable class per row, [n]."""
        # Positions in ``classes_``.
        best = self.predict_proba(X).argmax(1)
        classes: npt.NDArray[Any] = self.classes_[best]
        return classes

    def predict_proba(self, X: Any) -> npt.NDArray[np.float32]:
        """Return the probability of every class in the order of ``classes_``, fp32 [n, C]."""
        scores = self._scores(X)
        if scores.ndim == 2 and scores.shape[1] > 1:
            return scores
        # A binary model gives the probability of the positive class alone.
        positive = scores.reshape(-1)
        pair = np.stack([1 - positive, positive], 1)
        return pair if self._positive else pair[:, ::-1]

    def _calibrate(self) -> None:
        """Fit the calibration curve on the validation data, and store it in ``curve_``.

        If the estimator's option ``calibration`` is None, set ``curve_`` to None.
        """
        self.curve_ = None
        if self.calibration is not None:
            assert self._folder is not None
            # Use the first fit, not a refit on all rows, which has learned from the validation data.
            run, ranks = RunFolder(self._folder / _RUN), join(choose_device(self.device))
            data = load_recipe(run).data.train  # type: ignore[attr-defined]
            scorer = load_scorer(run, ranks, data, labelled=True)
            self.curve_ = tuple(fit_run_curve(run, scorer, ranks, self.calibration))

    def _set_classes(self, labels: Any, label: Any) -> None:
        """Set ``classes_``, and set ``_positive`` to the position of the class with training label 1."""
        self.classes_ = np.array(sorted(label.classes or labels.values.to_pylist()))
        self._positive = 1 if not label.classes else int(label.classes[-1] == self.classes_[-1])


class Regressor(_base.RegressorMixin, _TableEstimator, _Estimator):  # type: ignore[misc, name-defined]
    """Regressor for table rows with IDs, strings, lists, times and numbers; see `Classifier` for details.

    Args:
        label: column to learn; None: ``fit`` gets the target values as ``y``.
        time: column with times, by which the held-out rows are selected; None: select them at random.
        options: changes to the proposed recipe.
        device: ``cpu`` or ``cuda``.
        verbose: print progress.
        final: ``all``: refit on all rows, as `meshrec train --final all` does. Metrics in ``summary_`` belong
            to the first fit.

    Example::

        import numpy as np
        import pyarrow as pa
        import meshrec

        item = np.arange(600) % 20
        table = pa.table({"item": item, "price": item * 1.5})
        model = meshrec.Regressor(label="price", options={"training.epochs": 2}).fit(table)
        print(model.predict(table)[:3])
    """

    def __init__(
        self,
        label: str | None = None,
        time: str | None = None,
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        verbose: bool = False,
        *,
        final: Literal["all"] | None = None,
    ) -> None:
        self.label, self.time, self.options = label, time, options
        self.device, self.verbose, self.final = device, verbose, final

    def fit(self, X: Any, y: Any = None) -> "Regressor":
        """Propose a model for the data, and train it.

        Args:
            X: a pandas, polars or Arrow table, an array [n, d], or paths to Parquet or CSV files.
            y: target values [n]; None: they are in the column ``label``.

        Raises:
            ValueError: the data cannot be learned from; the message says why.
        """
        if y is not None:
            y = _checks.check_array(y, ensure_2d=False, dtype="numeric", input_name="y")
        self._fit(X, y, "number")
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float32]:
        """Return the predicted value per row, fp32 [n]."""
        return self._scores(X).reshape(-1)


class Ranker(_TableEstimator, _Estimator):
    """Model that ranks the rows in a group, such as a query, session or user, by their expected grade.

    Args:
        label: column with the grades to learn.
        query: column that groups the rows: rows with equal values are ranked together.
        options: changes to the proposed recipe; see `Classifier`.
        device: ``cpu`` or ``cuda``.
        verbose: print progress.
        final: ``all``: refit on all rows, as `meshrec train --final all` does. Metrics in ``summary_`` belong
            to the first fit.

    Example::

        import numpy as np
        import pyarrow as pa
        import meshrec

        row = np.arange(600)
        table = pa.table({"query": row // 6, "item": row % 7, "grade": row % 7 % 3})
        options = {"training.epochs": 2}
        model = meshrec.Ranker(label="grade", query="query", options=options).fit(table)
        print(model.predict(table)[:6])
    """

    time = None

    def __init__(
        self,
        label: str,
        query: str,
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        verbose: bool = False,
        *,
        final: Literal["all"] | None = None,
    ) -> None:
        self.label, self.query, self.options = label, query, options
        self.device, self.verbose, self.final = device, verbose, final

    def fit(self, X: Any, y: None = None) -> "Ranker":
        """Propose a model for the data, and train it.

        Args:
            X: a pandas, polars or Arrow table, or paths to Parquet or CSV files.
            y: must be None; exists only for scikit-learn pipelines.

        Raises:
            ValueError: ``y`` is given, or the data cannot be learned from.
        """
        if y is not None:
            raise ValueError("Ranker takes its grades from the column `label`. Leave y out.")
        self._fit(X, None, None, query=self.query)
        return self

    def predict(self, X: Any) -> npt.NDArray[np.float32]:
        """Return a score per row, fp32 [n]. Rows with larger scores come first within a query."""
        return self._scores(X).reshape(-1)


class Recommender(_Estimator):
    """Model that predicts the next item of a user, trained on a log with a user, an item and a time per row.

    Args:
        user: column with users.
        item: column with items.
        time: column with times.
        model: architecture: hstu, sasrec, gru4rec, bert4rec or two_tower.
        options: changes to the proposed recipe; see `Classifier`.
        device: ``cpu`` or ``cuda``.
        verbose: print progress.
        final: ``all``: refit on all rows, as `meshrec train --final all` does. Metrics in ``summary_`` belong
            to the first fit.

    Example::

        import numpy as np
        import pyarrow as pa
        import meshrec

        row = np.arange(400)
        log = pa.table({"user": row // 8, "item": (row + row // 8) % 12, "time": row})
        model = meshrec.Recommender(options={"training.epochs": 1}).fit(log)
        print(model.recommend([0, 1], k=3))
        print(model.similar([4], k=3))
    """

    def __init__(  # noqa: PLR0917 - as scikit-learn's classes
        self,
        user: str = "user",
        item: str = "item",
        time: str = "time",
        model: NextItemModel = "hstu",
        options: Mapping[str, Any] | None = None,
        device: str | None = None,
        verbose: bool = False,
        *,
        final: Literal["all"] | None = None,
    ) -> None:
        self.user, self.item, self.time, self.model = user, item, time, model
        self.options, self.device, self.verbose, self.final = options, device, verbose, final

    def fit(self, X: Any, y: None = None) -> "Recommender":
        """Propose a model for the log, and train it.

        Args:
            X: a pandas, polars or Arrow table, or paths to Parquet or CSV files.
            y: must be None; exists only for scikit-learn pipelines.

        Raises:
            ValueError: the log cannot be learned from; the message says why.
        """
        if y is not None:
            raise ValueError("Recommender learns from the columns of its log. Leave y out.")
        kinds = get_args(NextItemModel)
        if self.model not in kinds:
            raise ValueError(f"model is {self.model!r}; it must be one of {kinds}.")
        with self._fit_folder() as folder:
            columns = LogColumns(user=self.user, item=self.item, time=self.time)
            paths = self._paths(X, folder)
            text, _, parts = recipe_of_log(paths, columns, folder / "recipe.py", label=None, model=self.model)
            self.remarks_ = parts.reasons
            self._library = _library_of(X)
            self._train(text, folder)
        return self

    def recommend(
        self, users: Any = None, k: int = 10, *, data: Any = None, keep_seen: bool | None = None
    ) -> Any:
        """Return the best items for users, as `meshrec recommend` does.

        Args:
            users: users, as in the log; None: all users in the log.
            k: number of items per user.
            data: another log with the users' histories; None: the log given to `fit`.
            keep_seen: whether to recommend items that are already in the user's history. None: yes, unless
                repeated items are rare in the log.

        Returns:
            A table with user, rank, item and score, for pandas or polars if ``fit`` was given such a table,
            else for Arrow.

        Raises:
            DataError: no users are given, or values of another kind than in the log.
            ValueError: ``k`` is below 1.
        """
        _checks.check_is_fitted(self)
        requested = None if users is None else pa.table({self.user: pa.array(_to_list(users))})
        # A table is written to a file, because the log is read like training data.
        log = data if data is None or _are_paths(data) else self._paths(data, self._subfolder("other"))
        with self._python_messages():
            ranks = join(choose_device(self.device))
            recommender = load_recommender(RunFolder(self.run_), ranks, users=requested, data=log)
            best = recommendations(recommender, ranks, k, keep_seen=keep_seen)
            return self._to_library(pa.concat_tables(recommendation_tables(recommender, best)))

    def similar(self, items: Any, k: int = 10) -> Any:
        """Return the most similar items for each given item, by the cosine between item vectors.

        Args:
            items: items, as in the log.
            k: number of similar items per item.

        Returns:
            A table with item, rank, similar item and score, in the library of the data given to ``fit``.
        """
        _checks.check_is_fitted(self)
        with self._python_messages():
            return self._to_library(similar_items(RunFolder(self.run_), pa.array(_to_list(items)), k))

    def evaluate(self, data: Any) -> dict[str, float]:
        """Compute metrics for predicting each user's last item in another log.

        Args:
            data: the log, a table or paths.

        Returns:
            Values by metric name.
        """
        _checks.check_is_fitted(self)
        log = data if _are_paths(data) else self._paths(data, self._subfolder("other"))
        return self._evaluate_run(log)

    def _subfolder(self, name: str) -> Path:
        """Return a folder for another log inside the temporary folder. Creates it if necessary."""
        assert self._folder is not None
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        return folder


class _ProgressLine:
    """Training observer that prints the progress on a single line of standard error, overwritten in place."""

    def __init__(self) -> None:
        # Total number of steps, last validation metric, and percentage shown last.
        self._num_steps, self._quality, self._shown = 0, "", -1

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                assert event.num_steps is not None  # estimators train on data that ends
                self._num_steps = event.num_steps
            case Evaluated(line, _):
                self._quality = f"  {leading_text(line)}"
            case Reported(text):
                print(f"\r{text}", file=sys.stderr)
            # Print only when the percentage changes, because steps may be very short.
            case Stepped(step, _) if 100 * step // self._num_steps != self._shown:
                self._shown = 100 * step // self._num_steps
                text = f"\rstep {step:,} of {self._num_steps:,}{self._quality}   "
                print(text, end="", file=sys.stderr, flush=True)
            case Finished(summary):
                metrics = "  ".join(
                    f"{data} {leading_text(summary[data])}"
                    for data in ("validation", "test")
                    if summary[data]
                )
                print(f"\rfinished at step {summary['step']:,}: {metrics}   ", file=sys.stderr)
            case _:
                pass


def _silent(event: Event) -> None:
    """Training observer that prints nothing."""


@contextmanager
def _preserved_random_state() -> Iterator[None]:
    """Restore the random state of Python, NumPy and torch after a ``with`` block that trains.

    Training seeds these generators, which must not affect the caller's program.
    """
    python, numpy = random.getstate(), np.random.get_state()
    # torch's CPU generator is restored by fork_rng, without touching the GPUs.
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _without_options(text: str) -> str:
    """Return a message in which options such as --skip-unlabelled are arguments, skip_unlabelled."""
    return _OPTION.sub(lambda match: match[1].replace("-", "_"), text)


def _are_paths(data: Any) -> bool:
    """Return whether data is a path or a nonempty list of paths, and not a table or an array."""
    if isinstance(data, str | Path):
        return True
    return (
        isinstance(data, list | tuple)
        and len(data) > 0
        and all(isinstance(path, str | Path) for path in data)
    )


def _absolute_path(path: str | Path) -> str:
    """Return a path as an absolute path. Addresses such as ``s3://...`` are returned unchanged."""
    return str(path) if is_address(str(path)) else os.path.abspath(path)


def _library_of(data: Any) -> str:
    """Return the name of the library that defines the type of some data, such as ``pandas``."""
    return type(data).__module__.partition(".")[0]


def _has_training_data(run: RunFolder) -> bool:
    """Return whether the training data of a run still exists. Addresses and patterns are not checked."""
    paths = load_recipe(run).data.train  # type: ignore[attr-defined]
    return all(is_address(path) or os.path.exists(path) or "*" in path for path in paths)


def _to_list(values: Any) -> Any:
    """Return users or items as a list, from an array, a column, a list, or a single value."""
    # A string is a sequence, too, but stands for a single user or item.
    if isinstance(values, str | bytes | int):
        return [values]
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _to_arrow(values: npt.NDArray[Any]) -> Any:
    """Convert a NumPy column, which may hold Python objects, to an Arrow array."""
    return pa.array(values.tolist()) if values.dtype == object else pa.array(np.ascontiguousarray(values))


def _to_json(value: Any) -> Any:
    """Convert arrays and paths to JSON types."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _pack_run(run: Path) -> bytes:
    """Return a run folder as a tar archive in memory."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(run, _RUN)
    return buffer.getvalue()


def _unpack_run(packed: bytes, folder: Path) -> None:
    """Extract a run from a tar archive, as a subfolder of ``folder``."""
    # The "data" filter refuses devices, and paths and links out of the folder: the archive may be forged.
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
