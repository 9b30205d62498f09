"""Load a checkpoint into a model that may have changed since: more rows, other features, other layers.

A module that computes persistent buffers from the training data, such as item popularity, names them in
``from_data``. They keep the values of the new data.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from meshrec.checkpoint.hashed import fixed_targets, hashed_targets
from meshrec.checkpoint.manifest import KINDS, Manifest
from meshrec.checkpoint.named_optimizers import as_keyed_optimizer
from meshrec.checkpoint.state import (
    Loading,
    fill_targets,
    find_tables_by_id,
    kind_of,
    saved_names,
    table_name,
    tensor_references,
)
from meshrec.checkpoint.values import decode, encode
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import KeyedOptimizer

_MODULE, _OPTIMIZER, *_ = KINDS


@dataclass(kw_only=True)
class Differences:
    """Differences between a model and a checkpoint from which the common values were loaded.

    Attributes:
        grown: number of rows in the checkpoint and in the model, by table.
        fresh: tensors with initial values, by name: the shape in the checkpoint (None: it lacks the tensor),
            and the shape in the model.
        dropped: names of tensors that only the checkpoint has.
        fresh_state: names of loaded parameters whose optimizer state is fresh, because the checkpoint has
            none, or that of another kind of optimizer.
    """

    grown: dict[str, tuple[int, int]] = field(default_factory=dict)
    fresh: dict[str, tuple[tuple[int, ...] | None, tuple[int, ...]]] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)
    fresh_state: list[str] = field(default_factory=list)


class Matching(NamedTuple):
    """The values that `prepare_matching` loads, and its report.

    Attributes:
        fresh_tables: names of tables that keep their initial values.
        tables_only: whether all tensors other than tables keep their initial values.
        differences: receives the differences.
    """

    fresh_tables: Collection[str]
    tables_only: bool
    differences: Differences


def prepare_matching(
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    matching: Matching,
    undo: list[Callable[[], object]],
) -> Loading:
    """Find the values in a checkpoint that fit a training state, without changing values yet.

    Args:
        state: modules and optimizers to load.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        matching: what to load.
        undo: receives functions that undo the changes made here.

    Raises:
        ValueError: a table has another width than in the checkpoint.
    """
    saved = saved_names(manifest)
    by_id = find_tables_by_id(
        state, folder, manifest, saved, partial=True, fresh_tables=matching.fresh_tables
    )
    tensors: dict[str, Tensor] = {}
    finishers: list[Callable[[], object]] = []
    # Names of the parameters that are loaded.
    loaded = {prefix.partition(".")[2] + "weight" for prefix in (*by_id.hashed, *by_id.fixed)}
    for entry, item in state.items():
        if kind_of(item) == _MODULE:
            targets, finisher, _ = fill_targets(entry, item, _MODULE, None, state, keeps_names=True)
            finishers.append(finisher)
            by_number = {name: targets[name] for name in targets.keys() - by_id.names(entry)}
            fitting = _fitting_tensors(entry, item, by_number, manifest, matching)
            tensors |= fitting
            loaded |= {name.removeprefix(f"{entry}.") for name in fitting}
            unknown = saved.get(entry, set()) - targets.keys() - by_id.names(entry)
            matching.differences.dropped += sorted(unknown)
    for entry, item in state.items():
        if kind_of(item) == _OPTIMIZER:
            optimizer = as_keyed_optimizer(item, state)
            saved_state = manifest.values[entry]["content"]["state"] if entry in manifest.values else {}
            names = _fitting_state(optimizer, saved_state, loaded, matching.differences, undo)
            slots: dict[str, Tensor] = {}
            present = optimizer.state_dict()["state"]
            encode({name: dict(present[name]) for name in names}, f"{entry}.state", slots)
            tensors |= {name: slots[name] for name in slots.keys() - by_id.names(entry)}
            finishers.append(functools.partial(_finish_state, optimizer, saved_state, names))

    def finish() -> None:
        """Pass the filled values to modules and optimizers."""
        for finisher in finishers:
            finisher()

    fill = functools.partial(by_id.fill, manifest=manifest)
    names_to_read = {*tensors, *by_id.read(manifest)}
    return Loading(names_to_read, {}, lambda: None, tensors, fill, by_id.exchange_row_counts, finish)


def _fitting_tensors(
    entry: str, module: nn.Module, targets: Mapping[str, Tensor], manifest: Manifest, matching: Matching
) -> dict[str, Tensor]:
    """Return a module's tensors that are loaded from the checkpoint, and record the differences.

    Args:
        targets: tensors of the module by name in the checkpoint, without tables that are found by ID.
    """
    tables = {f"{entry}.{path}.weight": table_name(path) for path in fixed_targets(module)}
    hashed = tuple(f"{entry}.{path}." for path in hashed_targets(module))
    from_data = {f"{entry}.{name}" for name in _from_data(module)}
    fitting = {}
    for name, tensor in sorted(targets.items()):
        record = manifest.tensors.get(name)
        shape, old = tuple(tensor.shape), None if record is None else record.shape
        starts_again = tables[name] in matching.fresh_tables if name in tables else matching.tables_only
        # Hashed tables that are not found by ID are new. They have further tensors, such as IDs.
        is_hashed = name.startswith(hashed)
        if name in from_data or (is_hashed and not name.endswith(".weight")):
            continue
        if old is None or starts_again or is_hashed:
            matching.differences.fresh[name.removeprefix(f"{entry}.")] = (old, shape)
        elif name in tables and old[1:] != shape[1:]:
            raise ValueError(
                f"table {tables[name]!r} has {shape[1]} columns, and the checkpoint {old[1]}. Take the same "
                "embedding dimension, or start without a checkpoint."
            )
        elif old == shape or (name in tables and old[0] < shape[0]):
            fitting[name] = tensor
            if old != shape:
                matching.differences.grown[tables[name]] = (old[0], shape[0])
        else:
            matching.differences.fresh[name.removeprefix(f"{entry}.")] = (old, shape)
    return fitting


def _fitting_state(
    optimizer: KeyedOptimizer,
    saved: Mapping[str, Mapping[str, Any]],
    loaded: Collection[str],
    differences: Differences,
    undo: list[Callable[[], object]],
) -> list[str]:
    """Return the names of the loaded parameters whose optimizer state is loaded, too, and create the state.

    Args:
        undo: receives a function that removes the created state.
    """
    names = sorted(name for name in optimizer.params if name in loaded)
    before = optimizer.state_dict()["state"]
    # Torch optimizers create state only in their first step.
    created = [name for name in names if name in saved and name not in before]
    optimizer.create_state(created)
    undo.append(lambda: optimizer.drop_state(created))
    present = optimizer.state_dict()["state"]
    # Another kind of optimizer has other slots.
    fresh = [name for name in names if saved.get(name, {}).keys() != present.get(name, {}).keys()]
    optimizer.drop_state([name for name in fresh if name in created])
    differences.fresh_state += fresh
    # SGD, for example, has no state.
    return [name for name in names if name in present and name not in fresh]


def _finish_state(
    optimizer: KeyedOptimizer, saved: Mapping[str, Mapping[str, Any]], names: Collection[str]
) -> None:
    """Load the non-tensor values of optimizer state, and call the optimizer's ``load_state_dict``."""
    state = optimizer.state_dict()["state"]
    for name in names:
        for slot, value in saved[name].items():
            if not tensor_references(value):
                state[name][slot] = decode(value, _no_tensor)
    optimizer.load_state_dict({"state": state})


def _no_tensor(name: str) -> NoReturn:
    raise AssertionError(name)


def _from_data(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's buffers that are computed from the training data."""
    root = module.module if isinstance(module, DistributedModelParallel) else module
    for path, child in root.named_modules():
        for name in getattr(child, "from_data", ()):
            yield f"{path}.{name}" if path else name
