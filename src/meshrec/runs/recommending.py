"""Recommend items with a run's next-item model: the best items for users in a log, and similar items."""

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
from meshrec.data.features.values import is_missing, kind_of, one_number, whole
from meshrec.data.frames import read_columns
from meshrec.data.interactions import SEEN
from meshrec.data.log_columns import ITEM, USER
from meshrec.data.logs import item_ids, vocabulary_of
from meshrec.data.next_item_data import latest
from meshrec.ops.scores.top_k import top_k
from meshrec.runs.fitting import features_of
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.score_file import table_writer
from meshrec.runs.scoring import load_model
from meshrec.train.log_sources import LogSource
from meshrec.train.ranks import Ranks, join
from meshrec.train.run_folder import RunFolder

# B users of a batch, K items, N items to compare with, I items of the catalog, V width of vectors

# Users scored at once, per rank.
_USERS_PER_BATCH = 512
# Items compared with all other items at a time.
_ITEMS_PER_BLOCK = 256


class Recommender(NamedTuple):
    """A run's model with everything needed to recommend items to users.

    Attributes:
        model: next-item model with trained weights.
        reader: user histories, in the order of ``users``.
        users: user values as in the log, [number of users].
        user_column: name of the user column in the log.
        items: item values in the log, by item ID.
        num_unknown: number of users without a history.
        step: the weights' training step.
        keep_seen: whether the recipe also ranks items from a user's history.
    """

    model: nn.Module
    reader: Reader
    users: pa.Array
    user_column: str
    items: "ItemValues"
    num_unknown: int
    step: int | None
    keep_seen: bool = False


class ItemValues(NamedTuple):
    """Values by which items are called in the log, such as titles or keys, by item ID.

    Attributes:
        ids: item IDs of the model, int64 [I], ascending.
        values: value of every item in the log, Arrow array [I].
    """

    ids: "np.typing.NDArray[np.int64]"
    values: pa.Array

    @staticmethod
    def of(source: LogSource, features: Any) -> "ItemValues":
        """Return the items of a run, from log source and fitted features."""
        vocabulary = vocabulary_of(features, ITEM)
        ids = item_ids(vocabulary, vocabulary.vocabulary, source.key)
        # Ascending, so that `take` can search.
        order = np.argsort(ids)
        return ItemValues(ids[order], vocabulary.vocabulary.take(pa.array(order)))

    def take(self, ids: "np.typing.NDArray[np.int64]") -> pa.Array:
        """Return the values for item IDs, which must be in ``ids``."""
        return self.values.take(pa.array(np.searchsorted(self.ids, ids)))


def log_source(run: RunFolder) -> LogSource:
    """Return the data source of a next-item run, which is a log of users, items and times.

    Raises:
        ValueError: the run was not trained on a log.
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
    users: Any = None,
    data: Any = None,
    step: int | None = None,
    last: bool = False,
) -> Recommender:
    """Load a next-item model, and the histories of the users to recommend items to. Collective.

    Args:
        run: the run.
        ranks: the ranks, from `join`.
        users: Parquet or CSV file, or table, with a user column named as in the log. Duplicate users count
            only once. None: all users in the log.
        data: another log, from which the histories are read. None: the run's log, including items that were
            held out for validation and test.
        step, last: which weights to load if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.

    Raises:
        ValueError: the run was not trained on a log, or a file does not fit.
    """
    recipe, source, features = load_recipe(run), log_source(run), features_of(run)
    logged = source.interactions(features, data)
    column = source.columns.user
    requested, user_indices = logged.values, np.arange(logged.log.num_users)
    if users is not None:
        requested = _read_users(users, column, logged.values).unique()
        positions = pc.index_in(requested, value_set=logged.values.cast(requested.type))
        user_indices = positions.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    # The index -1 of an unknown user selects the last user's history. The first condition excludes it.
    has_history = (user_indices >= 0) & (logged.log.stops > logged.log.firsts)[user_indices]
    # Only models with more features than the history embed user IDs.
    user_ids = None if source.windows else vocabulary_of(features, USER).lookup_values(requested)
    # With another log, the model is still built for the run's log, whose items it knows.
    dataset = source.dataset_of(logged.log, source.held_out) if data is None else source.dataset(features)
    model, step = load_model(run, ranks, recipe, dataset, step=step, last=last)
    return Recommender(
        model=model,
        reader=latest(
            logged.log, user_indices, history=source.history, windows=source.windows, user_ids=user_ids
        ),
        users=requested,
        user_column=column,
        items=ItemValues.of(source, features),
        num_unknown=int((~has_history).sum()),
        step=step,
        keep_seen=not source.exclude_seen,
    )


def recommendations(
    recommender: Recommender, ranks: Ranks, k: int, *, keep_seen: bool | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Find the best items for every user, a batch of users at a time.

    Collective: every rank must exhaust the iterator.

    Args:
        recommender: the recommender.
        ranks: the ranks, from `join`.
        k: number of items per user.
        keep_seen: whether to recommend items from a user's history as well. None: as set in the recipe.

    Yields:
        Item IDs [B, K] and scores [B, K], best item first, with users in the recommender's order. Only
        rank 0 yields.

    Raises:
        ValueError: ``k`` is below 1.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1.")
    seen = None if (recommender.keep_seen if keep_seen is None else keep_seen) else SEEN
    model: Any = recommender.model
    # A sharded model is wrapped by DistributedModelParallel.
    inner = model if hasattr(model, "recommend") else model.module
    inner.eval()
    for batch in recommender.reader.batches(_USERS_PER_BATCH, rank=ranks.rank, world_size=ranks.size):
        with torch.no_grad():
            best = inner.recommend(batch.sparse.to(ranks.device), k, keep_seen=seen is None, seen=seen)
        every = ranks.collect((best.ids_BK.cpu(), best.scores_BK.cpu()))
        if ranks.is_first:
            yield torch.cat([part[0] for part in every]), torch.cat([part[1] for part in every])


def write_recommendations(out: Path, recommender: Recommender, best: Iterator[tuple[Tensor, Tensor]]) -> int:
    """Write recommendations to a file, with a row per user and item: user, rank (from 1), item and score.

    Args:
        out: a ``.parquet`` or ``.csv`` file. An existing file is replaced once everything is written.
        recommender: the recommender.
        best: output of `recommendations`.

    Returns:
        Number of rows.
    """
    num_rows = 0
    with table_writer(out) as write:
        for table in recommendation_tables(recommender, best):
            write(table)
            num_rows += len(table)
    return num_rows


def recommendation_tables(
    recommender: Recommender, best: Iterator[tuple[Tensor, Tensor]]
) -> Iterator[pa.Table]:
    """Convert recommendations to Arrow tables, with a row per user and item.

    Yields:
        A table per user batch, with the columns user, rank (from 1), item and score.
    """
    # Index of the batch's first user among all users.
    first = 0
    for ids_BK, scores_BK in best:
        # A score of -inf marks an excluded item, where a user has fewer than K candidates.
        is_candidate = scores_BK > float("-inf")
        of_user, rank = is_candidate.nonzero().unbind(1)
        yield pa.table(
            {
                recommender.user_column: recommender.users.take(pa.array(first + of_user.numpy())),
                "rank": pa.array(rank.numpy() + 1),
                "item" if recommender.user_column != "item" else "recommended": recommender.items.take(
                    ids_BK[is_candidate].numpy()
                ),
                "score": pa.array(scores_BK[is_candidate].float().numpy()),
            }
        )
        first += len(ids_BK)


def _read_users(path: Any, name: str, logged: pa.Array) -> pa.Array:
    """Read the users to recommend items to from a file or table.

    Args:
        logged: users in the log. The values read must have the same kind, such as integer or string.
    """
    # Read with the type in the log, because users are compared with those in the log.
    kind = kind_of(logged.type)
    table = read_columns(str(path) if isinstance(path, Path) else path, [name], {name: kind})
    location = path if isinstance(path, str | Path) else "the table of users"
    if name not in table.column_names or not table.num_rows:
        raise DataError(
            f"{location} has no users in a column {name!r}. Call it as in the log, and give some."
        )
    missing = is_missing(values := table[name].combine_chunks())
    if missing is not None and missing.any():
        raise DataError(
            f"{location}: column {name!r} has no user in row {int(missing.argmax())}. Leave out rows "
            "without one."
        )
    values = one_number(whole(values))
    if kind_of(values.type) != kind:
        raise DataError(
            f"{location}: column {name!r} holds {kind_of(values.type)}, and the log's {kind}. Give it as it "
            "is in the log."
        )
    return values


def similar_items(
    run: RunFolder, items: pa.Array | None, k: int, *, step: int | None = None, last: bool = False
) -> pa.Table:
    """For every given item, find the other items with the most similar learned vectors, by cosine.

    Args:
        run: a next-item run.
        items: values of the items in the log, [N]; None: all items in the log.
        k: number of similar items to return per item. If the log has fewer other items, all are returned.
        step, last: which weights to load if not the reported ones; see
            ``meshrec.checkpoint.find_checkpoint``.

    Returns:
        Table with a row per pair of items, and the columns ``item``, ``rank`` (from 1), ``similar`` (the
        similar item), and ``score`` (the cosine).

    Raises:
        DataError: an item was not in the training data.
        ValueError: ``k`` is below 1, or the run was not trained on a log.
    """
    if k < 1:
        raise ValueError(f"k is {k}; it must be at least 1.")
    recipe, source, features = load_recipe(run), log_source(run), features_of(run)
    dataset = source.dataset(features)
    ranks = join("cpu")
    model: Any = load_model(run, ranks, recipe, dataset, step=step, last=last)[0]
    # A sharded model is wrapped by DistributedModelParallel.
    inner = model if hasattr(model, "item_vectors") else model.module
    catalog = ItemValues.of(source, features)
    values = catalog.values if items is None else _as_type(items, catalog.values.type)
    positions = pc.index_in(values, value_set=catalog.values)
    if positions.null_count:
        unknown = values[int(positions.is_null().to_numpy(zero_copy_only=False).argmax())].as_py()
        raise DataError(
            f"item {unknown!r} was not in the training data, which has items such as "
            f"{catalog.values.slice(0, 3).to_pylist()}. Leave it out."
        )
    with torch.no_grad():
        vectors_IV = nn.functional.normalize(inner.eval().item_vectors().float(), dim=1)
    index_N = torch.from_numpy(positions.to_numpy(zero_copy_only=False).astype("int64"))
    # An item cannot be similar to itself, so one less than the catalog remains.
    num = min(k, len(catalog.values) - 1)
    best = []
    # In blocks, because a score for every pair of items may not fit in memory.
    for index_B in index_N.split(_ITEMS_PER_BLOCK):
        scores_BI = vectors_IV[index_B] @ vectors_IV.T
        # An item is not similar to itself.
        scores_BI[torch.arange(len(index_B)), index_B] = float("-inf")
        best.append(top_k(scores_BI, num))
    best_NK, index_NK = (torch.cat(part) for part in zip(*best, strict=True))
    return pa.table(
        {
            "item": values.take(pa.array(torch.arange(len(index_N)).repeat_interleave(num).numpy())),
            "rank": pa.array(torch.arange(1, num + 1).repeat(len(index_N)).numpy()),
            "similar": catalog.values.take(pa.array(index_NK.flatten().numpy())),
            "score": pa.array(best_NK.flatten().numpy()),
        }
    )


def _as_type(items: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast items to the Arrow type of the items in the training data."""
    try:
        return items.cast(kind)
    except pa.ArrowException as error:
        raise DataError(
            f"items are {items.type}, and those of the training data {kind}. Give them as they are there."
        ) from error
