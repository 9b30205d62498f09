"""State dicts keyed by parameter name that ``torch.distributed.checkpoint.state_dict`` can process.

torch expects an optimizer state dict keyed by parameter position, and converts it in place: on saving from
positions to names, on loading from names to positions. The dicts here accept assignments under positions and
names, and stay keyed by name.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any


class NamedState(dict[Any, Any]):
    """Optimizer state keyed by parameter name. ``state[i] = x`` with an int assigns to parameter i by name.

    Args:
        state: Optimizer state by parameter name.
        names: Name of each parameter, in the order of all groups; None for a parameter without a name.
    """

    def __init__(self, state: Mapping[str, Any], names: Sequence[str | None]) -> None:
        super().__init__(state)
        # Only for assignments by position; not pickled.
        self._names = names

    def __setitem__(self, key: Any, value: Any) -> None:
        # torch.distributed.checkpoint assigns by position while it converts the keys.
        super().__setitem__(self._names[key] if isinstance(key, int) else key, value)

    def __reduce__(self) -> Any:
        return _plain(self)


class NamedGroup(dict[str, Any]):
    """Parameter group with parameter names in ``"params"``. Assigned positions are replaced by names.

    Args:
        group: Hyperparameters, and ``"params"`` with names.
        names: Name of each parameter, as in `NamedState`.
    """

    def __init__(self, group: Mapping[str, Any], names: Sequence[str | None]) -> None:
        super().__init__(group)
        self._names = names

    def __setitem__(self, key: str, value: Any) -> None:
        # torch assigns the positions of the group's parameters while it converts the state dict.
        if key == "params":
            value = [self._names[param] if isinstance(param, int) else param for param in value]
        super().__setitem__(key, value)

    def __reduce__(self) -> Any:
        return _plain(self)


def _plain(mapping: dict[Any, Any]) -> Any:
    """Return the ``__reduce__`` result for an equal OrderedDict, which unpickles without this package."""
    return OrderedDict, (), None, None, iter(mapping.items())
