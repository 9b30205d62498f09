"""Copy a recipe's source code into the run folder, and decide whether the code of a run may be executed.

[Note: whose code a run executes]

A run's ``config.json`` names the recipe's Python code, and `evaluate`, `export` or ``--resume`` execute
it to build the model again. A run from somebody else could name any code. So the code is executed only if

- the recipe is a built-in MeshRec recipe, or the caller names the source; or
- this user trained the run: it carries a seal, made with a key that only this user can read (`key_path`),
  over the source name and all file digests; or
- the user confirms it: ``--trust``, in Python ``find_run(name, trust=True)``.

The copy is the code that trained the run. Unchanged original files take precedence, so that code can still
find files next to itself. The copy is executed from the bytes whose digests were compared: nothing else in
the folder, such as cached bytecode, is used.
"""

import contextlib
import hashlib
import hmac
import importlib
import importlib.util
import json
import logging
import os
import secrets
import sys
from collections.abc import Mapping
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from typing_extensions import override

from meshrec.durable import CreatedPath, write_durably
from meshrec.train.recipe import YAML_SUFFIXES, Recipe
from meshrec.train.recipe_files import call_recipe, module_name, module_of_file, resolve
from meshrec.train.run_folder import CONFIG, RunFolder

COPY = "source"
"""Folder with the copied source code, inside the run folder."""
# Size of the user's key for HMAC-SHA-256.
_KEY_BYTES = 32
_logger = logging.getLogger("meshrec")


def key_path() -> Path:
    """Return the path of this user's secret key, by which runs are sealed. The file may not exist."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "meshrec" / "run-key"


def copy_source(folder: RunFolder, source: str | None, before: Any = None) -> dict[str, Any] | None:
    """Copy a recipe's source code into the run folder, and seal the copy with this user's key.

    The recipe must have been resolved in this process.

    Args:
        folder: run folder.
        source: recipe name or file, as given to `resolve`.
        before: value returned at an earlier start of the same run; None: the first start.

    Returns:
        Entry for ``config.json`` with file digests, the original folder and the seal. None for built-in
        recipes, or if the recipe has no source code.
    """
    if source is None or not _is_code(source):
        return None
    try:
        origin, files = _read_sources(source)
    except (OSError, ImportError) as error:
        _logger.warning("%s gets no copy of its recipe %s: %s", folder.path, source, error)
        return None
    copy = folder.path / COPY
    if origin == copy.resolve() and before is not None:  # the copy itself was executed
        origin = Path(before["origin"])
    for name, content in files.items():
        path = copy / name
        if not path.is_file() or path.read_bytes() != content:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_durably(path, content)
    # The seal covers these digests, so the copy cannot change unnoticed.
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    entry = {"origin": str(origin), "files": digests}
    try:
        key = _key(make=True)
    except (OSError, RuntimeError, ValueError) as error:
        _logger.warning(
            "%s gets no seal, so that commands which read this run will ask for --trust: %s",
            folder.path,
            error,
        )
        return {**entry, "seal": None}
    return {**entry, "seal": _seal(key, source, entry)}


def source_digests(source: str | None) -> dict[str, str]:
    """Return the SHA-256 for every source file in a recipe, by file name; empty for built-in recipes."""
    if source is None or not _is_code(source):
        return {}
    try:
        _, files = _read_sources(source)
    except (OSError, ImportError):
        return {}
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}


def recorded_recipe(folder: RunFolder, config: Mapping[str, Any]) -> Recipe:
    """Execute the recipe source that a run's ``config.json`` names, and return the recipe.

    Raises:
        ValueError: the source may not be executed, or no longer exists.
    """
    source, entry = config["source"], config.get("code")
    if not _is_code(source):
        from meshrec.train.recipes import RECIPES
        from meshrec.train.yaml_recipes import recipe_of

        # Built-in recipes are part of MeshRec, and need no seal.
        if source in RECIPES:
            return resolve(source)
        return recipe_of(config["recipe"], f"{folder.path / CONFIG}: recipe")
    doubt = _distrust_reason(source, entry)
    if doubt is not None and not folder.is_trusted:
        path = _code_path(folder, source)
        raise ValueError(
            f"the recipe of {folder.path} is Python code, {path}, and {doubt}. It was not executed. Read it "
            f"(less {path}); if you trust it, confirm with --trust (in Python: find_run(..., trust=True))."
        )
    file, _, function = source.rpartition(":")
    if entry is None or not file.endswith(".py"):
        return resolve(source)
    origin, main = Path(entry["origin"]), Path(file).name
    # Unchanged original files are preferred, because the code may read files next to itself.
    if doubt is None and _read_files(origin, entry) is not None:
        return resolve(f"{origin / main}:{function}")
    copy = folder.path / COPY
    # Without a seal, the digests come from the same source as the files, so checking them proves nothing.
    files = _read_files(copy, entry, check=doubt is None)
    if files is None:
        raise ValueError(
            f"{copy} was changed after the run was trained, and {origin / main} has changed as well. "
            "Restore one of them, or name the recipe's source yourself."
        )
    if doubt is None:
        _logger.warning("%s has changed: the run's own copy in %s is used", origin / main, copy)
    return call_recipe(getattr(_execute_copy(copy, main, files), function, None), f"{copy / main}:{function}")


def _is_code(source: str) -> bool:
    """Return whether a recipe is Python code of a user, rather than a built-in recipe or a YAML file.

    A YAML recipe needs no code, because ``config.json`` contains all of it.
    """
    return ":" in source and not source.endswith(YAML_SUFFIXES)


def _code_path(folder: RunFolder, source: str) -> str:
    """Return the path at which the user can read the code: the copy if it exists, else the original."""
    location = source.rpartition(":")[0]
    name = Path(location).name if location.endswith(".py") else f"{location.replace('.', '/')}.py"
    copy = folder.path / COPY / name
    return str(copy if copy.is_file() else location)


def _distrust_reason(source: str, entry: Any) -> str | None:
    """Return why code needs the user's consent before it is executed; None if this user's key signed it."""
    if not isinstance(entry, dict) or not entry.get("seal"):
        return "the run has no seal that says who trained it"
    try:
        key = _key(make=False)
    except (OSError, RuntimeError, ValueError) as error:
        return f"your key cannot be read ({error})"
    # In constant time, so that the comparison does not reveal the seal.
    if key is None or not hmac.compare_digest(_seal(key, source, entry), str(entry["seal"])):
        return f"it was not trained with your key ({key_path()})"
    return None


def _seal(key: bytes | None, source: str, entry: Mapping[str, Any]) -> str:
    """Return the seal: the HMAC-SHA-256 of source name, original folder and file digests."""
    assert key is not None
    sealed = [source, entry.get("origin"), entry.get("files")]
    return hmac.new(key, json.dumps(sealed, sort_keys=True).encode(), hashlib.sha256).hexdigest()


def _key(*, make: bool) -> bytes | None:
    """Return this user's secret key, and create it if ``make``. Raise ValueError if it is not secret."""
    path = key_path()
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Write the key under another name first, so that no process reads a partial key.
        scratch = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor, created = CreatedPath.create_file(scratch, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(secrets.token_bytes(_KEY_BYTES))
            # os.link fails if the file exists: then another process was faster, and that key is used.
            with contextlib.suppress(FileExistsError):
                os.link(scratch, path)
        finally:
            created.remove()
    try:
        about = path.stat()
    except FileNotFoundError:
        return None
    # A key that other users know would let them seal any code in this user's name.
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise ValueError(
            f"others can read or write {path}. Run chmod 600 on it, or remove it to get a new one"
        )
    key = path.read_bytes()
    if len(key) != _KEY_BYTES:
        raise ValueError(f"{path} is damaged. Remove it to get a new one")
    return key


def _read_sources(source: str) -> tuple[Path, dict[str, bytes]]:
    """Read a recipe's source files: the recipe itself, and the modules it imported from the same folder."""
    location = source.rpartition(":")[0]
    if not location.endswith(".py"):
        path = Path(str(importlib.import_module(location).__file__))
        return path.parent, {f"{location.replace('.', '/')}.py": path.read_bytes()}
    # The file that was executed, even if the current folder has changed since.
    loaded = sys.modules.get(module_name(Path(location)))
    main = Path(location if loaded is None else str(loaded.__file__)).resolve()
    files = {main.name: main.read_bytes()}
    neighbours = {entry.removesuffix(".py") for entry in os.listdir(main.parent)}
    for name, module in list(sys.modules.items()):
        # Resolving the paths of all imported modules takes a third of a second.
        if name.partition(".")[0] not in neighbours:
            continue
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or not file.endswith(".py"):
            continue
        path = Path(file).resolve()
        # Include only modules found through the recipe's folder, not an installation below it.
        expected = main.parent.joinpath(*name.split("."))
        if path in (expected.with_suffix(".py"), expected / "__init__.py"):
            files[path.relative_to(main.parent).as_posix()] = path.read_bytes()
    return main.parent, files


def _read_files(folder: Path, entry: Mapping[str, Any], *, check: bool = True) -> dict[str, bytes] | None:
    """Read the recorded source files.

    Returns:
        File content by relative path. None if a file is missing, lies outside the folder or, with ``check``,
        has changed.
    """
    files = {}
    for name, digest in entry["files"].items():
        path = folder / name
        # The entry may come from somebody else: the names must not leave the folder.
        if Path(name).is_absolute() or ".." in Path(name).parts or not path.is_file():
            return None
        files[name] = path.read_bytes()
        if check and hashlib.sha256(files[name]).hexdigest() != digest:
            return None
    return files


class _InMemoryLoader(SourceFileLoader):
    """Import loader that executes a module from bytes in memory, never from cached bytecode."""

    def __init__(self, name: str, path: Path, content: bytes) -> None:
        super().__init__(name, str(path))
        self._content = content

    def get_data(self, path: str) -> bytes:
        """Return the source code in memory instead of reading ``path``."""
        return self._content

    def path_stats(self, path: str) -> Mapping[str, Any]:
        """Raise OSError, which makes the loader ignore cached bytecode."""
        raise OSError(path)


class _InMemoryFinder(MetaPathFinder):
    """Import finder for the modules next to a recipe, which are executed from copies in memory."""

    def __init__(self, folder: Path, files: Mapping[str, bytes]) -> None:
        self._folder, self._files = folder, files

    @override
    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module, or None if the module is not among the copied files."""
        location = fullname.replace(".", "/")
        for name, is_package in ((f"{location}.py", False), (f"{location}/__init__.py", True)):
            if name in self._files:
                loader = _InMemoryLoader(fullname, self._folder / name, self._files[name])
                return importlib.util.spec_from_loader(fullname, loader, is_package=is_package)
        if any(name.startswith(f"{location}/") for name in self._files):  # a folder without __init__.py
            return ModuleSpec(fullname, None, is_package=True)
        return None


def _execute_copy(folder: Path, main: str, files: Mapping[str, bytes]) -> ModuleType:
    """Execute the copy of a recipe file, and return the module."""
    # The finder comes before sys.path, because copied modules must take precedence over changed files.
    neighbours = {name: content for name, content in files.items() if name != main}
    if neighbours:
        sys.meta_path.insert(0, _InMemoryFinder(folder, neighbours))
    path = folder / main
    return module_of_file(path, loader=_InMemoryLoader(module_name(path), path, files[main]))
