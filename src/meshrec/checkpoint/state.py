"""The conversion of a training state to named tensors and plain values, and back.

Names and shapes are those of the unsharded model: ``<entry>.<parameter>`` for a module,
``<entry>.state.<parameter>.<slot>`` for an optimizer. So nothing in a checkpoint depends on a plan. If a
table is split by columns, its one value per row is stored once: every rank with columns of the row has the
same value, because row-wise optimizers sum their statistics over all columns.
"""

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.checkpoint.agreement import REMEDY, DamagedCheckpointError
from meshrec.checkpoint.hashed import HashedPlace, check_fits, hashed_places, load_hashed
from meshrec.checkpoint.hashed_to_fixed import (
    FixedPlace,
    WholeRows,
    check_fits_fixed,
    fixed_places,
    load_fixed,
)
from meshrec.checkpoint.manifest import KINDS, RANDOM, Manifest
from meshrec.checkpoint.random_state import random_state, set_random_state
from meshrec.checkpoint.residuals import (
    residuals_of,
    saved_residuals,
    set_residuals,
    tell_that_feedback_begins_anew,
)
from meshrec.checkpoint.safetensors import METADATA
from meshrec.checkpoint.values import decode, encode
from meshrec.distributed.table_shards import TableShards
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper
from meshrec.tables.at_rest import IDS

_log = logging.getLogger(__name__)

_MODULE, _OPTIMIZER, _STATEFUL, _PLAIN = KINDS


@dataclass(kw_only=True)
class Collected:
    """The tensors of a state by name, the entry of each tensor, and the kind and plain values of each
    entry.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    entries: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    parts: set[str] = field(default_factory=set)
    """The entries of which this rank holds some names, and other ranks the others."""
    plans: dict[str, str] = field(default_factory=dict)

    def add(self, entry: str, kind: str, content: Any) -> None:
        """Add the contents of one entry."""
        found: dict[str, Tensor] = {}
        self.values[entry] = {"kind": kind, "content": encode(content, entry, found)}
        for name, tensor in found.items():
            self.add_tensor(entry, name, tensor)

    def add_tensor(self, entry: str, name: str, tensor: Tensor) -> None:
        """Add one tensor."""
        if name == METADATA:
            raise ValueError(
                f"a tensor of the state is called {name!r}, which the safetensors format keeps for itself. "
                "Rename the entry."
            )
        if name in self.tensors:
            raise ValueError(
                f"two tensors of the state are called {name!r}, in {self.entries[name]!r} and {entry!r}. "
                "Rename one entry of the state."
            )
        self.tensors[name], self.entries[name] = tensor.detach(), entry


def collect(state: Mapping[str, Any], rank: int) -> Collected:
    """Collect everything to save. Tensors are not copied.

    Raises:
        ValueError: a checkpoint cannot hold something.
    """
    collected = Collected()
    for entry, item in state.items():
        if not entry or entry == RANDOM or not isinstance(entry, str):
            raise ValueError(f"a state has entries with names of text other than {RANDOM!r}, got {entry!r}.")
        kind = _kind(item)
        collected.add(entry, kind, _content(item, kind, state))
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
    """The tensors to fill in place, and the functions to call afterwards."""

    tensors: dict[str, Tensor]
    fill: Callable[[Path], None]
    """Reads what DCP cannot: tables whose rows come and go. It takes the checkpoint's folder."""
    settle: Callable[[], None]
    """Tells the ranks how many rows there are now. Collective."""
    finish: Callable[[], None]


def prepare(
    state: Mapping[str, Any], folder: Path, manifest: Manifest, rank: int, *, partial: bool = False
) -> Loading:
    """Compare a state with a checkpoint, and return the memory that DCP is to fill.

    With ``partial``, modules take the tensors that the checkpoint has, and keep the others.

    Raises:
        ValueError: they differ; the error names the entry and the difference.
    """
    tensors: dict[str, Tensor] = {}
    jobs: list[Callable[[], None]] = []
    saved = _saved_names(manifest)
    hashed = _hashed(state, folder, manifest, saved, partial=partial)
    for entry, item in state.items():
        kind = _kind(item)
        content = _saved_content(entry, kind, manifest)
        if kind in (_MODULE, _OPTIMIZER):
            is_part = _is_part(kind, item, state)
            apart = hashed.names(entry)
            content = _own_part(content, item, state) if is_part and kind == _OPTIMIZER else content
            own, job, held = _in_place(entry, item, kind, content, state, in_place=is_part or bool(apart))
            own = {name: tensor for name, tensor in own.items() if name not in apart}
            names = saved.get(entry, set()) - apart
            if partial and kind == _MODULE:
                own, job = _common(entry, item, own, names, rank, is_alone=not apart)
            _compare(entry, own, manifest, set(own) if partial else names & set(own) if is_part else names)
            if not (partial or is_part or apart) and _references(content) != _references(held):
                raise DamagedCheckpointError(
                    f"the entry {entry!r} of the checkpoint puts its tensors in other places than this "
                    f"{kind} has them. {REMEDY}"
                )
        else:
            own = {name: _empty(manifest, name) for name in saved.get(entry, ())}
            job = _replaced(state, entry, item, kind, content=content, own=own)
        tensors.update(own)
        jobs.append(job)
        if isinstance(item, DistributedModelParallel):
            residuals = _residuals(entry, item, manifest, rank)
            tensors.update(residuals)
            jobs.append(functools.partial(set_residuals, entry, item, rank, residuals))
    prefix = f"{RANDOM}.{rank}."
    generators = {name: _empty(manifest, name) for name in saved.get(RANDOM, ()) if name.startswith(prefix)}
    if generators:
        tensors.update(generators)
        jobs.append(
            lambda: set_random_state({name.removeprefix(prefix): t for name, t in generators.items()})
        )

    def finish() -> None:
        for job in jobs:
            job()

    return Loading(tensors, lambda folder: hashed.fill(folder, manifest), hashed.settle, finish)


def _residuals(
    entry: str, model: DistributedModelParallel, manifest: Manifest, rank: int
) -> dict[str, Tensor]:
    """Return memory for the residuals of this rank; none if they were saved under another plan."""
    names = _saved_names(manifest).get(RANDOM, set())
    if manifest.plans.get(entry) == model.plan.to_json() and manifest.world_size == model.env.world.size:
        return {name: _empty(manifest, name) for name in saved_residuals(entry, rank, names)}
    if rank == 0 and any(saved_residuals(entry, each, names) for each in range(manifest.world_size)):
        tell_that_feedback_begins_anew(entry)
    return {}


class _Hashed(NamedTuple):
    """The tables with hashed keys of a state."""

    places: dict[str, HashedPlace]
    """The tables, by the prefix of their names."""
    fixed: dict[str, FixedPlace]
    """The fixed tables that are hashed tables in the checkpoint."""
    slots: dict[str, dict[str, str]]
    """The names of the tables' optimizer state by slot, by that prefix."""
    apart: dict[str, set[str]]
    """The names of all tensors of these tables, by entry."""

    def names(self, entry: str) -> set[str]:
        """Return the names of an entry's tensors that DCP does not load."""
        return self.apart.get(entry, set())

    def fill(self, folder: Path, manifest: Manifest) -> None:
        """Read the rows from the checkpoint."""
        for prefix, place in self.places.items():
            load_hashed(place, folder, manifest, prefix, self.slots.get(prefix, {}))
        for prefix, fixed in self.fixed.items():
            load_fixed(fixed, folder, manifest, prefix, self.slots.get(prefix, {}))

    def settle(self) -> None:
        """Count the rows. Collective."""
        for changed in [place.changed for place in self.places.values()] + [
            place.changed for place in self.fixed.values()
        ]:
            changed()


def _hashed(
    state: Mapping[str, Any],
    folder: Path,
    manifest: Manifest,
    saved: Mapping[str, set[str]],
    *,
    partial: bool,
) -> _Hashed:
    """Find the tables with hashed keys, here or in the checkpoint, and check that its rows fit them."""
    found = _Hashed({}, {}, {}, {})
    for entry, item in state.items():
        if not isinstance(item, nn.Module):
            continue
        for path, place in hashed_places(item).items():
            prefix = f"{entry}.{path}." if path else f"{entry}."
            if partial and f"{prefix}weight" not in manifest.tensors:
                continue
            check_fits(place, manifest, prefix)
            found.places[prefix] = place
            found.apart.setdefault(entry, set()).update(f"{prefix}{name}" for name in place.names())
            _add_slots(found, state, path, prefix)
        for path, fixed in fixed_places(item).items():
            prefix = f"{entry}.{path}."
            if f"{prefix}{IDS}" in manifest.tensors:
                check_fits_fixed(fixed, folder, manifest, prefix)
                found.fixed[prefix] = fixed
                own = {name for name in saved.get(entry, ()) if name.startswith(prefix)}
                found.apart.setdefault(entry, set()).update(own)
                slots = _add_slots(found, state, path, prefix)
                for table in fixed.tables:
                    if isinstance(table, WholeRows):
                        table.tensors.update(slots)
    return found


def _add_slots(found: _Hashed, state: Mapping[str, Any], path: str, prefix: str) -> dict[str, Tensor]:
    """Note the names of a table's optimizer state, and return it."""
    tensors: dict[str, Tensor] = {}
    for other, optimizer in state.items():
        if _kind(optimizer) == _OPTIMIZER:
            present = _keyed(optimizer, state).state_dict()["state"].get(f"{path}.weight", {})
            own = {slot: v for slot, v in present.items() if isinstance(v, Tensor)}
            slots = {slot: f"{other}.state.{path}.weight.{slot}" for slot in own}
            found.slots.setdefault(prefix, {}).update(slots)
            found.apart.setdefault(other, set()).update(slots.values())
            tensors |= own
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
    return _keyed(item, state).state_dict() if kind == _OPTIMIZER else dict(item.state_dict())


def _is_part(kind: str, item: Any, state: Mapping[str, Any]) -> bool:
    """Return whether this rank holds only some names of an item.

    This is so for a stage, whose module has ``holds_part``, and for the optimizers beside it.
    """
    if kind == _OPTIMIZER:
        return any(getattr(each, "holds_part", False) for each in state.values())
    return bool(getattr(item, "holds_part", False))


def merged(one: Any, other: Any, where: str) -> Any:
    """Merge what two ranks hold of one entry, as JSON.

    Raises:
        ValueError: both hold the same name with different values.
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
    raise ValueError(f"{where} is {one!r} on one rank and {other!r} on another; it must be the same.")


def _own_part(content: Any, item: Any, state: Mapping[str, Any]) -> Any:
    """Return the part of an optimizer's saved content that belongs to the parameters of this rank."""
    target = _keyed(item, state)
    groups = content.get("param_groups", [])[: len(target.param_groups)]
    return {
        **content,
        "state": {name: slots for name, slots in content["state"].items() if name in target.params},
        "param_groups": [
            {**group, "params": [name for name in group["params"] if name in target.params]}
            for group in groups
        ],
    }


def _in_place(
    entry: str, item: Any, kind: str, content: Any, state: Mapping[str, Any], *, in_place: bool
) -> tuple[dict[str, Tensor], Callable[[], None], Any]:
    """Return the tensors of a module or optimizer, a function that makes it accept them once filled, and its
    present content.

    With ``in_place`` a module goes on with its own names, which are filled in place.
    """
    target = _keyed(item, state) if kind == _OPTIMIZER else item
    if kind == _OPTIMIZER:
        present = target.state_dict()["state"]
        target.create_state([n for n in content["state"] if n in target.params and n not in present])
    own: dict[str, Tensor] = {}
    held = encode(dict(target.state_dict()), entry, own)
    places = hashed_places(target) if isinstance(target, nn.Module) else {}

    def finish() -> None:
        if kind == _MODULE and (places or in_place):  # filled in place; for what else the module does
            apart = {f"{path}.{name}" for path, place in places.items() for name in place.names()}
            values = target.state_dict().items()
            filled = own if places else {}
            target.load_state_dict({n: v if n in apart else filled.get(f"{entry}.{n}", v) for n, v in values})
            return
        now = dict(own)
        if kind == _OPTIMIZER:
            encode(dict(target.state_dict()), entry, now)  # that of tables whose rows come and go is new
        target.load_state_dict(decode(content, now.__getitem__))

    return own, finish, held


def _references(value: Any, where: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], str]:
    """Return the name of every tensor in an encoded value by its place."""
    if isinstance(value, dict) and list(value) == ["__tensor__"]:
        return {where: value["__tensor__"]}
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found: dict[tuple[Any, ...], str] = {}
    for key, item in pairs:
        found.update(_references(item, (*where, key)))
    return found


def _common(
    entry: str, module: nn.Module, own: dict[str, Tensor], saved: set[str], rank: int, *, is_alone: bool
) -> tuple[dict[str, Tensor], Callable[[], None]]:
    """Return the tensors that module and checkpoint have in common. The log names the others.

    ``is_alone``: whether no others are loaded in another way.
    """
    common = {name: tensor for name, tensor in own.items() if name in saved}
    if not common and is_alone:
        raise ValueError(
            f"{entry!r} and the checkpoint have no name in common: here {_few(sorted(own))}; there "
            f"{_few(sorted(saved))}. Rename when importing."
        )
    if rank == 0 and (own.keys() - saved or saved - own.keys()):
        _log.info(
            "%r: %d tensors are loaded; not in the checkpoint: %s; not in the model: %s",
            entry,
            len(common),
            _few(sorted(own.keys() - saved)) or "none",
            _few(sorted(saved - own.keys())) or "none",
        )

    def finish() -> None:
        # Filled in place already; this is for what the module may do beside.
        module.load_state_dict(module.state_dict())

    return common, finish


def _replaced(
    state: Mapping[str, Any], entry: str, item: Any, kind: str, *, content: Any, own: dict[str, Tensor]
) -> Callable[[], None]:
    def finish() -> None:
        value = decode(content, own.__getitem__)
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
            "the state, or call it as it was saved."
        )
    saved = manifest.values[entry]
    if saved["kind"] != kind:
        raise ValueError(
            f"the entry {entry!r} was saved as a {saved['kind']}, and is a {kind} here. Pass what was saved."
        )
    return saved["content"]


def _saved_names(manifest: Manifest) -> dict[str, set[str]]:
    names: dict[str, set[str]] = {}
    for name, record in manifest.tensors.items():
        names.setdefault(record.entry, set()).add(name)
    return names


def _compare(entry: str, own: Mapping[str, Tensor], manifest: Manifest, saved: set[str]) -> None:
    missing, unexpected = sorted(set(own) - saved), sorted(saved - set(own))
    if missing or unexpected:
        parts = [
            f"the checkpoint lacks {_few(missing)}" if missing else "",
            f"it has {_few(unexpected)}, which is not here" if unexpected else "",
        ]
        raise ValueError(
            f"{entry!r} does not fit the checkpoint: {'; '.join(part for part in parts if part)}. Load it "
            "into the same model with the same optimizer."
        )
    for name, tensor in own.items():
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


def _keyed(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> KeyedOptimizer:
    """Return the optimizer itself, or a view of it with names of parameters."""
    if isinstance(optimizer, KeyedOptimizer):
        return optimizer
    names = {parameter: name for name, parameter in _parameters(state)}
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            named[names.get(parameter, f"parameter_{len(named)}")] = parameter
    split = [name for name in named if name in _split_tables(state)]
    if split:
        raise ValueError(
            f"the table {split[0]!r} is split over ranks and trained by {type(optimizer).__name__}, whose "
            "state has the shape of this rank's part. Give the table an optimizer that is fused into "
            "backward (the sharder's fused_params, or apply_optimizer_in_backward): its state can be saved."
        )
    return KeyedOptimizerWrapper(named, lambda _: optimizer)


def _parameters(state: Mapping[str, Any]) -> Iterator[tuple[str, nn.Parameter]]:
    for item in state.values():
        if isinstance(item, nn.Module):
            yield from item.named_parameters()


def _split_tables(state: Mapping[str, Any]) -> set[str]:
    return {
        f"{path}.{name}"
        for item in state.values()
        if isinstance(item, nn.Module)
        for path, module in (
            item.module if isinstance(item, DistributedModelParallel) else item
        ).named_modules()
        if isinstance(module, TableShards) and module.is_split
        for name, _ in module.named_parameters()
    }
