"""Import LightGBM, in MeshRec's command without the libraries of its scikit-learn wrapper."""

import functools
import math
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from types import ModuleType
from typing import Any

from typing_extensions import override

from meshrec.data.faults import needs
from meshrec.lazy import is_command

# Optional for LightGBM. With scipy.stats, they take 0.6 of the 0.7 CPU seconds of its import.
_OPTIONAL = ("dask", "matplotlib", "pandas", "sklearn")


class _Hider(MetaPathFinder):
    """Import finder that hides packages from one thread: to it, they are not installed.

    Args:
        packages: names of the packages.
    """

    def __init__(self, packages: frozenset[str]) -> None:
        self._packages, self._thread = packages, threading.get_ident()

    @override
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> None:
        """Raise ModuleNotFoundError for a hidden package; else leave the search to other finders."""
        if fullname in self._packages and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(
                f"{fullname} is hidden from LightGBM, which must do without it.", name=fullname
            )


@functools.cache
def import_lightgbm() -> ModuleType:
    """Import LightGBM for training on arrays.

    In MeshRec's command, the module lacks classes such as ``LGBMClassifier``, because it is imported without
    optional libraries. Only the caller has this module. Other code that imports LightGBM, such as a recipe,
    gets another one with all classes.

    Raises:
        ModuleNotFoundError: LightGBM is not installed.
    """
    if not is_command() or "lightgbm" in sys.modules:
        return needs("lightgbm", "lightgbm")
    hider = _Hider(frozenset(_OPTIONAL) - sys.modules.keys())
    sys.meta_path.insert(0, hider)
    try:
        return needs("lightgbm", "lightgbm")
    finally:
        sys.meta_path.remove(hider)
        # Removed from `sys.modules`, so that a later import by other code gets a complete module.
        for name in [name for name in sys.modules if name.partition(".")[0] == "lightgbm"]:
            del sys.modules[name]


def early_stopping(patience: int) -> Callable[[Any], None]:
    """Return a callback that ends a fit as ``lightgbm.early_stopping`` does, for a single metric to maximize.

    LightGBM's own callback imports ``lightgbm`` again, which would load the libraries left out here.
    """
    stop = import_lightgbm().EarlyStopException
    best: tuple[float, int, Any] = (-math.inf, 0, None)

    def check(state: Any) -> None:
        nonlocal best
        (result,) = state.evaluation_result_list
        if best[2] is None or result[2] > best[0]:
            best = (result[2], state.iteration, state.evaluation_result_list)
        if state.iteration - best[1] >= patience or state.iteration == state.end_iteration - 1:
            raise stop(*best[1:])

    return check
