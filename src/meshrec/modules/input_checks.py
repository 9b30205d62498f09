"""Checks of the input of collections, sharded or not."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshrec.ops.index import mix_parts
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


def with_own_keys(
    features: KeyedJaggedTensor, positions: Sequence[int], uses: Sequence[int]
) -> tuple[KeyedJaggedTensor, list[int]]:
    """Append a copy of the key of each of these uses, whose IDs will be replaced for this use alone.

    Args:
        features: the input.
        positions: the position of each use's key.
        uses: the uses that get a key of their own.

    Returns:
        The input with the copies at its end, and the position of each use's key in it.
    """
    if not uses:
        return features, list(positions)
    num_keys, found = len(features.keys()), list(positions)
    for number, use in enumerate(uses):
        found[use] = num_keys + number
    return features.permute([*range(num_keys), *(positions[use] for use in uses)]), found


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


def key_bounds(offsets: Tensor, segments: Tensor | None, num_keys: int) -> list[int]:
    """Return where the IDs of each key begin, and their number, [K + 1]."""
    if segments is None:
        step = (len(offsets) - 1) // max(1, num_keys)
        if step == 0:
            return [0] * (num_keys + 1)
        chosen = offsets[: num_keys * step + 1 : step]
    else:
        chosen = offsets[segments]
    bounds: list[int] = chosen.tolist()
    return bounds


def mixed(values: Tensor, bounds: Sequence[int], seeds: Mapping[int, int]) -> Tensor:
    """Replace the IDs of some keys by their mix.

    See [Note: the keys of hashed tables] in tables/key_space.py.

    Args:
        values: the IDs of all keys, int32 or int64 [N].
        bounds: where the IDs of each key begin, and N.
        seeds: the seed of the mix, by key.

    Raises:
        ValueError: the IDs are not integers.
    """
    check_integers(values)
    parts = [(bounds[key], bounds[key + 1], seed) for key, seed in sorted(seeds.items())]
    return mix_parts(values.long().contiguous(), parts)


def check_integers(values: Tensor) -> None:
    """Raise ValueError if the IDs of hashed tables are no integers."""
    if values.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tables with hashed keys take IDs of int32 or int64, got {values.dtype}. Convert the values of "
            "the KeyedJaggedTensor, or hash them to integers."
        )
