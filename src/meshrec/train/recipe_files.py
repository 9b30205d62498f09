"""Find recipes by name: built-in ones, and a user's in Python and YAML files."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from meshrec.data.faults import did_you_mean
from meshrec.data.locations import is_address
from meshrec.train.recipe import YAML_SUFFIXES, Recipe

T = TypeVar("T")
PATH_FIELDS = ("train", "validation", "test", "log")
"""Data source fields in which strings are paths. In all other fields, only a ``Path`` is a path."""


def resolve(name: str) -> Recipe:
    """Find a recipe, and return it.

    Relative paths in a recipe file start at the file's folder.

    Args:
        name: name of a built-in recipe, path of a YAML file, ``path/to/file.py:function``, or
            ``package.module:function``.

    Raises:
        ValueError: the recipe does not exist, or the function does not return a recipe.
    """
    if name.endswith(YAML_SUFFIXES):
        from meshrec.train.yaml_recipes import from_yaml

        return from_folder(from_yaml(Path(name)), Path(name).resolve().parent)
    name = full_name(name)
    if ":" not in name:
        # Imported here, because these recipes need the modules of all models and sources.
        from meshrec.train.recipes import RECIPES

        if name in RECIPES:
            return RECIPES[name]()
        names = ", ".join(RECIPES)
        raise ValueError(
            f"there is no recipe {name!r}; there are {names}. Your own: path/to/file.py:function, "
            f"file.yaml or "
            f"package.module:function.{did_you_mean(name, RECIPES) or _suggest_function(name)}"
        )
    recipe = call_recipe(load_function(name), name)
    file = Path(name.rpartition(":")[0])
    return from_folder(recipe, file.resolve().parent) if file.suffix == ".py" else recipe


def full_name(name: str) -> str:
    """Append ``:function`` to a recipe name ``path/to/file.py``, if the file has a single recipe.

    Return other names unchanged.
    """
    names = _recipes_of_file(name)
    return names[0] if len(names) == 1 else name


def _suggest_function(name: str) -> str:
    """Return a hint for an error about a recipe file named without a function.

    The hint lists up to three functions in the file. It is empty if ``name`` is not a Python file, or if the
    file has no functions.
    """
    names = _recipes_of_file(name)
    return f" Did you mean {' or '.join(names[:3])}?" if names else ""


def _recipes_of_file(name: str) -> list[str]:
    """List the recipes in a Python file, as ``file.py:function``, without executing the file.

    Recipes are functions annotated to return a Recipe, or if there are none, all public functions.
    """
    try:
        # A file that cannot be parsed has no recipes to list. Loading it reports the error.
        body = ast.parse(Path(name).read_text(encoding="utf-8")).body if name.endswith(".py") else []
    except (OSError, ValueError, SyntaxError):
        return []
    # The file is parsed, not executed: a file is executed only if the user names a function in it.
    functions = [node for node in body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    recipes = [node for node in functions if node.returns and ast.unparse(node.returns).endswith("Recipe")]
    return [f"{name}:{node.name}" for node in recipes or functions]


def call_recipe(function: Any, name: str) -> Recipe:
    """Call a recipe function, and return the recipe.

    Raises:
        ValueError: ``function`` cannot be called without arguments, or does not return a recipe.
    """
    if not callable(function):
        raise ValueError(f"recipe {name!r}: {function!r} is not a function. Name one that the file has.")
    # Checked before the call: a TypeError from inside the function would look the same.
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(
            f"recipe {name!r}: {function.__name__}() cannot be called without arguments ({error}); give "
            "all of them defaults."
        ) from error
    recipe = function()
    if not isinstance(recipe, Recipe):
        raise ValueError(
            f"recipe {name!r}: {function.__name__}() gave {recipe!r}; it must return a meshrec.train.Recipe."
        )
    return recipe


def load_function(name: str) -> Callable[..., Any]:
    """Import a module or file, and return the named function in it.

    Args:
        name: ``path/to/file.py:function`` or ``package.module:function``.

    Raises:
        ValueError: the function does not exist.
    """
    location, _, function_name = name.rpartition(":")
    module = module_of_file(Path(location)) if location.endswith(".py") else _import_module(location, name)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [attribute for attribute, value in vars(module).items() if callable(value)]
        raise ValueError(
            f"recipe {name!r}: {location} has no function {function_name!r}. Name one that it has."
            f"{did_you_mean(function_name, functions)}"
        )
    result: Callable[..., Any] = function
    return result


def module_name(path: Path) -> str:
    """Return the module name under which a recipe file is put into ``sys.modules``."""
    return f"meshrec_recipe_{path.stem}"


def module_of_file(path: Path, *, loader: SourceFileLoader | None = None) -> ModuleType:
    """Execute a recipe file, and return the module.

    Args:
        loader: import loader for the file. If None, the file is read from disk, and may import modules from
            its folder.

    Raises:
        ValueError: the file does not exist, or it cannot be imported.
    """
    if not path.is_file():
        siblings = [str(sibling) for sibling in path.parent.glob("*.py")]
        raise ValueError(
            f"recipe file {path} does not exist. Name a recipe, or "
            f"FILE.py:FUNCTION.{did_you_mean(str(path), siblings)}"
        )
    name = module_name(path)
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    folder = str(path.resolve().parent)
    if loader is None and folder not in sys.path:
        # Appended, not inserted: modules next to the recipe can be imported, but never shadow a package.
        sys.path.append(folder)
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise ValueError(
            f"{error.filename}:{error.lineno}: {error.msg}. Fix this line of the recipe."
        ) from error
    except ModuleNotFoundError as error:
        raise ValueError(
            f"recipe file {path}: there is no module {error.name!r}, neither installed nor in {folder}. "
            "Install it, or put it there."
        ) from error
    return module


def _import_module(module: str, name: str) -> ModuleType:
    """Import a recipe's module, which may be in the current folder."""
    # Append, so that the current folder can be imported from but never shadows installed packages.
    if "" not in sys.path:
        sys.path.append("")
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"recipe {name!r}: there is no module {error.name!r}. Install it, or name a file."
        ) from error


def from_folder(recipe: Recipe, folder: Path) -> Recipe:
    """Return a recipe whose relative paths, to data and to a plan, start at ``folder``."""
    return dataclasses.replace(
        recipe,
        data=_resolve_paths(recipe.data, folder, path_fields=PATH_FIELDS),
        placement=_resolve_paths(recipe.placement, folder),
    )


def _resolve_paths(holder: T, folder: Path, *, path_fields: tuple[str, ...] = ()) -> T:
    """Return a copy of a dataclass in which relative paths start at ``folder``.

    Args:
        path_fields: names of the fields in which strings are paths. In all other fields, only a ``Path`` is a
            path.
    """
    if not dataclasses.is_dataclass(holder):
        return holder
    values = {field.name: getattr(holder, field.name) for field in dataclasses.fields(holder) if field.init}
    absolute = {
        name: _resolve_path(value, folder, strings_are_paths=name in path_fields)
        for name, value in values.items()
    }
    # Only changed fields, so that a recipe without relative paths stays the same object.
    moved = {name: path for name, path in absolute.items() if path is not values[name]}
    return dataclasses.replace(holder, **moved) if moved else holder  # type: ignore[type-var]


def _resolve_path(value: Any, folder: Path, *, strings_are_paths: bool) -> Any:
    """Return ``folder / value`` if ``value`` is a relative path, else ``value`` itself."""
    if isinstance(value, tuple | list):
        paths = type(value)(
            _resolve_path(item, folder, strings_are_paths=strings_are_paths) for item in value
        )
        return value if paths == value else paths
    if isinstance(value, Path):
        # `Path()` is a default that means no path.
        return value if value.is_absolute() or value == Path() else folder / value
    if strings_are_paths and isinstance(value, str) and value and not is_address(value):
        return value if Path(value).is_absolute() else str(folder / value)
    return value
