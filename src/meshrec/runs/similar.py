"""Similar items for a next-item run, by the item vectors behind the model's scores."""

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import nn

from meshrec.data.faults import DataError
from meshrec.runs.fitting import features_of
from meshrec.runs.recommending import ItemValues, log_source
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.scoring import load_model
from meshrec.train.ranks import join
from meshrec.train.run_folder import RunFolder

# N items asked for, I items, V width of vectors


def similar_items(
    run: RunFolder, items: pa.Array | None, k: int, *, step: int | None = None, last: bool = False
) -> pa.Table:
    """Return the items with the largest vector cosine to the given items.

    Args:
        run: a next-item run.
        items: item values, [N]; None: all items in the log.
        k: number of similar items per item; fewer if the log has fewer.
        step, last: other weights than the reported ones, see ``meshrec.checkpoint.find_checkpoint``.

    Returns:
        A row per pair: ``item``, ``rank`` from 1, ``similar``, and ``score``, the cosine.

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
    scores_NI = vectors_IV[index_N] @ vectors_IV.T
    # An item is not similar to itself.
    scores_NI[torch.arange(len(index_N)), index_N] = float("-inf")
    num = min(k, len(catalog.values) - 1)
    best_NK, index_NK = scores_NI.topk(num, dim=1)
    return pa.table(
        {
            "item": values.take(pa.array(torch.arange(len(index_N)).repeat_interleave(num).numpy())),
            "rank": pa.array(torch.arange(1, num + 1).repeat(len(index_N)).numpy()),
            "similar": catalog.values.take(pa.array(index_NK.flatten().numpy())),
            "score": pa.array(best_NK.flatten().numpy()),
        }
    )


def _as_type(items: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast items to the training data's type."""
    try:
        return items.cast(kind)
    except pa.ArrowException as error:
        raise DataError(
            f"items are {items.type}, and those of the training data {kind}. Give them as they are there."
        ) from error
