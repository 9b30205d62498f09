"""The import hook that finds MeshRec under TorchRec's import paths. Modules and names are made on first
use.
"""

import difflib
import importlib
import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from multiprocessing import spawn
from types import ModuleType
from typing import Any

from meshrec.compat.bridge.missing import MISSING
from meshrec.compat.bridge.names import MODULES

FORCE = "MESHREC_COMPAT_FORCE"
SCRIPT = "MESHREC_COMPAT_SCRIPT"
_PACKAGES = ("torchrec", "fbgemm_gpu")
_OPERATORS = "meshrec.compat.bridge.sparse.fbgemm"
_logger = logging.getLogger("meshrec")


class _BridgedModule(ModuleType):
    """A module of TorchRec's name whose contents are looked up in MeshRec on first use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__") and name != "__version__":
            raise AttributeError(name)
        target = MODULES[self.__name__].get(name)
        path = f"{self.__name__}.{name}"
        if target is not None:
            value = _resolve(target)
        elif path in MODULES:
            value = importlib.import_module(path)
        else:
            # An attribute that is not there must be this error: hasattr, copy and pickle rely on it.
            # ``from module import name`` then asks the finder for a submodule, which raises the ImportError.
            raise AttributeError(explain(path))
        setattr(self, name, value)
        return value

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        below = {path.removeprefix(prefix).split(".")[0] for path in MODULES if path.startswith(prefix)}
        return sorted({*super().__dir__(), *MODULES[self.__name__], *below})


class Bridge(MetaPathFinder, Loader):
    """The finder of the bridged packages' modules.

    It also finds the modules that start processes, such as joblib, so that these have the bridge too.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a bridged module; raise ImportError for one that has no counterpart."""
        if fullname in _SPAWNERS:
            return _followed(fullname, path)
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname not in MODULES:
            raise ImportError(explain(fullname), name=fullname)
        # Every module is a package, so that an import of a name it lacks comes back here.
        return ModuleSpec(fullname, self, origin="meshrec.compat.torchrec", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return an empty module that looks names up."""
        module = _BridgedModule(spec.name, f"MeshRec under the name {spec.name}.")
        vars(module)["__all__"] = [name for name in MODULES[spec.name] if not name.startswith("_")]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Register FBGEMM's operators, which no import finds. Other names are looked up on first use."""
        if module.__name__ in self.packages and "fbgemm_gpu" in self.packages:
            importlib.import_module(_OPERATORS).register_fbgemm_operators()


def install(*, force: bool = False) -> tuple[str, ...]:
    """Bridge ``torchrec`` and ``fbgemm_gpu`` if they are not installed, or both if forced.

    Args:
        force: also replace installed packages, as ``MESHREC_COMPAT_FORCE=1`` does.

    Returns:
        The packages that are bridged now.

    Raises:
        ImportError: it is forced after the real package was imported.
    """
    force = force or os.environ.get(FORCE, "") not in ("", "0")
    uninstall()
    wanted = [package for package in _PACKAGES if force or not _is_installed(package)]
    if loaded := [package for package in wanted if package in sys.modules]:
        raise ImportError(
            f"{loaded[0]} is imported already, so MeshRec cannot take its place. Import "
            "meshrec.compat.torchrec before it.",
            name=loaded[0],
        )
    if "torchrec" not in wanted:
        _logger.warning("torchrec is installed and used as it is; %s=1 puts MeshRec in its place.", FORCE)
    if wanted:
        sys.meta_path.insert(0, Bridge(wanted))
        for module in (spawn, *(sys.modules[name] for name in _SPAWNERS if name in sys.modules)):
            _follow_spawned(module)
    return tuple(wanted)


class _BridgeThere:
    """An object that bridges a process when it is unpickled: a spawned process reads it before it imports the
    script.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def __reduce__(self) -> Any:
        return _bridge_here, (self.packages,)


def _bridge_here(packages: Sequence[str]) -> None:
    if not bridged_packages():
        sys.meta_path.insert(0, Bridge(packages))


# Modules that start processes: Python's own, the one that notebooks use, and joblib's.
_SPAWNERS = (
    "multiprocess.spawn",
    "loky.backend.spawn",
    "joblib.externals.loky.backend.spawn",
)


class _Following(Loader):
    """A loader of a module that starts processes, which gives these the bridge."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _follow_spawned(module)


def _followed(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.loader is not None:
        spec.loader = _Following(spec.loader)
    return spec


def _follow_spawned(module: Any) -> None:
    """Let the processes that a module spawns have the bridge of this process."""
    describe = module.get_preparation_data
    if hasattr(describe, "has_bridge"):
        return

    def with_bridge(*args: Any, **kwargs: Any) -> dict[str, Any]:
        data: dict[str, Any] = describe(*args, **kwargs)
        if packages := bridged_packages():
            data["meshrec_bridge"] = _BridgeThere(packages)
        return data

    with_bridge.has_bridge = True  # type: ignore[attr-defined]
    module.get_preparation_data = with_bridge


def uninstall() -> None:
    """Remove the bridge, and the modules that it made."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Bridge)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _BridgedModule)]:
        del sys.modules[name]
    if _OPERATORS in sys.modules:
        sys.modules[_OPERATORS].remove_fbgemm_operators()


def bridged_packages() -> tuple[str, ...]:
    """Return the packages whose names lead to MeshRec at present."""
    return tuple(p for finder in sys.meta_path if isinstance(finder, Bridge) for p in finder.packages)


def explain(path: str) -> str:
    """Explain why a dotted name of TorchRec has no counterpart, and name the nearest thing."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        known = MISSING.get(".".join(parts[:length]))
        if known is not None:
            return f"MeshRec has no {path}: {known}"
    module, _, name = path.rpartition(".")
    close = difflib.get_close_matches(name, MODULES.get(module, []), 1, 0.6)
    where = [other for other, names in MODULES.items() if name in names and other != module]
    if where:
        return f"MeshRec has no {path}. {name} is in {where[0]}."
    hint = (
        f"The nearest name is {module}.{close[0]}." if close else "docs/from-torchrec.md lists what there is."
    )
    return f"MeshRec has no {path}. {hint}"


def _resolve(target: str) -> Any:
    path, _, name = target.partition(":")
    module = importlib.import_module(path)
    return getattr(module, name) if name else module


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
