"""Read and write recipes as YAML.

A YAML recipe has the fields of `Recipe`, and a ``type`` with the class name where several classes are
possible. Only MeshRec classes are created, and nothing in a file is executed.
"""

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from meshrec.data.faults import did_you_mean, needs
from meshrec.train import (  # noqa: F401 - their classes are found as subclasses
    architectures,
    click_logs,
    hstu_ranking,
    log_sources,
    losses,
    next_item_configs,
    sources,
    wide_deep,
)
from meshrec.train.recipe import YAML_SUFFIXES, Recipe
from meshrec.train.run_folder import to_json

# Default values in the JSON of features, which YAML leaves out.
_FEATURES = {"version": 1, "joins": [], "weight": None}
# End of error messages about a field: the user's next step.
_REMEDY = "Correct this line; `meshrec recipe to-yaml RECIPE` writes a file to begin with"
# YAML 1.1 reads 1e-3 as a string, because it requires 1.0e-3. This pattern makes it a float.
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$")


def from_yaml(path: Path) -> Recipe:
    """Read a recipe from a YAML file.

    Raises:
        ValueError: the file does not exist, is not YAML, or has a field or a value that a recipe cannot have.
    """
    yaml = needs("yaml", "cli")

    # Defined here, because yaml is an optional package.
    class Loader(yaml.SafeLoader):  # type: ignore[misc, name-defined]
        """Loader that reads 1e-3 as a float."""

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
    if not path.is_file():
        siblings = [str(sibling) for suffix in YAML_SUFFIXES for sibling in path.parent.glob(f"*{suffix}")]
        raise ValueError(
            f"recipe file {path} does not exist. Name a recipe's file.{did_you_mean(str(path), siblings)}"
        )
    try:
        read = yaml.load(path.read_text(encoding="utf-8"), Loader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{path} is not YAML: {reason}. Correct this line.") from error
    return recipe_of(read, str(path))


def recipe_of(saved: Any, where: str) -> Recipe:
    """Create a recipe from plain values, such as the output of `to_json`.

    Raises:
        ValueError: a field or a value is not allowed in a recipe.
    """
    recipe: Recipe = _build_object(Recipe, saved, where)
    return recipe


def to_yaml(recipe: Recipe) -> str:
    """Return a recipe as YAML, without fields that have their default values.

    Raises:
        ValueError: YAML cannot hold the recipe: it has in-memory tables, or a class outside MeshRec.
    """
    text: str = needs("yaml", "cli").safe_dump(_to_plain(recipe, Recipe), sort_keys=False, allow_unicode=True)
    return text


def _build_object(kind: Any, saved: Any, where: str) -> Any:
    """Create an object of a class, or of the subclass that ``saved["type"]`` names."""
    if not isinstance(saved, Mapping):
        raise ValueError(
            f"{where} is {saved!r:.100}, and it must have the fields of {kind.__name__}. {_REMEDY}."
        )
    classes = {subclass.__name__: subclass for subclass in _concrete_classes(kind)}
    default = kind.__name__ if kind.__name__ in classes else None
    name = saved.get("type", default)
    if name not in classes:
        raise ValueError(
            f"{where}: its type is {name!r}; take one of {', '.join(sorted(classes))}."
            f"{did_you_mean(str(name), classes)}"
        )
    selected = classes[name]
    hints = typing.get_type_hints(selected)
    fields = {field.name: field for field in dataclasses.fields(selected)}
    values = {}
    for field_name, value in saved.items():
        if field_name == "type":
            continue
        if field_name not in fields:
            raise ValueError(
                f"{where}: {name} has no field {field_name!r}; it has "
                f"{', '.join(fields)}.{did_you_mean(str(field_name), fields)}"
            )
        values[field_name] = _build_field(hints[field_name], value, f"{where}: {field_name}", name=field_name)
    missing = [
        field.name
        for field in fields.values()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in values
    ]
    if missing:
        raise ValueError(f"{where}: {name} needs {' and '.join(missing)}. Add {missing[0]}.")
    return selected(**values)


def _build_field(hint: Any, value: Any, where: str, *, name: str) -> Any:
    """Convert a plain value from YAML to the value of a recipe field."""
    if name == "features" and isinstance(value, Mapping):
        from meshrec.data.features import Features

        try:
            return Features.from_json(_FEATURES | dict(value))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: {error}. {_REMEDY}.") from error
    # If the field is optional (X | None), the dataclass X is among the type's arguments.
    kind = next((argument for argument in typing.get_args(hint) if dataclasses.is_dataclass(argument)), hint)
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return _build_object(kind, value, where)
    return value_of(hint, value, where, remedy=_REMEDY)


def value_of(hint: Any, saved: Any, where: str, *, remedy: str) -> Any:
    """Convert a plain value, from `to_json` or YAML, to the type of a field.

    Args:
        hint: the field's type annotation.
        saved: the plain value.
        where: name of the field in errors.
        remedy: advice to append to errors.

    Raises:
        ValueError: the value does not fit the type.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        # Take the first type in the union that fits.
        for option in arguments:
            try:
                return value_of(option, saved, where, remedy=remedy)
            except ValueError:
                continue
    elif hint in (None, type(None)):
        if saved is None:
            return None
    elif origin is Literal:
        if saved in arguments:
            return saved
    elif origin in (tuple, list, Sequence) or hint in (tuple, list):
        if isinstance(saved, list):
            inner = arguments[0] if arguments else Any
            # tuple[int, int] has a type per item, and tuple[int, ...] one type for all items.
            kinds = arguments if arguments and arguments[-1] is not ... else [inner] * len(saved)
            items = [
                value_of(kind, item, where, remedy=remedy) for kind, item in zip(kinds, saved, strict=False)
            ]
            return items if origin is list else tuple(items)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        return hint(saved)
    elif hint is Path:
        if isinstance(saved, str):
            return Path(saved)
    elif hint is float:
        # A float may be written without a fraction.
        if isinstance(saved, int | float) and not isinstance(saved, bool):
            return float(saved)
    # The exact type, because a bool is an int in Python.
    elif hint is Any or (hint in (bool, int, str) and type(saved) is hint):
        return saved
    raise ValueError(f"{where} is {saved!r:.100}, which does not fit {hint}. {remedy}.")


def _concrete_classes(kind: Any) -> list[Any]:
    """Return a class and all subclasses in MeshRec, without abstract classes."""
    classes = [] if getattr(kind, "__abstractmethods__", None) else [kind]
    # Classes outside MeshRec could execute any code when created, so YAML cannot name them.
    below = [subclass for child in kind.__subclasses__() for subclass in _concrete_classes(child)]
    return [*classes, *(subclass for subclass in below if subclass.__module__.startswith("meshrec."))]


def _to_plain(value: Any, declared: Any) -> Any:
    """Convert a recipe, or an object in it, to plain values, without fields that have defaults."""
    kind = type(value)
    if hasattr(value, "from_json"):
        return {name: item for name, item in value.to_json().items() if _FEATURES.get(name) != item}
    if not kind.__module__.startswith("meshrec."):
        raise ValueError(
            f"{kind.__name__} is a class of your own, which YAML cannot name. Keep the recipe in Python."
        )
    hints = typing.get_type_hints(kind)
    plain: dict[str, Any] = {} if declared is kind else {"type": kind.__name__}
    for field in dataclasses.fields(value):
        inner = getattr(value, field.name)
        default = (
            field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
        )
        if inner is default or (type(inner) is type(default) and to_json(inner) == to_json(default)):
            continue
        if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
            plain[field.name] = _to_plain(inner, hints[field.name])
        elif not _is_plain(inner):
            raise ValueError(
                f"{kind.__name__}.{field.name} is a {type(inner).__name__}, which YAML cannot hold. Keep the "
                "recipe in Python; write tables that are in memory to files, and read these (Parquet, Csv)."
            )
        else:
            plain[field.name] = to_json(inner)
    return plain


def _is_plain(value: Any) -> bool:
    """Return whether YAML can represent a value."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float | Path | Enum)
