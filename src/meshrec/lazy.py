"""Names of a package that are imported when somebody uses them."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported at their first use.

    Args:
        package: the package's name.
        homes: the names of each module of the package that is imported late.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def found(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; use one of {package}.__all__."
            )
        return getattr(importlib.import_module(home_of[name]), name)

    return found
