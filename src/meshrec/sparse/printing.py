"""The text of jagged and keyed tensors: by key and sample, cut short where it would fill the screen."""

from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from meshrec.sparse.keyed_bags import KeyedBags

_MANY = 1000  # numbers of one key above which the middle is left out, as torch does for its tensors
_EDGE = 3


def is_readable(*tensors: Tensor | None) -> bool:
    """Return whether the numbers can be read; not while a program is traced, nor on the meta device."""
    return all(t is None or (type(t) in (Tensor, Parameter) and not t.is_meta) for t in tensors)


def shape_text(name: str, **parts: Any) -> str:
    """Return the names, shapes and dtypes of ``parts``, which are printed if the values cannot be read."""
    known = {key: part for key, part in parts.items() if part is not None}
    texts = (f"{key}={_shape(part) if isinstance(part, Tensor) else part}" for key, part in known.items())
    return f"{name}({', '.join(texts)})"


def bags_text(values: Tensor, offsets: list[int]) -> str:
    """Return the values of each bag as text, such as ``[[5], [], [7, 1]]``."""
    num_bags = len(offsets) - 1
    short = num_bags + values[offsets[0] : offsets[-1]].numel() > _MANY
    bags = [
        _list_text(
            [_text(row) for row in values[offsets[bag] : offsets[bag + 1]].tolist()]
            if not short or offsets[bag + 1] - offsets[bag] <= 2 * _EDGE
            else _shortened(values[offsets[bag] : offsets[bag + 1]])
        )
        for bag in _shown(num_bags, short)
    ]
    return _list_text(_with_gap(bags) if short and num_bags > 2 * _EDGE else bags)


def keyed_jagged_text(kjt: KeyedBags) -> str:
    """Return one line per key, or the shapes if the values cannot be read."""
    values, weights = kjt.values(), kjt.weights_or_none()
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    if not is_readable(values, weights, lengths, offsets):
        return shape_text(
            "KeyedJaggedTensor",
            keys=kjt.keys(),
            values=values,
            weights=weights,
            lengths=lengths,
            offsets=offsets,
        )
    starts = kjt.offsets().tolist()
    texts = [
        _keyed_bags_text(values, weights, starts[first : last + 1])
        for first, last in pairwise(kjt.lengths_offset_per_key())
    ]
    return keyed_text("KeyedJaggedTensor", kjt.keys(), texts)


def keyed_text(name: str, keys: list[str], texts: list[str]) -> str:
    """Return one line per key."""
    lines = ",\n".join(f'    "{key}": {text}' for key, text in zip(keys, texts, strict=True))
    return f"{name}({{\n{lines}\n}})" if lines else f"{name}()"


def rows_text(rows: Tensor) -> str:
    """Return a dense tensor as text, such as ``[[1.0, 2.0], [3.0, 4.0]]``, shortened like the bags."""
    short = rows.numel() > _MANY and rows.dim() > 0 and rows.size(0) > 2 * _EDGE
    return _list_text(_shortened(rows) if short else [_text(row) for row in rows.tolist()])


def _keyed_bags_text(values: Tensor, weights: Tensor | None, offsets: list[int]) -> str:
    """Return the bags of one key: values alone, or values and weights on separate lines."""
    text = bags_text(values, offsets)
    if weights is None:
        return text
    return f'{{\n        "values": {text},\n        "weights": {bags_text(weights, offsets)}\n    }}'


def _shape(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(count: int, short: bool) -> list[int]:
    indices = list(range(count))
    return [*indices[:_EDGE], *indices[-_EDGE:]] if short and count > 2 * _EDGE else indices


def _shortened(rows: Tensor) -> list[str]:
    return _with_gap([_text(rows[i].tolist()) for i in _shown(rows.size(0), short=True)])


def _with_gap(texts: list[str]) -> list[str]:
    return [*texts[:_EDGE], "...", *texts[_EDGE:]]


def _list_text(texts: list[str]) -> str:
    return f"[{', '.join(texts)}]"


def _text(item: Any) -> str:
    """Format numbers with six digits; ``tolist`` would give a float32 0.1 as 0.10000000149011612."""
    if isinstance(item, list):
        return _list_text([_text(part) for part in item])
    return repr(float(f"{item:.6g}")) if isinstance(item, float) else repr(item)
