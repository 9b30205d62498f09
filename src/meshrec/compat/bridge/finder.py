"""Import hook with which ``import torchrec`` gives MeshRec's classes. Names are resolved at first use."""

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

# Environment variables, which child processes inherit: whether to replace installed packages, and the path of
# the script to run.
FORCE = "MESHREC_COMPAT_FORCE"
SCRIPT = "MESHREC_COMPAT_SCRIPT"
_PACKAGES = ("torchrec", "fbgemm_gpu")
_OPERATORS = "meshrec.compat.bridge.sparse.fbgemm"
_logger = logging.getLogger("meshrec")


class _BridgedModule(ModuleType):
    """Module with a TorchRec name, whose attributes are MeshRec's objects.

    An attribute is imported from MeshRec when the program first reads it. If the program replaces an
    attribute, the replacement also takes effect in MeshRec's module.
    """

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
        # Cached: the next access does not call __getattr__, and a reference stays the same object.
        vars(self)[name] = value
        return value

    # Tests of TorchRec programs patch names in TorchRec's modules, such as the clock of a module. MeshRec's
    # code reads the name in the defining module, so the replacement must go there too.
    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, _BridgedModule):
            # The import of a submodule; torchrec.optim.apply_optimizer_in_backward stays a function.
            if name not in MODULES[self.__name__]:
                super().__setattr__(name, value)
            return
        super().__setattr__(name, value)
        if (module := _defining_module(self.__name__, name)) is not None:
            self._originals().setdefault(name, getattr(module, name))
            setattr(module, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if name in self._originals():
            setattr(_defining_module(self.__name__, name), name, self._originals().pop(name))

    def _originals(self) -> dict[str, Any]:
        """Return the original values of attributes which the program has replaced, by name."""
        values: dict[str, Any] = vars(self).setdefault("_meshrec_originals", {})
        return values

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        below = {path.removeprefix(prefix).split(".")[0] for path in MODULES if path.startswith(prefix)}
        return sorted({*super().__dir__(), *MODULES[self.__name__], *below})


class Bridge(MetaPathFinder, Loader):
    """Meta-path finder for the bridged packages.

    It also hooks modules that start processes, such as joblib's, so that their child processes have the
    bridge.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a bridged module, or None for modules outside the bridged packages.

        Args:
            fullname: dotted module name.
            path: search path of the parent package.
            target: ignored.

        Raises:
            ImportError: the module has no counterpart in MeshRec.
        """
        # These belong to other packages, so they must be tested before the package filter below.
        if fullname in _SPAWNERS:
            return _hooked_spec(fullname, path)
        if fullname == "torchrec" and fullname not in self.packages:
            _logger.warning("torchrec is installed and used as it is; %s=1 puts MeshRec in its place.", FORCE)
        if fullname.partition(".")[0] not in self.packages:
            return None
        if fullname not in MODULES:
            raise ImportError(explain(fullname), name=fullname)
        # Every module is a package, so that an import of a name it lacks comes back here.
        return ModuleSpec(fullname, self, origin="meshrec.compat.torchrec", is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module that resolves names on first use."""
        module = _BridgedModule(spec.name, f"MeshRec under the name {spec.name}.")
        module.__file__ = __file__
        vars(module)["__all__"] = [name for name in MODULES[spec.name] if not name.startswith("_")]
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Register FBGEMM's operators, because programs use them without an import."""
        if module.__name__ in self.packages and "fbgemm_gpu" in self.packages:
            importlib.import_module(_OPERATORS).register_fbgemm_operators()


def install(*, force: bool = False) -> tuple[str, ...]:
    """Bridge ``torchrec`` and ``fbgemm_gpu``, except packages that are installed. Bridge both if forced.

    Args:
        force: also replace installed packages, as ``MESHREC_COMPAT_FORCE=1`` does.

    Returns:
        Names of the bridged packages.

    Raises:
        ImportError: a package to replace is already imported.
    """
    force = force or os.environ.get(FORCE, "") not in ("", "0")
    # A second call replaces the first finder, and drops modules that it made for other packages.
    uninstall()
    packages = [package for package in _PACKAGES if force or not _is_installed(package)]
    if loaded := [package for package in packages if package in sys.modules]:
        raise ImportError(
            f"{loaded[0]} is imported already, so MeshRec cannot take its place. Import "
            "meshrec.compat.torchrec before it.",
            name=loaded[0],
        )
    # Installed even with nothing to bridge: it then logs at ``import torchrec`` that the real package is
    # used. Until that import, the script can still force the bridge. First, so that it precedes the path
    # finders.
    sys.meta_path.insert(0, Bridge(packages))
    for module in (spawn, *(sys.modules[name] for name in _SPAWNERS if name in sys.modules)):
        _hook_spawner(module)
    return tuple(packages)


class _BridgeInstaller:
    """Object that installs the bridge when it is unpickled.

    A spawned process unpickles this object before it imports the script.
    """

    def __init__(self, packages: Sequence[str]) -> None:
        self.packages = tuple(packages)

    def __reduce__(self) -> Any:
        return _install_bridge, (self.packages,)


def _install_bridge(packages: Sequence[str]) -> None:
    """Install the bridge for these packages, unless a bridge is installed already."""
    if not bridged_packages():
        sys.meta_path.insert(0, Bridge(packages))


# Modules that start processes: multiprocess (notebooks use it), and loky, also as vendored by joblib.
_SPAWNERS = ("multiprocess.spawn", "loky.backend.spawn", "joblib.externals.loky.backend.spawn")


class _HookingLoader(Loader):
    """Loader for a module that starts processes, such as joblib's. It hooks the module after loading it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _hook_spawner(module)


def _hooked_spec(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the import spec of a module that starts processes, with a loader that hooks the module."""
    spec = PathFinder.find_spec(fullname, path)
    if spec is not None and spec.loader is not None:
        spec.loader = _HookingLoader(spec.loader)
    return spec


def _hook_spawner(module: Any) -> None:
    """Change a module that starts processes, so that its child processes install the same bridge.

    Replaces the function ``get_preparation_data``, whose result is pickled for the child.
    """
    # Python's multiprocessing pickles this dict for the child, which unpickles it before it imports the
    # script.
    describe = module.get_preparation_data
    # install() may run again: hook a module only once.
    if hasattr(describe, "has_bridge"):
        return

    def with_bridge(*args: Any, **kwargs: Any) -> dict[str, Any]:
        # The key is not used by multiprocessing; unpickling its value is what installs the bridge.
        data: dict[str, Any] = describe(*args, **kwargs)
        if packages := bridged_packages():
            data["meshrec_bridge"] = _BridgeInstaller(packages)
        return data

    with_bridge.has_bridge = True  # type: ignore[attr-defined]
    module.get_preparation_data = with_bridge


def uninstall() -> None:
    """Remove the bridge and all bridged modules."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Bridge)]
    for name in [name for name, module in sys.modules.items() if isinstance(module, _BridgedModule)]:
        del sys.modules[name]
    if _OPERATORS in sys.modules:
        # A real fbgemm_gpu that is imported later must be able to register operators.
        sys.modules[_OPERATORS].remove_fbgemm_operators()


def bridged_packages() -> tuple[str, ...]:
    """Return the packages that are currently bridged."""
    return tuple(p for finder in sys.meta_path if isinstance(finder, Bridge) for p in finder.packages)


def explain(path: str) -> str:
    """Return why a TorchRec name has no counterpart, and the nearest alternative."""
    parts = path.split(".")
    # The name itself first, then its module and the packages around it: the longest entry explains most.
    for length in range(len(parts), 0, -1):
        reason = MISSING.get(".".join(parts[:length]))
        if reason is not None:
            return f"MeshRec has no {path}: {reason}"
    module, _, name = path.rpartition(".")
    # Only names that are fairly similar: 0.6 is difflib's default.
    close = difflib.get_close_matches(name, MODULES.get(module, []), 1, 0.6)
    where = [other for other, names in MODULES.items() if name in names and other != module]
    if where:
        return f"MeshRec has no {path}. {name} is in {where[0]}."
    hint = (
        f"The nearest name is {module}.{close[0]}." if close else "docs/from-torchrec.md lists what there is."
    )
    return f"MeshRec has no {path}. {hint}"


def _resolve(target: str) -> Any:
    """Import and return the object that ``module:name`` or ``module`` names."""
    path, _, name = target.partition(":")
    module = importlib.import_module(path)
    return getattr(module, name) if name else module


def _defining_module(path: str, name: str) -> ModuleType | None:
    """Return the MeshRec module that defines the object behind a bridged name.

    None if the name is a module, is an object of torch, or has another name in MeshRec.
    """
    target, _, attribute = MODULES[path].get(name, "").partition(":")
    return importlib.import_module(target) if attribute == name and target.startswith("meshrec.") else None


def _is_installed(package: str) -> bool:
    """Return whether a package is installed; namespace packages do not count."""
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # a folder without __init__.py has no origin
