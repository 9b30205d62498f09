"""Fit the features of a run (such as vocabularies and bucket edges), and read them back.

A run fits them once, on all ranks if the data source supports it. Rank 0 stores them in the run folder, from
which all later commands read them. It also stores the types of the columns, so that no command needs the
training data only to learn how a sample looks.
"""

from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshrec.comms.failures import sendable
from meshrec.data.faults import DataError
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import DataSource, FittedSource, RankFittedSource
from meshrec.train.run_folder import CONFIG, RunFolder

if TYPE_CHECKING:
    from meshrec.data import Dataset
    from meshrec.data.features import Features

FEATURES = "features.json"
"""File with the fitted features, inside the run folder. Vocabularies are in ``features.arrow``."""

COLUMNS = "columns.json"
"""File with the Arrow schema of the columns that features read, inside the run folder."""


def load_data(
    source: DataSource,
    folder: RunFolder,
    ranks: Ranks,
    tell: Callable[[float], None] = lambda share: None,
    earlier: RunFolder | None = None,
) -> "Dataset":
    """Load a run's data, and fit its features if necessary. Collective.

    Fitted features in the run folder are used again. Otherwise the ranks fit the features once.

    Args:
        source: the recipe's data source.
        folder: run folder.
        ranks: the ranks, from `join`.
        tell: called with the finished share of fitting, from 0 to 1.
        earlier: run whose fit the features continue; see `Features.continued`. None: a run from scratch.

    Raises:
        Exception: a rank failed to fit the features; raised on every rank with the same cause.
    """
    # Sources without features need no agreement: every rank loads the same data.
    if not isinstance(source, FittedSource):
        return source.load()
    is_fitted = of_first(ranks, lambda: folder.read_json(FEATURES) is not None)
    features: Features | None = None
    if not is_fitted and isinstance(source, RankFittedSource):
        features = source.fit_on_ranks(ranks.axis, tell)

    def fit() -> "Features":
        """Return the fitted features, on rank 0."""
        fitted = source.fit() if features is None else features
        return fitted if earlier is None else fitted.continued(features_of(earlier))

    dataset = source.dataset(features_in(folder, ranks, fit))
    if ranks.is_first and dataset.arrow_schema is not None:
        store_columns(folder, dataset.arrow_schema)
    return dataset


def features_in(folder: RunFolder, ranks: Ranks, fit: Callable[[], "Features"]) -> "Features":
    """Return the fitted features in a run folder, after storing them if there are none. Collective.

    Args:
        folder: run folder.
        ranks: the ranks, from `join`.
        fit: returns fitted features; called on rank 0 if there are none.

    Raises:
        Exception: the features cannot be fitted or read; raised on every rank with the same cause.
    """

    def stored() -> Any:
        """Return the content of the JSON file."""
        content = folder.read_json(FEATURES)
        if content is None:
            content = fit().write_vocabularies(folder.path / FEATURES)
            # Sealed, because changed features would silently change every prediction.
            folder.write_json(FEATURES, content, seal=True)
        return content

    return _features_on_ranks(of_first(ranks, stored), folder, ranks)


def _features_on_ranks(saved: Any, folder: RunFolder, ranks: Ranks) -> "Features":
    """Return the features on every rank. Ranks that see the run folder map its Arrow file. Collective."""
    from meshrec.data.features import Features
    from meshrec.data.features.storage import map_vocabularies, vocabularies_in, vocabulary_file

    if "vocabularies" not in saved:
        return Features.from_json(saved)
    path, content = folder.path / FEATURES, None
    error: DataError | None = None
    try:
        content = map_vocabularies(saved["vocabularies"], path)
    except DataError as caught:
        error = caught
    errors = ranks.collect(None if error is None else str(error))
    if errors[0] is not None:
        raise DataError(errors[0]) from error
    # Ranks on other hosts may not see the folder.
    received = of_first(ranks, vocabulary_file(path).read_bytes) if any(errors) else b""
    return Features.from_json(saved, vocabularies_in(received if content is None else content))


def of_first(ranks: Ranks, compute: Callable[[], Any]) -> Any:
    """Return the result of a function that only rank 0 runs. Collective.

    Raises:
        Exception: the function failed; raised on every rank.
    """
    result: Any = None
    if ranks.is_first:
        try:
            result = compute()
        # An error must reach all ranks: they wait for rank 0 in the broadcast below.
        except Exception as error:
            result = sendable(error)
    result = ranks.broadcast(result)
    if isinstance(result, Exception):
        raise result
    return result


def features_of(folder: RunFolder) -> "Features":
    """Read a run's fitted features from the run folder.

    Raises:
        DataError: the run has no fitted features, or they cannot be read.
    """
    from meshrec.data.features import Features

    try:
        saved = folder.read_json(FEATURES)
    except ValueError as error:
        raise DataError(str(error)) from error
    if saved is None:
        raise DataError(f"{folder.path} has no {FEATURES}: its features were never fitted. Train again.")
    return Features.from_saved(saved, folder.path / FEATURES)


def store_columns(folder: RunFolder, schema: Any) -> None:
    """Store the Arrow schema of the columns that features read in the run folder."""
    content = b64encode(schema.serialize().to_pybytes()).decode()
    # The readable types are for users.
    types = {field.name: str(field.type) for field in schema}
    folder.write_json(COLUMNS, {"types": types, "arrow": content}, seal=True)


def stored_columns(folder: RunFolder) -> Any:
    """Return the Arrow schema from `store_columns`; None if the run has none.

    Raises:
        ValueError: the file is damaged.
    """
    import pyarrow as pa

    saved = folder.read_json(COLUMNS)
    return None if saved is None else pa.ipc.read_schema(pa.py_buffer(b64decode(saved["arrow"])))


def description_of_run(source: DataSource, folder: RunFolder) -> "Dataset":
    """Return a run's data without samples, or with them if the run folder does not describe the columns.

    Raises:
        DataError: the data must be read and cannot be, or the run's features are missing.
        ValueError: a file of the run is damaged.
    """
    from meshrec.data.open_stream import empty_dataset

    schema = stored_columns(folder)
    if schema is None:
        return data_of_run(source, folder)
    samples = (folder.read_json(CONFIG) or {}).get("data", {}).get("samples", {})
    dataset = empty_dataset(features_of(folder), epoch_samples=samples.get("train") or 0)
    return replace(dataset, arrow_schema=schema)


def data_of_run(source: DataSource, folder: RunFolder) -> "Dataset":
    """Open the data of a trained run, with the run's fitted features.

    Raises:
        DataError: the data cannot be read, or the run's features are missing.
    """
    if isinstance(source, FittedSource):
        return source.dataset(features_of(folder))
    return source.load()
