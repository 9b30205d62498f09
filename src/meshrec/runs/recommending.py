"""Recommendations of a run of next items: the best items for the users of a log."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from meshrec.data import Reader
from meshrec.data.faults import DataError
from meshrec.data.features.values import is_missing
from meshrec.data.frames import read_columns
from meshrec.data.interactions import latest
from meshrec.data.log_columns import ITEM
from meshrec.data.logs import item_ids, vocabulary_of
from meshrec.runs.fitting import features_of
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.score_file import table_writer
from meshrec.runs.scoring import load_model
from meshrec.train.log_sources import LogSource
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder

# B users of a batch, K items

_BATCH = 512


class Recommender(NamedTuple):
    """A run's model, the users to recommend items to, and the values of the items."""

    model: nn.Module
    reader: Reader
    """The histories of the users, in their order."""
    users: pa.Array
    user_column: str
    items: "ItemValues"
    num_unknown: int
    """Number of users without a history."""
    step: int | None


class ItemValues(NamedTuple):
    """The value that each item's ID stands for; the IDs ascend."""

    ids: "np.typing.NDArray[np.int64]"
    values: pa.Array

    @staticmethod
    def of(source: LogSource, features: Any) -> "ItemValues":
        """Return the values of a run's items."""
        vocabulary = vocabulary_of(features, ITEM)
        ids = item_ids(vocabulary, vocabulary.vocabulary, source.key)
        order = np.argsort(ids)
        return ItemValues(ids[order], vocabulary.vocabulary.take(pa.array(order)))

    def take(self, ids: "np.typing.NDArray[np.int64]") -> pa.Array:
        """Return the values of IDs."""
        return self.values.take(pa.array(np.searchsorted(self.ids, ids)))


def log_source(run: RunFolder) -> LogSource:
    """Return the source of a run that learned next items from a log.

    Raises:
        ValueError: the run learned something else.
    """
    source = load_recipe(run).data
    if not isinstance(source, LogSource):
        raise ValueError(
            f"{run.path} was trained on {type(source).__name__}, and recommendations need a log of users, "
            "items and times. Write a recipe with `meshrec inspect LOG --user U --item I --time T`."
        )
    return source


def load_recommender(
    run: RunFolder,
    ranks: Ranks,
    *,
    users: str | Path | None = None,
    data: Any = None,
    step: int | None = None,
    last: bool = False,
) -> Recommender:
    """Load a run's model, and the histories of users. Collective.

    Args:
        run: the run.
        ranks: the ranks, from `join`.
        users: Parquet or CSV file with a column of users, called as in the log; a user in several rows counts
            once. None: all users of the log.
        data: another log that has the histories; None: that of the run, held-out items included.
        step, last: other weights than those that the run reports, see ``meshrec.checkpoint.find_checkpoint``.

    Raises:
        ValueError: the run learned no next items, or a file does not fit.
    """
    recipe, source, features = load_recipe(run), log_source(run), features_of(run)
    logged = source.interactions(features, data)
    column = source.columns.user
    wanted = logged.values if users is None else _column(users, column).unique()
    try:
        numbers = pc.index_in(wanted, value_set=logged.values.cast(wanted.type))
    except pa.ArrowException as error:
        raise DataError(
            f"{users}: column {column!r} holds {wanted.type}, and the log's {logged.values.type}: {error}. "
            "Give it as it is in the log."
        ) from error
    known = numbers.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    model, step = load_model(run, ranks, recipe, source.dataset(features), step=step, last=last)
    return Recommender(
        model=model,
        reader=latest(logged.log, known, history=source.history, windows=source.windows),
        users=wanted,
        user_column=column,
        items=ItemValues.of(source, features),
        num_unknown=int((known < 0).sum()),
        step=step,
    )


def recommendations(
    found: Recommender, ranks: Ranks, k: int, *, keep_seen: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the IDs and scores [B, K] of the best items, step by step in the order of users, on rank 0.

    Other ranks yield nothing. Collective: every rank must exhaust the iterator.
    """
    model: Any = found.model
    inner = model if hasattr(model, "recommend") else model.module
    inner.eval()
    for batch in found.reader.batches(_BATCH, rank=ranks.rank, world_size=ranks.size):
        with torch.no_grad():
            best = inner.recommend(batch.sparse.to(ranks.device), k, keep_seen=keep_seen)
        every = ranks.collect((best.ids_BK.cpu(), best.scores_BK.cpu()))
        if ranks.is_first:
            yield torch.cat([each[0] for each in every]), torch.cat([each[1] for each in every])


def write_recommendations(out: Path, found: Recommender, best: Iterator[tuple[Tensor, Tensor]]) -> int:
    """Write one row for each recommendation: the user, the rank from 1, the item and its score.

    Args:
        out: a ``.parquet`` or ``.csv`` file. An existing file is replaced once everything is written.
        found: the recommender.
        best: the results of `recommendations`.

    Returns:
        The number of rows.
    """
    first = num_rows = 0
    with table_writer(out) as write:
        for ids_BK, scores_BK in best:
            kept = scores_BK > float("-inf")
            of_user, rank = kept.nonzero().unbind(1)
            write(
                pa.table(
                    {
                        found.user_column: found.users.take(pa.array(first + of_user.numpy())),
                        "rank": pa.array(rank.numpy() + 1),
                        "item" if found.user_column != "item" else "recommended": found.items.take(
                            ids_BK[kept].numpy()
                        ),
                        "score": pa.array(scores_BK[kept].float().numpy()),
                    }
                )
            )
            first, num_rows = first + len(ids_BK), num_rows + len(rank)
    return num_rows


def _column(path: str | Path, name: str) -> pa.Array:
    table = read_columns(str(path), [name])
    if name not in table.column_names or not table.num_rows:
        raise DataError(f"{path} has no users in a column {name!r}. Call it as in the log, and give some.")
    missing = is_missing(found := table[name].combine_chunks())
    if missing is not None and missing.any():
        raise DataError(
            f"{path}: column {name!r} has no user in row {int(missing.argmax())}. Leave out rows without one."
        )
    return found
