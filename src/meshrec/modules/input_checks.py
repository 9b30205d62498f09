"""Check and prepare the input of embedding collections, both sharded and unsharded."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshrec.ops.index import mix_spans
from meshrec.sparse import KeyedJaggedTensor


def check_features(features: object) -> None:
    """Check that the input to a collection is a KeyedJaggedTensor, or has its methods.

    torch.fx proxies and awaitable inputs have the methods without the type.

    Raises:
        TypeError: The input is something else.
    """
    # The attribute identifies stand-ins: proxies answer every attribute, awaitables have this one.
    if isinstance(features, KeyedJaggedTensor) or hasattr(features, "variable_stride_per_key"):
        return
    given = type(features).__name__
    if isinstance(features, dict):
        given = f"a dict with the keys {list(features)}"
    raise TypeError(
        f"embeddings are looked up for a KeyedJaggedTensor, got {given}. Build it from JaggedTensors "
        "with KeyedJaggedTensor.from_jt_dict."
    )


def check_device(values: Tensor, table: str, device: torch.device) -> None:
    """Raise ValueError unless the IDs are on the same device as ``table``.

    Args:
        values: IDs.
        table: Table name for errors.
        device: Table device.
    """
    if values.device != device:
        raise ValueError(
            f"the input is on {values.device} and table {table!r} on {device}. "
            "Move one to the other with .to()."
        )


def sample_weights(features: KeyedJaggedTensor, *, is_weighted: bool) -> Tensor | None:
    """Return the weights of the input's IDs as fp32 [N]; None if the collection is not weighted.

    Raises:
        ValueError: The collection is weighted, but the input is not.
    """
    if not is_weighted:
        return None
    weights = features.weights_or_none()
    if weights is None:
        raise ValueError(
            "the collection is weighted (is_weighted=True) but the input has no weights. "
            "Give the KeyedJaggedTensor weights, or make the collection with is_weighted=False."
        )
    # Kernels multiply in fp32.
    return weights.float()


def positions_of(keys: Sequence[str], features: Sequence[str], tables: Sequence[str]) -> list[int]:
    """Return the position of every feature among the input keys.

    Args:
        keys: Keys of the input.
        features: Features to look up.
        tables: For every feature, the name of the table which reads it, for errors.

    Raises:
        ValueError: A feature is missing from the keys.
    """
    position_by_key = {key: position for position, key in enumerate(keys)}
    # Report all missing features at once.
    missing = sorted({feature for feature in features if feature not in position_by_key})
    if missing:
        readers = {table for table, feature in zip(tables, features, strict=True) if feature in missing}
        raise ValueError(
            f"features {missing} of tables {sorted(readers)} are missing: the input has the keys "
            f"{list(keys)}. Add them to the input, with empty bags where there are no ids."
        )
    return [position_by_key[feature] for feature in features]


def with_copied_keys(
    features: KeyedJaggedTensor, positions: Sequence[int], uses: Sequence[int]
) -> tuple[KeyedJaggedTensor, list[int]]:
    """Copy keys of the input, so that some lookups can replace IDs without changing the IDs for other
    lookups.

    A *lookup* is a (table, feature) pair. Lookups of the same feature in several tables read the same key. A
    table that replaces IDs by hashes, or by slots (row positions in memory), needs a separate copy.

    Args:
        features: Input.
        positions: For every lookup, the position of the key which it reads.
        uses: Indices in ``positions`` of the lookups which get a copy.

    Returns:
        The input with a copied key appended for every entry of ``uses``, and a new list ``positions``, in
            which these lookups read the copies.
    """
    if not uses:
        return features, list(positions)
    # Copies are appended, so the positions of other keys do not change.
    num_keys, use_positions = len(features.keys()), list(positions)
    for copy, use in enumerate(uses):
        use_positions[use] = num_keys + copy
    return features.permute([*range(num_keys), *(positions[use] for use in uses)]), use_positions


def inverse_rows(features: KeyedJaggedTensor, keys: Sequence[str]) -> list[Tensor]:
    """Return, for every key, the index of the bag which each sample reads, int64 [B].

    Raises:
        ValueError: The input has no inverse indices, or they lack a key.
    """
    # Without inverse indices, rows with different batch sizes cannot be concatenated per sample.
    inverse = features.inverse_indices_or_none()
    if inverse is None:
        raise ValueError(
            f"the keys have different batch sizes, {features.stride_per_key()}, and one result matrix "
            "needs one batch size. Give the KeyedJaggedTensor inverse_indices, or equal batch sizes."
        )
    row_of = {key: row for row, key in enumerate(inverse[0])}
    missing = sorted(set(keys) - row_of.keys())
    if missing:
        raise ValueError(
            f"inverse_indices has no rows for the features {missing}, only for {inverse[0]}. "
            "Give one row for each key."
        )
    return [inverse[1][row_of[key]].long() for key in keys]


def key_bounds(offsets: Tensor, segments: Tensor | None, num_keys: int) -> list[int]:
    """Return the index of every key's first ID, followed by the number of IDs: K + 1 integers.

    On a GPU, waits for the device.

    Args:
        offsets: Start of every bag, followed by the number of IDs, [B + 1].
        segments: First bag of every key, followed by B. None: all keys have the same number of bags.
        num_keys: Key count K.
    """
    # Equal strides: key boundaries are every step-th offset.
    if segments is None:
        step = (len(offsets) - 1) // max(1, num_keys)
        if step == 0:
            return [0] * (num_keys + 1)
        starts = offsets[: num_keys * step + 1 : step]
    else:
        starts = offsets[segments]
    # A single copy to the host for all keys.
    bounds: list[int] = starts.tolist()
    return bounds


def mix_ids(values: Tensor, bounds: Sequence[int], seeds: Mapping[int, int]) -> Tensor:
    """Return a copy of the IDs, int64 [N], in which the IDs of some keys are replaced by a bijective hash.

    See [Note: the keys of hashed tables] in tables/hashed/keys.py.

    Args:
        values: IDs of all keys, int32 or int64 [N].
        bounds: Index of every key's first ID, followed by N.
        seeds: Hash seed for every key to replace, by position of the key.

    Raises:
        ValueError: The IDs are not integers.
    """
    check_integers(values)
    spans = [(bounds[key], bounds[key + 1], seed) for key, seed in sorted(seeds.items())]
    return mix_spans(values.long().contiguous(), spans)


def check_integers(values: Tensor) -> None:
    """Raise ValueError unless the IDs for hashed tables are int32 or int64."""
    if values.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"tables with hashed keys take IDs of int32 or int64, got {values.dtype}. Convert the values of "
            "the KeyedJaggedTensor, or hash them to integers."
        )
