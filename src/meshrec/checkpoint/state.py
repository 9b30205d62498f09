"""Convert a training state to named tensors and plain values, and back.

A training state maps entry names, such as "model", to modules, optimizers and other objects. Tensor names
and shapes in a checkpoint are the unsharded model's, so a checkpoint does not depend on the plan. Names are
``<entry>.<parameter>`` for modules, and ``<entry>.state.<parameter>.<slot>`` for optimizers, where the slot
is a name such as ``exp_avg``. If a table is split by columns, optimizer state with a single value per row is
stored once: row-wise optimizers sum their statistics over all columns, so all column shards of a row have
equal values.
"""

import copy
import functools
import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.checkpoint.agreement import REMEDY, DamagedCheckpointError
from meshrec.checkpoint.hashed import (
    FixedTarget,
    HashedTarget,
    WholeRows,
    check_fits,
    check_fits_fixed,
    fixed_targets,
    hashed_targets,
    load_fixed,
    load_hashed,
)
from meshrec.checkpoint.manifest import KINDS, RANDOM, Manifest
from meshrec.checkpoint.named_optimizers import as_keyed_optimizer, create_state, select_local_state
from meshrec.checkpoint.random_state import random_state, set_random_state
from meshrec.checkpoint.residuals import (
    residuals_of,
    saved_residuals,
    set_residuals,
    warn_residuals_dropped,
)
from meshrec.checkpoint.safetensors import METADATA
from meshrec.checkpoint.unfinished import check_finished
from meshrec.checkpoint.values import decode, encode
from meshrec.model_parallel import DistributedModelParallel
from meshrec.tables.hashed.key_ordered import IDS

_log = logging.getLogger(__name__)

_MODULE, _OPTIMIZER, _STATEFUL, _PLAIN = KINDS


@dataclass(kw_only=True)
class Collected:
    """Everything saved by a rank.

    Attributes:
        tensors: tensors by name in the checkpoint.
        entries: entry names by tensor name.
        values: kind and encoded plain values, by entry name.
        partial_entries: names of entries of which this rank has only a part, such as a pipeline stage.
        plans: sharding plan (JSON) by entry name.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    partial_entries: set[str] = field(default_factory=set)
    plans: dict[str, str] = field(default_factory=dict)

    def add(self, entry: str, kind: str, content: Any) -> None:
        """Add the content of a state entry: tensors, and encoded plain values.

        Args:
            entry: entry name.
            kind: one of `KINDS`.
            content: plain values and tensors, such as a state dict.
        """
        tensors: dict[str, Tensor] = {}
        self.values[entry] = {"kind": kind, "content": encode(content, entry, tensors)}
        for name, tensor in tensors.items():
            self.add_tensor(entry, name, tensor)

    def add_tensor(self, entry: str, name: str, tensor: Tensor) -> None:
        """Add a tensor.

        Args:
            entry: name of the state entry to which the tensor belongs.
            name: tensor name in the checkpoint.
            tensor: the tensor; it is not copied.

        Raises:
            ValueError: the name is reserved, or another tensor has it.
        """
        if name == METADATA:
            raise ValueError(
                f"a tensor of the state is called {name!r}, a name reserved by the safetensors format. "
                "Rename the entry."
            )
        if name in self.tensors:
            raise ValueError(
                f"two tensors of the state are called {name!r}, in {self.entries[name]!r} and {entry!r}. "
                "Rename one entry of the state."
            )
        self.tensors[name], self.entries[name] = tensor.detach(), entry


def collect(state: Mapping[str, Any], rank: int) -> Collected:
    """Collect everything saved by this rank, without copying tensors.

    Args:
        state: training state to save.
        rank: this rank.

    Raises:
        ValueError: an entry name is invalid, or checkpoints do not support a value.
        CheckpointError: a module is only partly loaded; see ``unfinished.py``.
    """
    collected = Collected()
    for entry, item in state.items():
        if not entry or entry == RANDOM or not isinstance(entry, str):
            raise ValueError(
                f"names of state entries must be nonempty strings other than {RANDOM!r}, got {entry!r}."
            )
        kind = kind_of(item)
        if isinstance(item, nn.Module):
            check_finished(item)
        collected.add(entry, kind, _content(item, kind, state))
        # `_Save` in ``saving.py`` merges these entries with the parts on other ranks.
        if _is_part(kind, item, state):
            collected.partial_entries.add(entry)
        if isinstance(item, DistributedModelParallel):
            collected.plans[entry] = item.plan.to_json()
            for name, tensor in residuals_of(entry, item, rank).items():
                collected.add_tensor(RANDOM, name, tensor)
    for name, tensor in random_state().items():
        collected.add_tensor(RANDOM, f"{RANDOM}.{rank}.{name}", tensor)
    return collected


class Loading(NamedTuple):
    """A prepared load: memory to fill and functions to call. ``checkpoint.load`` uses them in field order.

    Until ``tensors`` are filled, everything can be undone.

    Attributes:
        names: names of all tensors to read from the checkpoint.
        fresh: newly allocated tensors for values not loaded in place: those in plain values,
            stateful objects and random number generators. To be filled from the checkpoint.
        accept: function that passes the filled ``fresh`` to stateful objects, which may raise.
        tensors: tensors of modules and optimizers, to be filled in place.
        fill: function that reads tables which are hashed in the model or in the checkpoint. DCP cannot read
            them, because their rows are found by ID. The argument is the checkpoint folder.
        exchange_row_counts: function that counts the rows of hashed tables over all ranks. Collective.
        finish: function that passes the filled state to modules and optimizers, and replaces plain values.
    """

    names: set[str]
    fresh: dict[str, Tensor]
    accept: Callable[[], None]
    tensors: dict[str, Tensor]
    fill: Callable[[Path], None]
    exchange_row_counts: Callable[[], None]
    finish: Callable[[], None]


def prepare(
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    rank: int,
    *,
    partial: bool = False,
    undo: list[Callable[[], object]],
) -> Loading:
    """Compare a training state with a checkpoint, and prepare to load it, without changing values yet.

    Args:
        state: training state to load.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        rank: this rank.
        partial: whether modules load only the tensors in common with the checkpoint.
        undo: receives functions that undo the changes made here and by ``Loading.accept``.

    Raises:
        ValueError: the state does not fit the checkpoint; the message names entry and difference.
    """
    tensors: dict[str, Tensor] = {}
    fresh: dict[str, Tensor] = {}
    # Run by `Loading.finish`, when all tensors have been filled.
    finishers: list[Callable[[], object]] = []
    # Stateful objects with functions that load them, run by `Loading.accept`. They run early, while a load
    # can be undone, because an object's load_state_dict may raise.
    stateful_loaders: list[tuple[Any, Callable[[], None]]] = []
    saved = saved_names(manifest)
    hashed = find_tables_by_id(state, folder, manifest, saved, partial=partial)
    for entry, item in state.items():
        kind = kind_of(item)
        content = _saved_content(entry, kind, manifest)
        if kind in (_MODULE, _OPTIMIZER):
            is_part = _is_part(kind, item, state)
            added = {} if partial else _added_since(entry, item, saved.get(entry, set()))
            loaded_otherwise = hashed.names(entry) | added.keys()
            content = select_local_state(content, item, state) if is_part and kind == _OPTIMIZER else content
            if kind == _OPTIMIZER:
                # Torch optimizers create state in their first step. It must exist to be filled in place.
                undo.append(create_state(as_keyed_optimizer(item, state), content))
            targets, finisher, current_content = fill_targets(
                entry, item, kind, content, state, keeps_names=is_part or bool(loaded_otherwise)
            )
            # The state dict also refers to tensors that are loaded by ID, so `check_state_dict` below needs
            # all of them.
            whole = targets
            targets = {name: tensor for name, tensor in whole.items() if name not in loaded_otherwise}
            names = saved.get(entry, set()) - loaded_otherwise
            if partial and kind == _MODULE:
                targets, finisher = _select_common(
                    entry, item, targets, names, rank, is_only_source=not loaded_otherwise
                )
            # With `partial`, `targets` has only the common names. The checkpoint of a pipeline stage also has
            # the tensors of other stages, which are ignored.
            _compare(
                entry,
                targets,
                manifest,
                set(targets) if partial else names & set(targets) if is_part else names,
            )
            if not (partial or is_part or loaded_otherwise):
                _check_references(entry, kind, content, current_content)
            if kind == _OPTIMIZER:
                as_keyed_optimizer(item, state).check_state_dict(decode(content, whole.__getitem__))
            tensors.update(targets)
            finishers += [finisher, *added.values()]
        else:
            targets = {name: _empty(manifest, name) for name in saved.get(entry, ())}
            finisher = _restorer(state, entry, item, kind, content=content, buffers=targets)
            fresh.update(targets)
            # Stateful objects are loaded first, while a load can still be undone. Plain values are replaced
            # at the end.
            stateful_loaders.append((item, finisher)) if kind == _STATEFUL else finishers.append(finisher)
        if isinstance(item, DistributedModelParallel):
            # Residuals are loaded by a job at the end, because they belong to the sharded model, not to the
            # state dict.
            residuals = _residuals(entry, item, manifest, rank)
            fresh.update(residuals)
            finishers.append(functools.partial(set_residuals, entry, item, rank, residuals))
    # Empty for ranks that did not exist at the save. They keep their new random numbers.
    generators = _generators(manifest, saved, rank)
    if generators:
        fresh.update({f"{RANDOM}.{rank}.{name}": value for name, value in generators.items()})
        finishers.append(functools.partial(set_random_state, generators))

    def finish() -> None:
        """Finish the load of all entries and random number generators; see `Loading.finish`."""
        for finisher in finishers:
            finisher()

    accept = functools.partial(_accept, stateful_loaders, undo)
    names = {*tensors, *fresh, *hashed.read(manifest)}
    fill = functools.partial(hashed.fill, manifest=manifest)
    return Loading(names, fresh, accept, tensors, fill, hashed.exchange_row_counts, finish)


def _added_since(entry: str, item: Any, saved: set[str]) -> dict[str, Callable[[], object]]:
    """Return the module's buffers that did not exist yet when the checkpoint was written.

    A module that gains a buffer in a new release declares the neutral value, which leaves the results of
    older models unchanged: ``older_checkpoints = {"buffer": value}``.

    Returns:
        Functions that set a buffer to this value, by the buffer's name in the checkpoint.
    """
    module = item.module if isinstance(item, DistributedModelParallel) else item
    added: dict[str, Callable[[], object]] = {}
    for path, child in module.named_modules() if isinstance(module, nn.Module) else ():
        for buffer, value in getattr(child, "older_checkpoints", {}).items():
            name = ".".join(part for part in (entry, path, buffer) if part)
            if name not in saved:
                added[name] = functools.partial(child.get_buffer(buffer).fill_, value)
    return added


def _accept(stateful_loaders: list[tuple[Any, Callable[[], None]]], undo: list[Callable[[], object]]) -> None:
    """Pass loaded values to stateful objects, and append functions to ``undo`` that restore old values."""
    for item, load in stateful_loaders:
        # Append before loading, because a load that fails halfway must be undone as well.
        # A copy, because ``state_dict`` may return the containers that the load changes.
        undo.append(functools.partial(item.load_state_dict, copy.deepcopy(item.state_dict())))
        load()


def _check_references(entry: str, kind: str, content: Any, current_content: Any) -> None:
    """Raise DamagedCheckpointError unless checkpoint and state have the same tensors at the same positions.

    A position is the path of keys and indices to a tensor in the entry's content.
    """
    if tensor_references(content) != tensor_references(current_content):
        raise DamagedCheckpointError(
            f"the entry {entry!r} of the checkpoint has tensors at other positions than this {kind}. {REMEDY}"
        )


def _generators(manifest: Manifest, saved: Mapping[str, set[str]], rank: int) -> dict[str, Tensor]:
    """Allocate tensors, by generator name, for this rank's generator states. Empty if there are none."""
    prefix = f"{RANDOM}.{rank}."
    names = [name for name in saved.get(RANDOM, ()) if name.startswith(prefix)]
    return {name.removeprefix(prefix): _empty(manifest, name) for name in names}


def _residuals(
    entry: str, model: DistributedModelParallel, manifest: Manifest, rank: int
) -> dict[str, Tensor]:
    """Allocate tensors into which this rank's error feedback residuals are loaded.

    Returns:
        Uninitialized tensors by name in the checkpoint. Empty if the plan or the world size differs from the
        save; then rank 0 logs a warning.
    """
    names = saved_names(manifest).get(RANDOM, set())
    if manifest.plans.get(entry) == model.plan.to_json() and manifest.world_size == model.env.world.size:
        return {name: _empty(manifest, name) for name in saved_residuals(entry, rank, names)}
    if rank == 0 and any(
        saved_residuals(entry, saved_rank, names) for saved_rank in range(manifest.world_size)
    ):
        warn_residuals_dropped(entry)
    return {}


class TablesById(NamedTuple):
    """Tables whose rows must be found by ID, because they are hashed in the model or in the checkpoint.

    DCP cannot load such tables, because it only knows row numbers. Tables are identified by the prefix of
    their tensor names in the checkpoint, such as "model.ebc.embedding_bags.items.".

    Attributes:
        hashed: tables that are hashed in the model, by prefix.
        fixed: tables that are hashed in the checkpoint but not in the model, where row i belongs to ID i; by
            prefix.
        slots: by prefix, names of optimizer state tensors in the checkpoint, by slot (such as "exp_avg").
        names_by_entry: names of all tensors of these tables, by entry of the training state.
    """

    hashed: dict[str, HashedTarget]
    fixed: dict[str, FixedTarget]
    slots: dict[str, dict[str, str]]
    names_by_entry: dict[str, set[str]]

    def names(self, entry: str) -> set[str]:
        """Return the names of these tables' tensors in an entry, which DCP must not load."""
        return self.names_by_entry.get(entry, set())

    def read(self, manifest: Manifest) -> set[str]:
        """Return the names of these tables' tensors in a checkpoint, for all entries, which `fill` reads."""
        return {name for names in self.names_by_entry.values() for name in names if name in manifest.tensors}

    def fill(self, folder: Path, manifest: Manifest) -> None:
        """Read the rows of all these tables from the checkpoint in ``folder``."""
        for prefix, target in self.hashed.items():
            load_hashed(target, folder, manifest, prefix, self.slots.get(prefix, {}))
        for prefix, fixed in self.fixed.items():
            load_fixed(fixed, folder, manifest, prefix, self.slots.get(prefix, {}))

    def exchange_row_counts(self) -> None:
        """Count rows over all ranks, and make batches in flight look up their rows again. Collective."""
        for hashed in self.hashed.values():
            hashed.rows_loaded()
        for fixed in self.fixed.values():
            fixed.rows_loaded()


def find_tables_by_id(
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    saved: Mapping[str, set[str]],
    *,
    partial: bool,
    fresh_tables: Collection[str] = (),
) -> TablesById:
    """Find tables hashed in the state or in the checkpoint, and check that they can be loaded.

    Args:
        state: training state to load.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        saved: tensor names in the checkpoint by entry.
        partial: whether to skip tables missing from the checkpoint.
        fresh_tables: names of tables to skip.

    Raises:
        ValueError: a table does not fit the checkpoint.
    """
    tables = TablesById({}, {}, {}, {})
    for entry, item in state.items():
        if not isinstance(item, nn.Module):
            continue
        for path, target in hashed_targets(item).items():
            prefix = f"{entry}.{path}." if path else f"{entry}."
            # A table that the checkpoint lacks keeps its rows.
            if partial and f"{prefix}weight" not in manifest.tensors:
                continue
            if table_name(path) in fresh_tables:
                continue
            check_fits(target, manifest, prefix)
            tables.hashed[prefix] = target
            tables.names_by_entry.setdefault(entry, set()).update(
                f"{prefix}{name}" for name in target.names()
            )
            _add_slots(tables, state, path, prefix)
        for path, fixed in fixed_targets(item).items():
            prefix = f"{entry}.{path}."
            # The table was hashed when it was saved, so its rows are found by ID.
            if f"{prefix}{IDS}" in manifest.tensors and table_name(path) not in fresh_tables:
                check_fits_fixed(fixed, folder, manifest, prefix)
                tables.fixed[prefix] = fixed
                names = {name for name in saved.get(entry, ()) if name.startswith(prefix)}
                tables.names_by_entry.setdefault(entry, set()).update(names)
                slots = _add_slots(tables, state, path, prefix)
                for table in fixed.tables:
                    # The state of an unsharded table is in an optimizer, not in the table.
                    if isinstance(table, WholeRows):
                        table.tensors.update(slots)
    return tables


def table_name(path: str) -> str:
    """Return the name of the table at a module path."""
    return path.rpartition(".")[2]


def _add_slots(tables: TablesById, state: Mapping[str, Any], path: str, prefix: str) -> dict[str, Tensor]:
    """Add the names of a table's optimizer state tensors in the checkpoint to ``tables``.

    Returns:
        Current optimizer state tensors of the table by slot, such as "exp_avg".
    """
    tensors: dict[str, Tensor] = {}
    for other, optimizer in state.items():
        if kind_of(optimizer) == _OPTIMIZER:
            present = as_keyed_optimizer(optimizer, state).state_dict()["state"].get(f"{path}.weight", {})
            slot_tensors = {slot: v for slot, v in present.items() if isinstance(v, Tensor)}
            slots = {slot: f"{other}.state.{path}.weight.{slot}" for slot in slot_tensors}
            tables.slots.setdefault(prefix, {}).update(slots)
            tables.names_by_entry.setdefault(other, set()).update(slots.values())
            tensors |= slot_tensors
    return tensors


def kind_of(item: Any) -> str:
    """Return the kind of a state entry, one of `KINDS`."""
    # Optimizers have ``state_dict`` as well, so test for them before other stateful objects.
    if isinstance(item, nn.Module):
        return _MODULE
    if isinstance(item, torch.optim.Optimizer):
        return _OPTIMIZER
    return _STATEFUL if hasattr(item, "state_dict") and hasattr(item, "load_state_dict") else _PLAIN


def _content(item: Any, kind: str, state: Mapping[str, Any]) -> Any:
    """Return the content to save for a state entry: the state dict, or the plain value itself."""
    if kind == _PLAIN:
        return item
    return as_keyed_optimizer(item, state).state_dict() if kind == _OPTIMIZER else dict(item.state_dict())


def _is_part(kind: str, item: Any, state: Mapping[str, Any]) -> bool:
    """Return whether this rank has only a part of a state entry.

    This is True for a module with attribute ``holds_part`` (a pipeline stage), and for all optimizers in a
    state with such a module.
    """
    if kind == _OPTIMIZER:
        return any(getattr(member, "holds_part", False) for member in state.values())
    return bool(getattr(item, "holds_part", False))


def merge_values(first: Any, second: Any, where: str) -> Any:
    """Merge the encoded values (JSON) of a state entry from two ranks that each have a part of it.

    Dicts are merged by key. Lists of dicts, such as parameter groups, are merged by position. Two other lists
    are merged to the first list, followed by the items that only the second list has.

    Args:
        first: values on a rank.
        second: values on another rank.
        where: position in the state, for errors.

    Raises:
        ValueError: both ranks have the same name with different values.
    """
    # Entries that are equal on both ranks need no merging.
    if first == second:
        return first
    if isinstance(first, dict) and isinstance(second, dict):
        both = {
            key: merge_values(first[key], second[key], f"{where}.{key}")
            for key in first.keys() & second.keys()
        }
        return {**first, **second, **both}
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(item, dict) for item in (*first, *second)):
            # Items at the same position are merged. The longer list may have further items.
            shared = [merge_values(a, b, where) for a, b in zip(first, second, strict=False)]
            return shared + max(first, second, key=len)[len(shared) :]
        # For example the lists of parameter names, of which every stage has its own.
        return [*first, *(item for item in second if item not in first)]
    raise ValueError(f"{where} is {first!r} on one rank and {second!r} on another; ranks must agree.")


def fill_targets(
    entry: str, item: Any, kind: str, content: Any, state: Mapping[str, Any], *, keeps_names: bool
) -> tuple[dict[str, Tensor], Callable[[], None], Any]:
    """Prepare to load a module or optimizer in place.

    Args:
        entry: entry name.
        item: module or optimizer.
        kind: one of `KINDS`.
        content: encoded content in the checkpoint.
        state: training state to load.
        keeps_names: whether ``load_state_dict`` is called with the module's current names instead of the
            saved names. Needed if the module has only some of the saved tensors.

    Returns:
        The item's tensors by name in the checkpoint, a function to call once they have been filled, and the
        item's current content, encoded.
    """
    target = as_keyed_optimizer(item, state) if kind == _OPTIMIZER else item
    tensors: dict[str, Tensor] = {}
    current_content = encode(dict(target.state_dict()), entry, tensors)
    hashed = hashed_targets(target) if isinstance(target, nn.Module) else {}

    # Called once the tensors are filled. load_state_dict runs the hooks and restores non-tensor values.
    def finish() -> None:
        """Call the item's ``load_state_dict`` with the filled tensors."""
        if kind == _MODULE and (hashed or keeps_names):  # filled in place; called for load_state_dict hooks
            names_loaded_by_id = {
                f"{path}.{name}" for path, hashed_target in hashed.items() for name in hashed_target.names()
            }
            values = target.state_dict().items()
            filled = tensors if hashed else {}
            target.load_state_dict(
                {n: v if n in names_loaded_by_id else filled.get(f"{entry}.{n}", v) for n, v in values}
            )
            return
        now: dict[str, Tensor] = {}
        if kind == _OPTIMIZER:
            encode(dict(target.state_dict()), entry, now)  # hashed tables have new state after the load
        target.load_state_dict(decode(content, (tensors | now).__getitem__))

    return tensors, finish, current_content


def tensor_references(value: Any, where: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], str]:
    """Return the names of all tensors in an encoded value, by position (the path of keys and indices)."""
    if isinstance(value, dict) and list(value) == ["__tensor__"]:
        return {where: value["__tensor__"]}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    references: dict[tuple[Any, ...], str] = {}
    for key, item in pairs:
        references.update(tensor_references(item, (*where, key)))
    return references


def _select_common(
    entry: str,
    module: nn.Module,
    targets: dict[str, Tensor],
    saved: set[str],
    rank: int,
    *,
    is_only_source: bool,
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Select the module tensors contained in the checkpoint as well, and log all other tensors.

    Args:
        is_only_source: whether nothing else of the module is loaded. False if it has hashed tables, which
            are loaded separately.

    Returns:
        The common tensors, and a function to call once they have been filled.
    """
    common = {name: tensor for name, tensor in targets.items() if name in saved}
    if not common and is_only_source:
        raise ValueError(
            f"{entry!r} and the checkpoint have no name in common: here "
            f"{_list_names(sorted(targets))}; there {_list_names(sorted(saved))}. Rename when importing."
        )
    if rank == 0 and (targets.keys() - saved or saved - targets.keys()):
        _log.info(
            "%r: %d tensors are loaded; not in the checkpoint: %s; not in the model: %s",
            entry,
            len(common),
            _list_names(sorted(targets.keys() - saved)) or "none",
            _list_names(sorted(saved - targets.keys())) or "none",
        )

    def finish() -> None:
        """Call the module's ``load_state_dict`` with its own state dict."""
        # Tensors have been filled in place. Called for a custom load_state_dict and its hooks.
        module.load_state_dict(module.state_dict())

    return common, finish


def _restorer(
    state: Mapping[str, Any], entry: str, item: Any, kind: str, *, content: Any, buffers: dict[str, Tensor]
) -> Callable[[], None]:
    """Return a function that restores a stateful object or a plain value, which cannot be filled in place.

    The function must be called after ``buffers`` have been filled from the checkpoint. It passes the saved
    value to the object's ``load_state_dict``, or replaces the plain value in ``state``.

    Args:
        buffers: memory for the value's tensors, by checkpoint name.
    """

    def finish() -> None:
        """Pass the saved value to the object, or put it into ``state``; see `_restorer`."""
        value = decode(content, buffers.__getitem__)
        if kind == _STATEFUL:
            item.load_state_dict(value)
            return
        # Checked below, before the function is returned.
        assert isinstance(state, MutableMapping)
        state[entry] = value

    if kind == _PLAIN and not isinstance(state, MutableMapping):
        raise ValueError(
            f"{entry!r} is a plain value, which load replaces: pass the state as a dict, got a "
            f"{type(state).__name__}."
        )
    return finish


def _saved_content(entry: str, kind: str, manifest: Manifest) -> Any:
    """Return the encoded content of a state entry in the checkpoint."""
    if entry not in manifest.values:
        raise ValueError(
            f"the checkpoint has no entry {entry!r}; it has {list(manifest.values)}. Leave the entry out of "
            "the state, or use the saved name."
        )
    saved = manifest.values[entry]
    if saved["kind"] != kind:
        raise ValueError(
            f"the entry {entry!r} was saved as a {saved['kind']}, but is a {kind} here. Pass the saved kind."
        )
    return saved["content"]


def saved_names(manifest: Manifest) -> dict[str, set[str]]:
    """Return the tensor names in a checkpoint by entry."""
    names: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        names.setdefault(record.entry, set()).add(name)
    return names


def _compare(entry: str, targets: Mapping[str, Tensor], manifest: Manifest, saved: set[str]) -> None:
    """Raise ValueError if the names or shapes of an entry's tensors differ from the checkpoint."""
    missing, unexpected = sorted(set(targets) - saved), sorted(saved - set(targets))
    if missing or unexpected:
        parts = [
            f"the checkpoint lacks {_list_names(missing)}" if missing else "",
            f"it has {_list_names(unexpected)}, unknown here" if unexpected else "",
        ]
        raise ValueError(
            f"{entry!r} does not fit the checkpoint: {'; '.join(part for part in parts if part)}. Load it "
            "into the same model with the same optimizer."
        )
    # Dtypes may differ, because reading converts values to the target's dtype.
    for name, tensor in targets.items():
        record = manifest.tensors[name]
        if tuple(tensor.shape) != record.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} here and {list(record.shape)} in the checkpoint. "
                "Load it into a model of the same size."
            )


def _list_names(names: list[str]) -> str:
    """Format up to three names, and the number of further names."""
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _empty(manifest: Manifest, name: str) -> Tensor:
    """Allocate an uninitialized CPU tensor with the shape and dtype of a checkpoint tensor."""
    record = manifest.tensors[name]
    return torch.empty(record.shape, dtype=record.dtype)
