"""Text for the three types, exactly as TorchRec prints it: all digits, all bags."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from torch import Tensor

from meshrec.sparse.printing import format_per_key, format_shapes, is_readable

if TYPE_CHECKING:
    from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def jagged_text(jt: "JaggedTensor") -> str:
    """Return the bags, or values and weights on separate lines.

    Raises:
        ValueError: values have more than two dimensions.
    """
    if not is_readable(*jt._tensors()):
        return format_shapes("JaggedTensor", values=jt._values, weights=jt._weights, lengths=jt._lengths)
    offsets = jt.offsets().tolist()
    if jt._weights is None:
        return f"JaggedTensor({{\n    {_bags(jt._values, offsets)}\n}})\n"
    return (
        f'JaggedTensor({{\n    "values": {_bags(jt._values, offsets)},\n'
        f'    "weights": {_bags(jt._weights, offsets)}\n}})\n'
    )


def keyed_jagged_text(kjt: "KeyedJaggedTensor") -> str:
    """Return a line per key.

    Raises:
        ValueError: values have more than two dimensions.
    """
    if not kjt._keys or (kjt._lengths is None and kjt._offsets is None):
        return "KeyedJaggedTensor()\n"
    if not is_readable(*kjt._tensors()):
        return format_shapes(
            "KeyedJaggedTensor",
            keys=kjt._keys,
            values=kjt._values,
            weights=kjt._weights,
            lengths=kjt._lengths,
            offsets=kjt._offsets,
        )
    offsets, bags = kjt.offsets().tolist(), kjt.lengths_offset_per_key()
    texts = []
    for first, last in pairwise(bags):
        bounds = offsets[first : last + 1]
        text = _bags(kjt._values, bounds)
        if kjt._weights is not None:
            text = f'{{\n        "values": {text},\n        "weights": {_bags(kjt._weights, bounds)}\n    }}'
        texts.append(text)
    return format_per_key("KeyedJaggedTensor", kjt._keys, texts) + "\n"


def keyed_text(kt: "KeyedTensor") -> str:
    """Return a line per key."""
    if not kt._keys:
        return "KeyedTensor()\n"
    if not is_readable(kt._values):
        return format_shapes("KeyedTensor", keys=kt._keys, values=kt._values)
    pieces = kt._values.split(kt._length_per_key, dim=kt._key_dim)
    return format_per_key("KeyedTensor", kt._keys, [str(piece.tolist()) for piece in pieces]) + "\n"


def _bags(values: Tensor, offsets: Sequence[int]) -> str:
    if values.dim() > 2:
        raise ValueError(
            f"values of {values.dim()} dimensions have no text, got {list(values.shape)}; print values()."
        )
    return str([values[first:last].tolist() for first, last in pairwise(offsets)])
