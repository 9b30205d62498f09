"""Restore a run's recipe from ``config.json``, and check which options a resumed run changes."""

import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from meshrec.runs.source import recorded_recipe
from meshrec.train.recipe import Recipe
from meshrec.train.recipe_files import PATH_FIELDS, resolve
from meshrec.train.run_folder import CONFIG, RunFolder, flatten, to_json

if TYPE_CHECKING:
    from meshrec.data import Dataset

T = TypeVar("T")

# A resumed run must not change these: checkpoints have weights, optimizer state and a data position for them.
_FIXED_OPTIONS = ("name", "model", "data", "tables.type", "dense.kind", "dense.type", "training.seed")


# End of error messages about options that must not change.
_REMEDY = "Resume with the recipe that the run was trained with"


class Change(NamedTuple):
    """Recipe option in which a resumed run differs from the original run.

    Attributes:
        name: option name, such as "training.batch_size".
        old: value in the original run.
        new: value in the resumed run.
    """

    name: str
    old: Any
    new: Any


def load_recipe(folder: RunFolder, source: str | None = None) -> Recipe:
    """Return the recipe with which a run was trained.

    Args:
        folder: run folder.
        source: recipe name or file, whose classes are used; None: the run's recorded source. All option
            values come from the run. A source given here is executed. The recorded source is executed only if
            this user trained the run; see [Note: whose code a run executes] in ``source.py``.

    Raises:
        ValueError: the recipe may not be executed, no longer exists, or has other classes or fields than the
            run.
    """
    config = folder.read_json(CONFIG)
    if config is None:
        raise ValueError(
            f"{folder.path.resolve()} is not a run: there is no {CONFIG} in it. Name a run's folder."
        )
    # A recipe created in Python, and not by name, cannot be found again.
    if source is None and not isinstance(config.get("source"), str):
        raise ValueError(f"{folder.path} does not record its recipe; name the recipe.")
    # The template provides the classes and defaults, and the configuration provides all recorded values.
    template = recorded_recipe(folder, config) if source is None else resolve(source)
    if config.get("all_rows"):  # the configuration has no in-memory tables
        template = dataclasses.replace(template, data=template.data.all_rows())
    where = f"{folder.path / CONFIG}: recipe"
    try:
        return restore_options(template, config["recipe"], where)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be read back ({type(error).__name__}: {error}). Restore the file, or train anew."
        ) from error


def restore_options(template: T, saved: Any, where: str) -> T:
    """Return a copy of ``template`` with the recorded option values.

    Args:
        template: recipe, or a part of it such as the model config; a dataclass.
        saved: output of `to_json` for an object with the same classes.
        where: name of the object in errors.

    Raises:
        ValueError: a field cannot be read back; the error names it.
    """
    assert dataclasses.is_dataclass(template)
    kind = type(template)
    if saved.get("type") != kind.__name__:
        raise ValueError(
            f"{where} is a {saved.get('type')!s:.100}, where the recipe now has a {kind.__name__}. Resume "
            "with the recipe that the run was trained with."
        )
    hints = typing.get_type_hints(kind)
    values = {}
    for field in dataclasses.fields(template):
        name, now = field.name, getattr(template, field.name)
        if name not in saved:
            continue  # newer than the run: its value of today is the default
        # Classes with their own JSON format, such as `Features`.
        if dataclasses.is_dataclass(now) and hasattr(now, "from_json"):
            values[name] = now.from_json(saved[name])
        elif dataclasses.is_dataclass(now) and isinstance(saved[name], dict):
            values[name] = restore_options(now, saved[name], f"{where}.{name}")
        # Unchanged values keep the template's object, which may have no JSON form, such as an in-memory
        # table.
        elif to_json(now) != saved[name]:
            from meshrec.train.yaml_recipes import value_of

            values[name] = value_of(hints[name], saved[name], f"{where}.{name}", remedy=_REMEDY)
    return dataclasses.replace(template, **values)  # type: ignore[type-var]


def changed_options(before: Recipe, after: Recipe) -> list[Change]:
    """Return the options in which two recipes differ, after checking that a resumed run may change them.

    Args:
        before: recipe with which the run was trained.
        after: recipe with which it is resumed.

    Raises:
        ValueError: an option cannot change during a run, because old checkpoints would no longer fit.
    """
    old, new = (dict(flatten(to_json(recipe))) for recipe in (before, after))
    changed = [
        Change(name, old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    for name, was, is_now in changed:
        # The data may have moved since, so its paths may change. `check_data` compares what it contains.
        is_fixed = any(name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED_OPTIONS)
        if is_fixed and not _is_data_path(after, name):
            raise ValueError(
                f"{name} was {was} in this run and cannot become {is_now}: its checkpoints would not fit. "
                "Leave the option out to resume, or start a new run with another --name."
            )
    return changed


def _is_data_path(recipe: Recipe, name: str) -> bool:
    """Return whether an option is a path to the data. It may change, because data may have been moved."""
    if name in [f"data.{field}" for field in PATH_FIELDS]:
        return True
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, Path)


def describe_data(dataset: "Dataset") -> dict[str, Any]:
    """Return properties of the data that must not change in a resumed run: name, sizes and features.

    A checkpoint's position in the data, and table sizes, depend on them.
    """
    sizes = {
        name: None if reader is None else reader.num_samples
        for name, reader in (
            ("train", dataset.train),
            ("validation", dataset.validation),
            ("test", dataset.test),
        )
    }
    features = {feature.name: feature.num_embeddings for feature in dataset.features}
    return {"name": dataset.name, "samples": sizes, "features": features, "num_dense": dataset.num_dense}


def check_data(config: dict[str, Any], dataset: "Dataset", where: Path) -> None:
    """Check that the loaded data has the properties recorded in the run's ``config.json``.

    Args:
        config: ``config.json`` content.
        dataset: the loaded data.
        where: run folder, for errors.

    Raises:
        ValueError: a property differs; the error names it.
    """
    before, today = (dict(flatten(data)) for data in (config.get("data", {}), describe_data(dataset)))
    for name, value in before.items():
        if today.get(name) != value:
            raise ValueError(
                f"{where} was trained on other data: {name.replace('.', ' ')} was {value} and is "
                f"{today.get(name)} now. Resume with the earlier data, or start a new run with another "
                "--name."
            )
