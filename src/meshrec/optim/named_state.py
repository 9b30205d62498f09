"""State dicts of keyed optimizers that torch's functions for whole state can read.

``torch.distributed.checkpoint.state_dict`` takes the keys of an optimizer's state for positions of
parameters, and replaces positions by names. Given names, it would replace them by positions. These dicts know
both, and stay keyed by names.
"""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class NamedState(dict[Any, Any]):
    """State keyed by parameter names. A value stored under a position goes under the name.

    Args:
        state: the state by name.
        names: names by position among the parameters of all groups; None for a parameter without a name.
    """

    def __init__(self, state: Mapping[str, Any], names: Sequence[str | None]) -> None:
        super().__init__(state)
        self._names = names

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(self._names[key] if isinstance(key, int) else key, value)

    def __reduce__(self) -> Any:
        return _plain(self)


class NamedGroup(dict[str, Any]):
    """A group whose ``"params"`` are names, even when they are assigned by position. Arguments: see
    `NamedState`.
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
    return [names[each] if isinstance(each, int) else each for each in params]


def _plain(mapping: dict[Any, Any]) -> Any:
    """Convert to a plain OrderedDict, so that copies and pickles have a class that every reader knows."""
    return OrderedDict, (), None, None, iter(mapping.items())
