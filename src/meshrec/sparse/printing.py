"""``str()`` for jagged and keyed tensors. Long lists are shortened in the middle."""

from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from meshrec.sparse.keyed_bags import KeyedBags

_MAX_PRINTED = 1000  # items per key above which the middle is elided; torch's default print threshold
_EDGE_ITEMS = 3  # items printed at both ends of a shortened list; torch's default edgeitems


def is_readable(*tensors: Tensor | None) -> bool:
    """Return whether the data of all tensors can be read: none is traced, fake or on the meta device.

    None counts as readable, so that callers may pass optional tensors.
    """
    # Subclasses such as FakeTensor hold no data; Parameter is the only subclass in use that does.
    return all(t is None or (type(t) in (Tensor, Parameter) and not t.is_meta) for t in tensors)


def format_shapes(name: str, **parts: Any) -> str:
    """Format a tensor whose data cannot be read, such as ``JaggedTensor(values=int64[3], lengths=int32[2])``.

    Args:
        name: Class name.
        **parts: Fields to show. Tensors are shown as dtype and shape, other values as they are. Fields that
            are None are left out.
    """
    shown = {key: value for key, value in parts.items() if value is not None}
    items = (
        f"{key}={_format_shape(value) if isinstance(value, Tensor) else value}"
        for key, value in shown.items()
    )
    return f"{name}({', '.join(items)})"


def format_bags(values: Tensor, offsets: list[int]) -> str:
    """Format the values per bag, such as ``[[5], [], [7, 1]]``.

    Args:
        values: [N, ...].
        offsets: Bag boundaries in ``values``. The first need not be 0.
    """
    num_bags = len(offsets) - 1
    # Count the bags too: empty bags print brackets.
    short = num_bags + values[offsets[0] : offsets[-1]].numel() > _MAX_PRINTED
    # Only bags to show are read, so that printing a large tensor stays fast.
    bags = [
        _join_list(
            [_format_value(row) for row in values[offsets[bag] : offsets[bag + 1]].tolist()]
            if not short or offsets[bag + 1] - offsets[bag] <= 2 * _EDGE_ITEMS
            else _format_shortened(values[offsets[bag] : offsets[bag + 1]])
        )
        for bag in _shown_indices(num_bags, short)
    ]
    return _join_list(_insert_ellipsis(bags) if short and num_bags > 2 * _EDGE_ITEMS else bags)


def format_keyed_jagged(kjt: KeyedBags) -> str:
    """Format a KeyedJaggedTensor with a line per key. If its data cannot be read, format only the shapes."""
    values, weights = kjt.values(), kjt.weights_or_none()
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    if not is_readable(values, weights, lengths, offsets):
        return format_shapes(
            "KeyedJaggedTensor",
            keys=kjt.keys(),
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
        )
    # A single copy to the host for all keys.
    starts = kjt.offsets().tolist()
    texts = [
        _format_weighted_bags(values, weights, starts[first : last + 1])
        for first, last in pairwise(kjt.lengths_offset_per_key())
    ]
    return format_per_key("KeyedJaggedTensor", kjt.keys(), texts)


def format_per_key(name: str, keys: list[str], formatted: list[str]) -> str:
    """Format a class name, followed by a line per key in braces.

    Args:
        name: Class name.
        keys: Feature names.
        formatted: Formatted bags or rows, by key.
    """
    lines = ",\n".join(f'    "{key}": {text}' for key, text in zip(keys, formatted, strict=True))
    return f"{name}({{\n{lines}\n}})" if lines else f"{name}()"


def format_rows(rows: Tensor) -> str:
    """Format a dense tensor, such as ``[[1.0, 2.0], [3.0, 4.0]]``, shortened like bags."""
    # Only dimension 0 is shortened, so a tensor with few rows is printed in full.
    short = rows.numel() > _MAX_PRINTED and rows.dim() > 0 and rows.size(0) > 2 * _EDGE_ITEMS
    return _join_list(_format_shortened(rows) if short else [_format_value(row) for row in rows.tolist()])


def _format_weighted_bags(values: Tensor, weights: Tensor | None, offsets: list[int]) -> str:
    """Format the bags of a key: only values, or values and weights on separate lines."""
    text = format_bags(values, offsets)
    if weights is None:
        return text
    return f'{{\n        "values": {text},\n        "weights": {format_bags(weights, offsets)}\n    }}'


def _format_shape(tensor: Tensor) -> str:
    """Format dtype and shape, such as ``int64[3]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown_indices(count: int, short: bool) -> list[int]:
    """Return which list indices to print: all, or if ``short``, only the first and last ``_EDGE_ITEMS``."""
    indices = list(range(count))
    return [*indices[:_EDGE_ITEMS], *indices[-_EDGE_ITEMS:]] if short and count > 2 * _EDGE_ITEMS else indices


def _format_shortened(rows: Tensor) -> list[str]:
    """Format the first and last rows, with an ellipsis in between."""
    return _insert_ellipsis(
        [_format_value(rows[i].tolist()) for i in _shown_indices(rows.size(0), short=True)]
    )


def _insert_ellipsis(texts: list[str]) -> list[str]:
    """Insert "..." after the first ``_EDGE_ITEMS`` items."""
    return [*texts[:_EDGE_ITEMS], "...", *texts[_EDGE_ITEMS:]]


def _join_list(texts: list[str]) -> str:
    """Join formatted items as a list in brackets."""
    return f"[{', '.join(texts)}]"


def _format_value(item: Any) -> str:
    """Format a number, or a nested list of numbers. Floats get six significant digits."""
    # tolist() widens a float32 0.1 to 0.10000000149011612.
    if isinstance(item, list):
        return _join_list([_format_value(part) for part in item])
    return repr(float(f"{item:.6g}")) if isinstance(item, float) else repr(item)
