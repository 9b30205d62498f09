"""Imports of names at their first use, and imports without garbage collections."""

import atexit
import gc
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while modules are imported inside, because collections take a fifth of that time.

    Modules keep nearly all that they make. If torch is among them, the process has no models and tensors yet:
    then all objects leave the collector's lists, so that the collections of a training run do not visit them.
    """
    collects, begins = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if begins and "torch" in sys.modules:
            gc.freeze()
            atexit.register(gc.unfreeze)  # or nanobind reports what it has made for Triton as leaked
        if collects:
            gc.enable()


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
