"""Convert a training state to named tensors and plain values, and back.

Names and shapes are the unsharded model's: ``<entry>.<parameter>`` for a module, and
``<entry>.state.<parameter>.<slot>`` for an optimizer. So a checkpoint does not depend on the plan. If a table
is split by columns, per-row values are stored once: row-wise optimizers sum their statistics over all
columns, so ranks with columns of the same row have equal values.
"""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, MutableMapping
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
from meshrec.checkpoint.named_optimizers import create_state, keyed, local_part
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
from meshrec.tables.hashed.table import IDS

_log = logging.getLogger(__name__)

_MODULE, _OPTIMIZER, _STATEFUL, _PLAIN = KINDS


@dataclass(kw_only=True)
class Collected:
    """Everything to save.

    Attributes:
        tensors: tensors by name.
        entries: state entry by tensor name.
        values: kind and plain values by entry.
        parts: entries which this rank holds only in part.
        plans: sharding plan (JSON) by entry.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    plans: dict[str, str] = field(default_factory=dict)

    def add(self, entry: str, kind: str, content: Any) -> None:
        """Add an entry's content.

        Args:
            entry: state entry.
            kind: one of `KINDS`.
            content: plain values and tensors.
        """
        tensors: dict[str, Tensor] = {}
        self.values[entry] = {"kind": kind, "content": encode(content, entry, tensors)}
        for name, tensor in tensors.items():
            self.add_tensor(entry, name, tensor)

    def add_tensor(self, entry: str, name: str, tensor: Tensor) -> None:
        """Add a tensor.

        Args:
            entry: state entry which owns the tensor.
            name: tensor name in the checkpoint.
            tensor: values.

        Raises:
            ValueError: reserved or repeated name.
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
    """Collect everything to save, without copying tensors.

    Raises:
        ValueError: checkpoints do not support a value.
        CheckpointError: a module is partly loaded.
    """
    collected = Collected()
    for entry, item in state.items():
        if not entry or entry == RANDOM or not isinstance(entry, str):
            raise ValueError(
                f"names of state entries must be nonempty strings other than {RANDOM!r}, got {entry!r}."
            )
        kind = _kind(item)
        if isinstance(item, nn.Module):
            check_finished(item)
        collected.add(entry, kind, _content(item, kind, state))
        # Other ranks' names are merged in `_Save`.
        if _is_part(kind, item, state):
            collected.parts.add(entry)
        if isinstance(item, DistributedModelParallel):
            collected.plans[entry] = item.plan.to_json()
            for name, tensor in residuals_of(entry, item, rank).items():
                collected.add_tensor(RANDOM, name, tensor)
    for name, tensor in random_state().items():
        collected.add_tensor(RANDOM, f"{RANDOM}.{rank}.{name}", tensor)
    return collected


class Loading(NamedTuple):
    """Load steps, in field order.

    All checks run before ``tensors`` is filled and can be undone until then; see ``checkpoint.load``.

    Attributes:
        names: checkpoint tensors to read.
        fresh: new memory for plain values, stateful objects and random numbers.
        accept: passes saved values to stateful objects, which may refuse them.
        tensors: module and optimizer memory, filled in place.
        fill: reads hashed tables, which DCP cannot, from the checkpoint folder.
        settle: exchanges row counts between ranks. Collective.
        finish: passes filled state to modules and optimizers, and replaces plain values.
    """

    names: set[str]
    fresh: dict[str, Tensor]
    accept: Callable[[], None]
    tensors: dict[str, Tensor]
    fill: Callable[[Path], None]
    settle: Callable[[], None]
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
    """Compare a state with a checkpoint, and return the load's steps.

    Args:
        state: state to load into.
        folder: checkpoint folder.
        manifest: checkpoint manifest.
        rank: this rank.
        partial: modules load the tensors present in the checkpoint and keep all others.
        undo: receives functions which revert changes by this function and ``Loading.accept``.

    Raises:
        ValueError: state and checkpoint differ; the error names entry and difference.
    """
    tensors: dict[str, Tensor] = {}
    fresh: dict[str, Tensor] = {}
    jobs: list[Callable[[], None]] = []
    objects: list[tuple[Any, Callable[[], None]]] = []
    saved = _saved_names(manifest)
    hashed = _hashed(state, folder, manifest, saved, partial=partial)
    for entry, item in state.items():
        kind = _kind(item)
        content = _saved_content(entry, kind, manifest)
        if kind in (_MODULE, _OPTIMIZER):
            is_part = _is_part(kind, item, state)
            apart = hashed.names(entry)
            content = local_part(content, item, state) if is_part and kind == _OPTIMIZER else content
            if kind == _OPTIMIZER:
                # Lazily created optimizer state must exist before it can be filled in place.
                undo.append(create_state(keyed(item, state), content))
            targets, job, held = _targets(
                entry, item, kind, content, state, keeps_names=is_part or bool(apart)
            )
            whole, targets = targets, {name: tensor for name, tensor in targets.items() if name not in apart}
            names = saved.get(entry, set()) - apart
            if partial and kind == _MODULE:
                targets, job = _common(entry, item, targets, names, rank, is_only_source=not apart)
            _compare(
                entry,
                targets,
                manifest,
                set(targets) if partial else names & set(targets) if is_part else names,
            )
            if not (partial or is_part or apart):
                _check_references(entry, kind, content, held)
            if kind == _OPTIMIZER:
                keyed(item, state).check_state_dict(decode(content, whole.__getitem__))
            tensors.update(targets)
            jobs.append(job)
        else:
            targets = {name: _empty(manifest, name) for name in saved.get(entry, ())}
            job = _restorer(state, entry, item, kind, content=content, buffers=targets)
            fresh.update(targets)
            objects.append((item, job)) if kind == _STATEFUL else jobs.append(job)
        if isinstance(item, DistributedModelParallel):
            residuals = _residuals(entry, item, manifest, rank)
            fresh.update(residuals)
            jobs.append(functools.partial(set_residuals, entry, item, rank, residuals))
    generators = _generators(manifest, saved, rank)
    if generators:
        fresh.update({f"{RANDOM}.{rank}.{name}": value for name, value in generators.items()})
        jobs.append(functools.partial(set_random_state, generators))

    def finish() -> None:
        for job in jobs:
            job()

    accept = functools.partial(_accept, objects, undo)
    names = {*tensors, *fresh, *hashed.read(manifest)}
    fill = functools.partial(hashed.fill, manifest=manifest)
    return Loading(names, fresh, accept, tensors, fill, hashed.settle, finish)


def _accept(objects: list[tuple[Any, Callable[[], None]]], undo: list[Callable[[], object]]) -> None:
    """Pass saved values to stateful objects."""
    for item, job in objects:
        undo.append(functools.partial(item.load_state_dict, copy.deepcopy(item.state_dict())))
        job()


def _check_references(entry: str, kind: str, content: Any, held: Any) -> None:
    if _references(content) != _references(held):
        raise DamagedCheckpointError(
            f"the entry {entry!r} of the checkpoint has tensors at other positions than this {kind}. {REMEDY}"
        )


def _generators(manifest: Manifest, saved: Mapping[str, set[str]], rank: int) -> dict[str, Tensor]:
    """Return memory for this rank's random number state; empty if the rank did not exist at the save."""
    prefix = f"{RANDOM}.{rank}."
    names = [name for name in saved.get(RANDOM, ()) if name.startswith(prefix)]
    return {name.removeprefix(prefix): _empty(manifest, name) for name in names}


def _residuals(
    entry: str, model: DistributedModelParallel, manifest: Manifest, rank: int
) -> dict[str, Tensor]:
    """Return memory for this rank's residuals; empty if they were saved under another plan."""
    names = _saved_names(manifest).get(RANDOM, set())
    if manifest.plans.get(entry) == model.plan.to_json() and manifest.world_size == model.env.world.size:
        return {name: _empty(manifest, name) for name in saved_residuals(entry, rank, names)}
    if rank == 0 and any(
        saved_residuals(entry, saved_rank, names) for saved_rank in range(manifest.world_size)
    ):
        warn_residuals_dropped(entry)
    return {}


class _Hashed(NamedTuple):
    """Tables which DCP cannot load.

    Attributes:
        hashed: hashed tables by name prefix.
        fixed: fixed tables saved as hashed tables, by name prefix.
        slots: optimizer state checkpoint names by slot, by name prefix.
        names_by_entry: these tables' tensor names, by entry.
    """

    hashed: dict[str, HashedTarget]
    fixed: dict[str, FixedTarget]
    slots: dict[str, dict[str, str]]
    names_by_entry: dict[str, set[str]]

    def names(self, entry: str) -> set[str]:
        """Return an entry's tensor names which DCP must skip."""
        return self.names_by_entry.get(entry, set())

    def read(self, manifest: Manifest) -> set[str]:
        """Return the names of these tables' tensors in the checkpoint."""
        return {name for names in self.names_by_entry.values() for name in names if name in manifest.tensors}

    def fill(self, folder: Path, manifest: Manifest) -> None:
        """Read the rows from the checkpoint."""
        for prefix, target in self.hashed.items():
            load_hashed(target, folder, manifest, prefix, self.slots.get(prefix, {}))
        for prefix, fixed in self.fixed.items():
            load_fixed(fixed, folder, manifest, prefix, self.slots.get(prefix, {}))

    def settle(self) -> None:
        """Exchange row counts. Collective."""
        for hashed in self.hashed.values():
            hashed.changed()
        for fixed in self.fixed.values():
            fixed.changed()


def _hashed(
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    saved: Mapping[str, set[str]],
    *,
    partial: bool,
) -> _Hashed:
    """Collect tables which are hashed here or in the checkpoint, after checking that the saved rows fit."""
    tables = _Hashed({}, {}, {}, {})
    for entry, item in state.items():
        if not isinstance(item, nn.Module):
            continue
        for path, target in hashed_targets(item).items():
            prefix = f"{entry}.{path}." if path else f"{entry}."
            if partial and f"{prefix}weight" not in manifest.tensors:
                continue
            check_fits(target, manifest, prefix)
            tables.hashed[prefix] = target
            tables.names_by_entry.setdefault(entry, set()).update(
                f"{prefix}{name}" for name in target.names()
            )
            _add_slots(tables, state, path, prefix)
        for path, fixed in fixed_targets(item).items():
            prefix = f"{entry}.{path}."
            if f"{prefix}{IDS}" in manifest.tensors:
                check_fits_fixed(fixed, folder, manifest, prefix)
                tables.fixed[prefix] = fixed
                names = {name for name in saved.get(entry, ()) if name.startswith(prefix)}
                tables.names_by_entry.setdefault(entry, set()).update(names)
                slots = _add_slots(tables, state, path, prefix)
                for table in fixed.tables:
                    if isinstance(table, WholeRows):
                        table.tensors.update(slots)
    return tables


def _add_slots(tables: _Hashed, state: Mapping[str, Any], path: str, prefix: str) -> dict[str, Tensor]:
    """Add the checkpoint names of a table's optimizer state to ``tables``.

    Args:
        tables: tables which DCP cannot load.
        state: state to load into; any optimizer in it may hold state of the table.
        path: table path in the module.
        prefix: name prefix of the table in the checkpoint.

    Returns:
        Current optimizer state tensors by slot.
    """
    tensors: dict[str, Tensor] = {}
    for other, optimizer in state.items():
        if _kind(optimizer) == _OPTIMIZER:
            present = keyed(optimizer, state).state_dict()["state"].get(f"{path}.weight", {})
            slot_tensors = {slot: v for slot, v in present.items() if isinstance(v, Tensor)}
            slots = {slot: f"{other}.state.{path}.weight.{slot}" for slot in slot_tensors}
            tables.slots.setdefault(prefix, {}).update(slots)
            tables.names_by_entry.setdefault(other, set()).update(slots.values())
            tensors |= slot_tensors
    return tensors


def _kind(item: Any) -> str:
    if isinstance(item, nn.Module):
        return _MODULE
    if isinstance(item, torch.optim.Optimizer):
        return _OPTIMIZER
    return _STATEFUL if hasattr(item, "state_dict") and hasattr(item, "load_state_dict") else _PLAIN


def _content(item: Any, kind: str, state: Mapping[str, Any]) -> Any:
    if kind == _PLAIN:
        return item
    return keyed(item, state).state_dict() if kind == _OPTIMIZER else dict(item.state_dict())


def _is_part(kind: str, item: Any, state: Mapping[str, Any]) -> bool:
    """Return whether this rank holds an item only in part.

    True for a pipeline stage (a module with ``holds_part``), and for optimizers in the same state.
    """
    if kind == _OPTIMIZER:
        return any(getattr(member, "holds_part", False) for member in state.values())
    return bool(getattr(item, "holds_part", False))


def merged(one: Any, other: Any, where: str) -> Any:
    """Merge an entry's encoded values (JSON) from two ranks.

    Args:
        one: values on a rank.
        other: values on another rank.
        where: position in the state, for errors.

    Raises:
        ValueError: both ranks hold the same name with different values.
    """
    if one == other:
        return one
    if isinstance(one, dict) and isinstance(other, dict):
        both = {key: merged(one[key], other[key], f"{where}.{key}") for key in one.keys() & other.keys()}
        return {**one, **other, **both}
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(item, dict) for item in (*one, *other)):
            shared = [merged(a, b, where) for a, b in zip(one, other, strict=False)]
            return shared + max(one, other, key=len)[len(shared) :]
        return [*one, *(item for item in other if item not in one)]
    raise ValueError(f"{where} is {one!r} on one rank and {other!r} on another; ranks must agree.")


def _targets(
    entry: str, item: Any, kind: str, content: Any, state: Mapping[str, Any], *, keeps_names: bool
) -> tuple[dict[str, Tensor], Callable[[], None], Any]:
    """Return an item's tensors, a function which passes them to the item once filled, and the item's encoded
    content.

    With ``keeps_names``, a module keeps the current names instead of the saved names.
    """
    target = keyed(item, state) if kind == _OPTIMIZER else item
    tensors: dict[str, Tensor] = {}
    held = encode(dict(target.state_dict()), entry, tensors)
    hashed = hashed_targets(target) if isinstance(target, nn.Module) else {}

    def finish() -> None:
        if kind == _MODULE and (hashed or keeps_names):  # already filled in place; lets the module react
            apart = {
                f"{path}.{name}" for path, hashed_target in hashed.items() for name in hashed_target.names()
            }
            values = target.state_dict().items()
            filled = tensors if hashed else {}
            target.load_state_dict({n: v if n in apart else filled.get(f"{entry}.{n}", v) for n, v in values})
            return
        now = dict(tensors)
        if kind == _OPTIMIZER:
            encode(dict(target.state_dict()), entry, now)  # hashed tables have new state after the load
        target.load_state_dict(decode(content, now.__getitem__))

    return tensors, finish, held


def _references(value: Any, where: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], str]:
    """Return tensor names in an encoded value by position."""
    if isinstance(value, dict) and list(value) == ["__tensor__"]:
        return {where: value["__tensor__"]}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    references: dict[tuple[Any, ...], str] = {}
    for key, item in pairs:
        references.update(_references(item, (*where, key)))
    return references


def _common(
    entry: str,
    module: nn.Module,
    targets: dict[str, Tensor],
    saved: set[str],
    rank: int,
    *,
    is_only_source: bool,
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return the tensors in both module and checkpoint; log the others.

    ``is_only_source``: whether the module has no tensors loaded by other means.
    """
    common = {name: tensor for name, tensor in targets.items() if name in saved}
    if not common and is_only_source:
        raise ValueError(
            f"{entry!r} and the checkpoint have no name in common: here {_few(sorted(targets))}; there "
            f"{_few(sorted(saved))}. Rename when importing."
        )
    if rank == 0 and (targets.keys() - saved or saved - targets.keys()):
        _log.info(
            "%r: %d tensors are loaded; not in the checkpoint: %s; not in the model: %s",
            entry,
            len(common),
            _few(sorted(targets.keys() - saved)) or "none",
            _few(sorted(saved - targets.keys())) or "none",
        )

    def finish() -> None:
        # Already filled in place. Lets a custom load_state_dict react.
        module.load_state_dict(module.state_dict())

    return common, finish


def _restorer(
    state: Mapping[str, Any], entry: str, item: Any, kind: str, *, content: Any, buffers: dict[str, Tensor]
) -> Callable[[], None]:
    """Return a function which restores an item from the saved value, because DCP cannot fill it in place.

    The function passes the saved value to a stateful object's ``load_state_dict``, or replaces a plain value
    in ``state``. Call it once ``buffers`` has been filled from the checkpoint.

    Args:
        state: state to load into.
        entry: the item's name in the state.
        item: stateful object or plain value.
        kind: one of `KINDS`.
        content: encoded value from the manifest.
        buffers: memory for the value's tensors, by checkpoint name.

    Raises:
        ValueError: the item is a plain value, and the state is not mutable.
    """

    def finish() -> None:
        value = decode(content, buffers.__getitem__)
        if kind == _STATEFUL:
            item.load_state_dict(value)
            return
        assert isinstance(state, MutableMapping)
        state[entry] = value

    if kind == _PLAIN and not isinstance(state, MutableMapping):
        raise ValueError(
            f"{entry!r} is a plain value, which load replaces: pass the state as a dict, got a "
            f"{type(state).__name__}."
        )
    return finish


def _saved_content(entry: str, kind: str, manifest: Manifest) -> Any:
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


def _saved_names(manifest: Manifest) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        names.setdefault(record.entry, set()).add(name)
    return names


def _compare(entry: str, targets: Mapping[str, Tensor], manifest: Manifest, saved: set[str]) -> None:
    missing, unexpected = sorted(set(targets) - saved), sorted(saved - set(targets))
    if missing or unexpected:
        parts = [
            f"the checkpoint lacks {_few(missing)}" if missing else "",
            f"it has {_few(unexpected)}, unknown here" if unexpected else "",
        ]
        raise ValueError(
            f"{entry!r} does not fit the checkpoint: {'; '.join(part for part in parts if part)}. Load it "
            "into the same model with the same optimizer."
        )
    for name, tensor in targets.items():
        record = manifest.tensors[name]
        if tuple(tensor.shape) != record.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)} here and {list(record.shape)} in the checkpoint. "
                "Load it into a model of the same size."
            )


def _few(names: list[str]) -> str:
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _empty(manifest: Manifest, name: str) -> Tensor:
    record = manifest.tensors[name]
    return torch.empty(record.shape, dtype=record.dtype)
