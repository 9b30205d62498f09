"""Checks of the input of collections, sharded or not."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.sparse import KeyedJaggedTensor


def check_device(values: Tensor, table: str, device: torch.device) -> None:
    """Raise ValueError unless the IDs are on the device of ``table``."""
    if values.device != device:
        raise ValueError(
            f"the input is on {values.device} and table {table!r} on {device}. "
            "Move one to the other with .to()."
        )


def sample_weights(features: KeyedJaggedTensor, *, is_weighted: bool) -> Tensor | None:
    """Return the weights that scale rows, fp32 [N]; None if the collection is not weighted.

    Raises:
        ValueError: the collection is weighted, and its input has no weights.
    """
    if not is_weighted:
        return None
    weights = features.weights_or_none()
    if weights is None:
        raise ValueError(
            "the collection is weighted (is_weighted=True) but the input has no weights. "
            "Give the KeyedJaggedTensor weights, or make the collection with is_weighted=False."
        )
    return weights.float()


def positions_of(keys: Sequence[str], features: Sequence[str], tables: Sequence[str]) -> list[int]:
    """Return the position of each feature among the keys. ``tables`` has the name of each feature's table.

    Raises:
        ValueError: a feature is missing from the keys.
    """
    place = {key: position for position, key in enumerate(keys)}
    missing = sorted({feature for feature in features if feature not in place})
    if missing:
        readers = {table for table, feature in zip(tables, features, strict=True) if feature in missing}
        raise ValueError(
            f"features {missing} of tables {sorted(readers)} are missing: the input has the keys "
            f"{list(keys)}. Add them to the input, with empty bags where there are no ids."
        )
    return [place[feature] for feature in features]


def inverse_rows(features: KeyedJaggedTensor, wanted: Sequence[str]) -> list[Tensor]:
    """Return for each wanted key the bag of each sample, int64 [B], for keys with different batch sizes.

    Raises:
        ValueError: there are no inverse indices, or they lack a key.
    """
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            f"the keys have batch sizes of their own, {features.stride_per_key()}, and one result matrix "
            "needs one batch size. Give the KeyedJaggedTensor inverse_indices, or equal batch sizes."
        )
    row_of = {key: row for row, key in enumerate(inverse[0])}
    missing = sorted(set(wanted) - row_of.keys())
    if missing:
        raise ValueError(
            f"inverse_indices has no rows for the features {missing}, only for {inverse[0]}. "
            "Give one row for each key."
        )
    return [inverse[1][row_of[key]].long() for key in wanted]
