"""Imports of public names on first use, and imports without garbage collection."""

import ast
import functools
import gc
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
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


def import_on_use(package: str) -> Callable[[str], Any]:
    """Let a package import its public names on first use, so that it loads only the modules that are used.

    The package's ``__init__.py`` imports the names under ``if TYPE_CHECKING:``, for type checkers. At run
    time, the modules named there are imported when a program uses one of their names.

    Args:
        package: name of the package, which is being imported.

    Returns:
        The package's ``__getattr__``. It has been set already.
    """
    module = sys.modules[package]

    @functools.cache
    def module_names() -> dict[str, str]:
        """Return the module that defines each public name, as the source of the package says."""
        tree = ast.parse(Path(str(module.__file__)).read_bytes())
        blocks = [node for node in tree.body if isinstance(node, ast.If)]
        imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def load(name: str) -> Any:
        """Return a public name after importing its module. Raise AttributeError for any other name."""
        if name not in module_names():
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; use one of {package}.__all__."
            )
        value = getattr(importlib.import_module(module_names()[name]), name)
        setattr(module, name, value)
        return value

    vars(module).update(__getattr__=load, __dir__=lambda: sorted({*vars(module), *module_names()}))
    return load
