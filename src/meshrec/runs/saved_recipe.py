"""A run's recipe, restored from its ``config.json``, and the options that a resumed run may change."""

import dataclasses
import typing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from meshrec.runs.source import kept_recipe
from meshrec.train.places import DATA
from meshrec.train.recipe import Recipe
from meshrec.train.recipes import resolve
from meshrec.train.run_folder import CONFIG, RunFolder, flat, to_json
from meshrec.train.values import value_of

if TYPE_CHECKING:
    from meshrec.data import Dataset

T = TypeVar("T")

# Options on which a checkpoint's weights, optimizer state and position in the data depend.
_FIXED = ("name", "model", "data", "tables.type", "dense.kind", "dense.type", "training.seed")


_REMEDY = "Resume with the recipe that the run was trained with"


class Change(NamedTuple):
    """An option whose value a resumed run changes."""

    name: str
    old: Any
    new: Any


def load_recipe(folder: RunFolder, source: str | None = None) -> Recipe:
    """Return the recipe of a run, as it was trained.

    Args:
        folder: the run's folder.
        source: the recipe to take the classes from; if none, the one that the run names. All values come from
            the run. A source that you name is executed; the run's is executed only if you trained the run,
            see [Note: whose code a run executes].

    Raises:
        ValueError: the recipe may not be executed, no longer exists, or has other classes or fields than the
            run's.
    """
    config = folder.read_json(CONFIG)
    if config is None:
        raise ValueError(
            f"{folder.path.resolve()} is not a run: there is no {CONFIG} in it. Name a run's folder."
        )
    if source is None and not isinstance(config.get("source"), str):
        raise ValueError(f"{folder.path} does not record its recipe; name the recipe.")
    template = kept_recipe(folder, config) if source is None else resolve(source)
    where = f"{folder.path / CONFIG}: recipe"
    try:
        return restored(template, config["recipe"], where)
    except (KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise ValueError(
            f"{where} cannot be read back ({type(error).__name__}: {error}). Restore the file, or train anew."
        ) from error


def restored(template: T, saved: Any, where: str) -> T:
    """Return ``template`` with the values of ``saved``, which `to_json` made of an object of the same
    classes.

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
    for each in dataclasses.fields(template):
        name, now = each.name, getattr(template, each.name)
        if name not in saved:
            continue  # newer than the run: its value of today is the default
        if dataclasses.is_dataclass(now) and hasattr(now, "from_json"):
            values[name] = now.from_json(saved[name])
        elif dataclasses.is_dataclass(now) and isinstance(saved[name], dict):
            values[name] = restored(now, saved[name], f"{where}.{name}")
        elif to_json(now) != saved[name]:
            values[name] = value_of(hints[name], saved[name], f"{where}.{name}", remedy=_REMEDY)
    return dataclasses.replace(template, **values)  # type: ignore[type-var]


def changes(before: Recipe, after: Recipe) -> list[Change]:
    """Return the options in which ``after`` differs from ``before``, the recipe that the run was trained
    with.

    Raises:
        ValueError: an option cannot change during a run, because its checkpoints would no longer fit.
    """
    old, new = (dict(flat(to_json(each))) for each in (before, after))
    found = [
        Change(name, old.get(name), new.get(name))
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    for name, was, is_now in found:
        is_fixed = any(name == fixed or name.startswith(f"{fixed}.") for fixed in _FIXED)
        if is_fixed and not _is_place(after, name):
            raise ValueError(
                f"{name} was {was} in this run and cannot become {is_now}: its checkpoints would not fit. "
                "Leave the option out to resume, or start a new run with another --name."
            )
    return found


def _is_place(recipe: Recipe, name: str) -> bool:
    """Return whether an option is a path to the data: the same data may be elsewhere now."""
    if name in [f"data.{each}" for each in DATA]:
        return True
    value: Any = recipe
    for part in name.split("."):
        value = getattr(value, part, None)
    return isinstance(value, Path)


def describe_data(dataset: "Dataset") -> dict[str, Any]:
    """Return, as plain values, the properties of the data that a position in it depends on."""
    sizes = {
        name: None if reader is None else reader.num_samples
        for name, reader in (
            ("train", dataset.train),
            ("validation", dataset.validation),
            ("test", dataset.test),
        )
    }
    features = {each.name: each.num_embeddings for each in dataset.features}
    return {"name": dataset.name, "samples": sizes, "features": features, "num_dense": dataset.num_dense}


def check_data(config: dict[str, Any], dataset: "Dataset", where: Path) -> None:
    """Check that the data is that of the run's ``config.json``.

    Raises:
        ValueError: they differ; the error says in what.
    """
    before, today = (dict(flat(each)) for each in (config.get("data", {}), describe_data(dataset)))
    for name, value in before.items():
        if today.get(name) != value:
            raise ValueError(
                f"{where} was trained on other data: {name.replace('.', ' ')} was {value} and is "
                f"{today.get(name)} now. Resume with the earlier data, or start a new run with another "
                "--name."
            )
