"""TorchRec's KeyedJaggedTensor validator. Invalid input raises an error, doubtful input logs a warning."""

import logging
from collections.abc import Mapping, Sequence

from torch import Tensor

from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor
from meshrec.modules.embedding_configs import BaseEmbeddingConfig

_logger = logging.getLogger("torchrec.sparse.jagged_tensor_validator")


def validate_keyed_jagged_tensor(
    kjt: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig] | None = None
) -> bool:
    """Validate lengths, offsets, keys and weights. With ``configs``, also validate the IDs.

    Args:
        kjt: bags to validate.
        configs: tables that the features read. Features without a table are not validated. None: IDs are
            not validated.

    Returns:
        False if a feature has an ID outside its table; a warning names every such feature.

    Raises:
        ValueError: lengths, offsets, keys or weights are inconsistent.
    """
    lengths, offsets, values = kjt.lengths_or_none(), kjt.offsets_or_none(), kjt.values()
    if lengths is None and offsets is None:
        raise ValueError("lengths and offsets cannot be both empty; give the KeyedJaggedTensor one of them.")
    if lengths is not None:
        _check_lengths(lengths, values)
    if offsets is not None:
        _check_offsets(offsets, values)
    if lengths is not None and offsets is not None:
        _check_agreement(lengths, offsets)
    _check_keys(kjt, lengths.numel() if lengths is not None else kjt.offsets().numel() - 1)
    weights = kjt.weights_or_none()
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(
            f"weights size must equal to values size, got {weights.numel()} and {values.numel()}. "
            "Give one weight per value."
        )
    return configs is None or _are_rows(kjt, configs)


def _check_lengths(lengths: Tensor, values: Tensor) -> None:
    """Raise ValueError unless the lengths sum to the number of values."""
    if int(lengths.sum()) != values.numel():
        raise ValueError(
            f"Sum of lengths must equal the number of values, got {int(lengths.sum())} and {values.numel()}. "
            "kjt.validate() finds the key and sample."
        )


def _check_offsets(offsets: Tensor, values: Tensor) -> None:
    """Raise ValueError unless offsets start at 0 and end at the number of values."""
    if offsets.numel() == 0:
        raise ValueError("offsets cannot be empty; without bags they are [0].")
    if int(offsets[0]) != 0:
        raise ValueError(
            f"Expected first offset to be 0, got {int(offsets[0])}. Offsets count from the first value."
        )
    if int(offsets[-1]) != values.numel():
        raise ValueError(
            f"The last element of offsets must equal to the number of values, got {int(offsets[-1])} and "
            f"{values.numel()}. kjt.validate() finds the key and sample."
        )


def _check_agreement(lengths: Tensor, offsets: Tensor) -> None:
    """Raise ValueError unless lengths and offsets describe the same bags."""
    if lengths.numel() != offsets.numel() - 1:
        raise ValueError(
            f"Expected lengths size to be 1 more than offsets size, in words: {offsets.numel()} offsets need "
            f"{offsets.numel() - 1} lengths, got {lengths.numel()}. Give only one of the two."
        )
    if not lengths.equal(offsets.diff().to(lengths.dtype)):
        raise ValueError("offsets is not equal to the cumulative sum of lengths. Give only one of the two.")


def _check_keys(kjt: KeyedJaggedTensor, num_bags: int) -> None:
    """Raise ValueError if keys repeat, or the number of bags does not match the keys."""
    keys = kjt.keys()
    if len(set(keys)) != len(keys):
        raise ValueError(f"keys must be unique, got {keys}.")
    if not keys and num_bags > 0:
        raise ValueError(
            f"keys is empty but lengths or offsets is not: {num_bags} bags belong to no key. Name them."
        )
    if kjt.variable_stride_per_key():
        _warn_of_strides(kjt, num_bags)
    elif keys and num_bags % len(keys):
        raise ValueError(
            f"lengths size must be divisible by keys size, got {num_bags} and {len(keys)}. "
            "Give strides where keys have different numbers of bags."
        )


def _warn_of_strides(kjt: KeyedJaggedTensor, num_bags: int) -> None:
    """Log a warning if the batch sizes per key do not match the keys or the bags."""
    strides = kjt._stride_per_key_per_rank
    assert strides is not None
    num_keys = len(kjt.keys())
    if strides.dim() != 2:
        _logger.warning("stride_per_key_per_rank must be 2-dimensional, got %d dimensions", strides.dim())
    elif strides.size(0) != num_keys:
        _logger.warning(
            "stride_per_key_per_rank first dimension must equal num_features (%d), got %d",
            num_keys,
            strides.size(0),
        )
    elif strides.size(1) != 1:
        _logger.warning(
            "stride_per_key_per_rank second dimension must be 1 for user-input KJT, got %d", strides.size(1)
        )
    elif int(strides.sum()) != num_bags:
        _logger.warning(
            "Sum of stride_per_key_per_rank, %d, must be the number of lengths, %d",
            int(strides.sum()),
            num_bags,
        )


def _are_rows(kjt: KeyedJaggedTensor, configs: Sequence[BaseEmbeddingConfig]) -> bool:
    """Return whether every ID is a row of its feature's table. Log the features for which this fails."""
    num_rows: Mapping[str, int] = {
        name: config.num_embeddings for config in configs for name in config.feature_names
    }
    # IDs of features without a table in `configs` are not checked.
    keys = [key for key in kjt.keys() if key in num_rows]  # noqa: SIM118  not a dict
    if not keys or kjt.lengths().numel() == 0:
        return True
    bags = kjt.to_dict()
    is_valid = True
    for key in keys:
        ids = bags[key].values()
        if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= num_rows[key]):
            is_valid = False
            _logger.warning(
                "feature %r has ids from %d to %d, its table has the rows 0 to %d",
                key,
                int(ids.min()),
                int(ids.max()),
                num_rows[key] - 1,
            )
    return is_valid
