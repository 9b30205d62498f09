"""Lazy imports of a package's public names, and imports without garbage collection."""

import gc
import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


class _Process:
    is_command = False


_process = _Process()


def declare_command() -> None:
    """Declare that this process runs MeshRec's command only, so `without_gc` may freeze imported objects."""
    _process.is_command = True


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn Python's garbage collection off while modules are imported.

    Nearly all that they define stays, and the collector looks through it again and again: a quarter of the
    time that torch takes to import.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if _process.is_command:
            gc.freeze()
        if was_on:
            gc.enable()


def importer(package: str, homes: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package whose names are imported at their first use.

    Args:
        package: the package's name.
        homes: the names of each module of the package that is imported late.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; use one of {package}.__all__."
            )
        return getattr(importlib.import_module(home_of[name]), name)

    return load
