"""Keyed state dicts that ``torch.distributed.checkpoint.state_dict`` can process.

torch treats the keys in an optimizer's state as parameter positions, and replaces positions by names. Given
names, it would replace them by positions. These dicts accept both, and stay keyed by name.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class NamedState(dict[Any, Any]):
    """Optimizer state by parameter name. ``state[i] = x`` assigns to the name of parameter number i.

    Args:
        state: State by name.
        names: Name of each parameter, counted over all groups; None for an unnamed parameter.
    """

    def __init__(self, state: Mapping[str, Any], names: Sequence[str | None]) -> None:
        super().__init__(state)
        self._names = names

    def __setitem__(self, key: Any, value: Any) -> None:
        # torch.distributed.checkpoint assigns by position while it converts the keys.
        super().__setitem__(self._names[key] if isinstance(key, int) else key, value)

    def __reduce__(self) -> Any:
        return _plain(self)


class NamedGroup(dict[str, Any]):
    """Parameter group with names in ``"params"``. Positions assigned to ``"params"`` are replaced by names.

    Args:
        group: Hyperparameters and ``"params"``.
        names: Name of each parameter, as in `NamedState`.
    """

    def __init__(self, group: Mapping[str, Any], names: Sequence[str | None]) -> None:
        super().__init__(group)
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            value = _by_name(value, self._names)
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return _plain(self)


def _by_name(params: Iterable[Any], names: Sequence[str | None]) -> list[Any]:
    """Replace parameter positions by names, and leave names as they are."""
    return [names[param] if isinstance(param, int) else param for param in params]


def _plain(mapping: dict[Any, Any]) -> Any:
    """Return the ``__reduce__`` value of a plain OrderedDict, which loads without this package."""
    return OrderedDict, (), None, None, iter(mapping.items())
