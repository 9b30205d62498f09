"""Built-in recipes, and `resolve`, which finds built-in and user recipes by name."""

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from meshrec.data.locations import is_address
from meshrec.data.nearest import did_you_mean
from meshrec.optim import Adam
from meshrec.train.architectures import (
    DeepFMConfig,
    DINConfig,
    DLRMConfig,
    DLRMDCNConfig,
    MultiTaskConfig,
)
from meshrec.train.hstu_ranking import hstu_ranker
from meshrec.train.losses import BinaryCrossEntropy, Task, Tasks
from meshrec.train.next_item_recipes import NEXT_ITEM_RECIPES
from meshrec.train.published import avazu, criteo_kaggle, movielens_20m
from meshrec.train.recipe import DenseOptimizer, ModelConfig, Placement, Recipe, Training
from meshrec.train.schedule import Schedule
from meshrec.train.sources import MovieLens, SyntheticClicks
from meshrec.train.yaml_recipes import SUFFIXES, from_yaml

T = TypeVar("T")
PATH_FIELDS = ("train", "validation", "test", "log")
"""Data source fields in which strings are paths. In all other fields, only a ``Path`` is a path."""


def movielens_dlrm() -> Recipe:
    """Return a recipe for DLRM on MovieLens ratings: will this user like this movie?"""
    return Recipe(
        name="movielens_dlrm",
        data=MovieLens(),
        model=DLRMConfig(embedding_dim=128, bottom=(32,), top=(256, 128)),
        tables=Adam(lr=3e-3, weight_decay=0.1, decoupled_weight_decay=True),
        dense=DenseOptimizer(kind="adamw", lr=5e-4, weight_decay=0.1),
        schedule=Schedule(decay="linear"),
        training=Training(batch_size=1024, epochs=4, evaluate_every=26, patience=3, phases_every=20),
        # Shard the table of movies, as if it were too large for a single rank.
        placement=Placement(replicate_mib=1.0),
    )


def synthetic_clicks() -> Recipe:
    """Return a recipe for DLRM on synthetic clicks: how close does it come to the best possible AUC?"""
    return Recipe(
        name="synthetic_clicks",
        data=SyntheticClicks(),
        model=DLRMConfig(embedding_dim=16, bottom=(64,), top=(128, 64)),
        tables=Adam(lr=5e-3),
        dense=DenseOptimizer(kind="adam", lr=2e-3),
        schedule=Schedule(warmup_steps=50, decay="linear"),
        training=Training(batch_size=2048, epochs=3),
    )


def dlrm_benchmark() -> Recipe:
    """Return a recipe for DLRM as in the step benchmark: 26 tables of 100,000 rows x 64, 4 IDs per bag."""
    return Recipe(
        name="dlrm_benchmark",
        data=SyntheticClicks(
            num_features=26, num_embeddings=100_000, ids_per_feature=4, num_dense=13, exponent=1.05
        ),
        model=DLRMConfig(embedding_dim=64, bottom=(512, 256), top=(512, 512, 256)),
        dense=DenseOptimizer(kind="adagrad", lr=0.02),
        training=Training(batch_size=2048, max_steps=200, phases_every=10),
    )


def din() -> Recipe:
    """Return a recipe for DIN on MovieLens ratings: will this user like this movie, given earlier ratings?"""
    return _movielens_recipe("din", DINConfig(embedding_dim=64, attention=(64, 32), over=(128, 64)))


def deepfm() -> Recipe:
    """Return a recipe for DeepFM on MovieLens ratings: will this user like this movie?"""
    return _movielens_recipe("deepfm", DeepFMConfig(embedding_dim=64, bottom=(32,), deep=(256, 128)))


def dcn() -> Recipe:
    """Return a recipe for DCN-v2 (DLRM-DCN) on MovieLens ratings: will this user like this movie?"""
    return _movielens_recipe(
        "dcn", DLRMDCNConfig(embedding_dim=64, bottom=(32,), top=(256, 128), low_rank_dim=64)
    )


def mmoe() -> Recipe:
    """Return a recipe for MMoE on MovieLens ratings: will this user like this movie, and give it 5 stars?"""
    return dataclasses.replace(
        _movielens_recipe("mmoe", MultiTaskConfig(mixture="mmoe", embedding_dim=64, expert=(128, 64))),
        data=MovieLens(liked_from=(4.0, 5.0)),
        loss=Tasks(tasks=(Task("from_4", BinaryCrossEntropy()), Task("from_5", BinaryCrossEntropy()))),
    )


def _movielens_recipe(name: str, model: ModelConfig) -> Recipe:
    """Return the recipe `movielens_dlrm` with another name and model."""
    return dataclasses.replace(
        movielens_dlrm(),
        name=name,
        model=model,
        training=Training(batch_size=1024, epochs=4, evaluate_every=26, patience=3),
    )


RECIPES: Mapping[str, Callable[[], Recipe]] = {
    "movielens_dlrm": movielens_dlrm,
    "synthetic_clicks": synthetic_clicks,
    "dlrm_benchmark": dlrm_benchmark,
    "din": din,
    "deepfm": deepfm,
    "dcn": dcn,
    "mmoe": mmoe,
    "hstu_ranker": hstu_ranker,
    "criteo_kaggle": criteo_kaggle,
    "avazu": avazu,
    "movielens_20m": movielens_20m,
    **NEXT_ITEM_RECIPES,
}


def resolve(name: str) -> Recipe:
    """Find a recipe, and return it.

    Relative paths in a recipe file start at the file's folder.

    Args:
        name: name of a built-in recipe, path of a YAML file, ``path/to/file.py:function``, or
            ``package.module:function``.

    Raises:
        ValueError: the recipe does not exist, or the function does not return a recipe.
    """
    # Built-in names come first, so a file in the working directory cannot replace a built-in recipe.
    if name in RECIPES:
        return RECIPES[name]()
    if name.endswith(SUFFIXES):
        return from_folder(from_yaml(Path(name)), Path(name).resolve().parent)
    name = full_name(name)
    if ":" not in name:
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

    Args:
        function: the recipe function.
        name: recipe name, for errors.

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
        path: the file.
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
    """Import a recipe's module, which may be in the current folder.

    Args:
        module: module name.
        name: recipe name, for errors.
    """
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
        holder: a dataclass. Other objects are returned unchanged.
        folder: folder at which relative paths start.
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
    """Return ``folder / value`` if ``value`` is a relative path, else ``value`` itself.

    Args:
        value: field value. In tuples and lists, every item is resolved.
        folder: folder at which relative paths start.
        strings_are_paths: whether a string is a path.
    """
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
