"""Features of a run: fitted once by its first rank, kept in its folder, read by all that comes later."""

import json
from typing import TYPE_CHECKING, Any

from meshrec.data.faults import DataError
from meshrec.train.ranks import Ranks
from meshrec.train.recipe import DataSource, FittedSource
from meshrec.train.run_folder import RunFolder

if TYPE_CHECKING:
    from meshrec.data import Dataset
    from meshrec.data.features import Features

FEATURES = "features.json"


def load_data(source: DataSource, folder: RunFolder, ranks: Ranks) -> "Dataset":
    """The data of a run. Collective: rank 0 fits what is to be fitted, unless the run has done so before.

    Raises:
        ValueError: on every rank, what went wrong on the first.
    """
    if not isinstance(source, FittedSource):
        return source.load()
    from meshrec.data.features import Features

    saved: Any = None
    if ranks.is_first:
        try:
            saved = folder.read_json(FEATURES)
            if saved is None:
                saved = source.fit().to_json()
                folder.write_json(FEATURES, saved)
        except ValueError as error:
            saved = error
    saved = ranks.share(saved)
    if isinstance(saved, ValueError):
        raise saved
    return source.dataset(Features.from_json(saved))


def features_of(folder: RunFolder) -> "Features":
    """What a run has fitted.

    Raises:
        DataError: it has not, or they cannot be read.
    """
    from meshrec.data.features import Features

    try:
        saved = folder.read_json(FEATURES)
    except json.JSONDecodeError as error:
        raise DataError(f"{folder.path / FEATURES} is damaged: {error}") from error
    if saved is None:
        raise DataError(f"{folder.path} has no {FEATURES}: its features were never fitted. Train anew.")
    return Features.from_json(saved)


def data_of_run(source: DataSource, folder: RunFolder) -> "Dataset":
    """The data of a run that is over, as it was read then."""
    if isinstance(source, FittedSource):
        return source.dataset(features_of(folder))
    return source.load()
