"""Imports of public names on first use, and imports without garbage collection."""

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class _Process:
    """State of this process. ``_process`` is the only instance."""

    # Set by ``declare_command``, for the whole life of the process.
    is_command = False


_process = _Process()


def declare_command() -> None:
    """Declare that this process runs only MeshRec's command line. `without_gc` may then freeze objects."""
    _process.is_command = True


def is_command() -> bool:
    """Return whether this process runs MeshRec's command only."""
    return _process.is_command


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn Python's garbage collection off in a ``with`` block that imports modules.

    Nearly all objects defined by modules stay, and the collector would inspect them again and again. These
    inspections take a quarter of the time for importing torch.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Exclude the objects from later collections, too. Not in other programs: their garbage would stay.
        if _process.is_command:
            gc.freeze()
        if was_on:
            gc.enable()


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package that imports public names on first use.

    Args:
        package: name of the package.
        homes: the names to import, by the module that defines them.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        """Return a public name after importing its module. Raise AttributeError for any other name."""
        if name not in home_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; use one of {package}.__all__."
            )
        return getattr(importlib.import_module(home_of[name]), name)

    return load
