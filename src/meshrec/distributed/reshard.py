"""Moving tables and their optimizer state from one plan to another, from rank to rank, without the disk.

Every rank makes the same list of transfers from the two plans. A transfer is a rectangle that an old owner
has and a new one needs. Transfers travel in rounds of bounded size, with one all-to-all each. The old tables
do not change, so they are still there if anything fails.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import Splits, all_to_all, gather_objects
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.build import Blueprint, Contents, ModuleParts, assemble, check_cuts, compiled
from meshrec.distributed.routing import Routing
from meshrec.distributed.table_shards import TableShards
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan
from meshrec.tables.holdings import Holdings, allocate
from meshrec.tables.packing import Rectangle
from meshrec.tables.storage import RowStorage

_TRANSFER_BYTES = 1 << 22
# Bytes that each rank sends in a round, on average.
_ROUND_BYTES = 1 << 26
# Transfers begin at multiples of this, so that their bytes can be viewed as any type.
_ALIGNMENT = 8


class RankRectangle(NamedTuple):
    """A rectangle on a rank. ``number`` is its index among the rectangles of its table there."""

    rank: int
    number: int
    rectangle: Rectangle


class Transfer(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) of a table that go from one rectangle to another."""

    source: RankRectangle
    target: RankRectangle
    r0: int
    r1: int
    c0: int
    c1: int


class _Plane(NamedTuple):
    """The weights of a table, or one slot of its state, with this rank's parts before and after."""

    old: Sequence[Tensor]
    new: Sequence[Tensor]
    per_row: bool
    transfers: list[Transfer]
    item_bytes: int
    device: torch.device
    place: Callable[[int], int] = int
    """Returns the position of a column of the table in a part."""


def moved(built: Mapping[str, ModuleParts], plan: ShardingPlan, env: ShardingEnv) -> dict[str, ModuleParts]:
    """Return the same tables under another (verified) plan. ``built`` does not change. Collective.

    Raises:
        ValueError: tables have ordinary gradients, quantised tables are cut within a byte, or the optimizer
            of a table does not allow the plan. It is raised on every rank.
        RuntimeError: a rank has too little memory; raised on every rank.
    """
    for path, module in built.items():
        names = [table.name for table in module.routing.tables]
        check_cuts(dict(zip(names, module.storages, strict=True)), plan.plan[path])
    trained = _trained(built, env)
    _check_fused(built, trained)
    allocated: dict[str, _New] = {}
    error = None
    try:
        for path, module in built.items():
            allocated[path] = _allocated(path, module, plan.plan[path], trained)
    except RuntimeError as failure:
        error = str(failure)
    reasons = [reason for reason in gather_objects(error, env.world, "allocation") if reason is not None]
    if reasons:
        raise RuntimeError(
            f"there is no memory for the tables under the new plan: {reasons[0]}. The old plan stays."
        )
    # A plan may still be refused here, on all ranks, before anything moves.
    new = {path: allocated[path].assembled(module) for path, module in built.items()}
    planes = [plane for path, module in built.items() for plane in _planes(module, allocated[path])]
    with torch.no_grad():
        _move(planes, env.shard)
    return new


class _New(NamedTuple):
    """The memory for a module's tables under the new plan."""

    plan: EmbeddingModuleShardingPlan
    routing: Routing
    trained: list[bool]
    split: Holdings
    local: Holdings

    def assembled(self, old: ModuleParts) -> ModuleParts:
        """Make the module's parts."""
        blueprint = Blueprint(
            plan=self.plan,
            routing=self.routing,
            rules=old.rules,
            storages=old.storages,
            env=old.env,
            device=old.device,
            options=old.options,
        )
        contents = Contents(split=[self.split], local=self.local, steps=old.steps(), trained=self.trained)
        return assemble(blueprint, contents)


def _trained(built: Mapping[str, ModuleParts], env: ShardingEnv) -> set[tuple[str, str]]:
    """Return the tables (module, name) that are not frozen, from the ranks that hold a part. Collective."""
    own = {
        (path, name)
        for path, module in built.items()
        for name, shards in module.shards.items()
        if isinstance(shards, TableShards) and shards.rectangles and shards.weight.requires_grad
    }
    return set().union(*gather_objects(own, env.world, "trained tables"))


def _check_fused(built: Mapping[str, ModuleParts], trained: set[tuple[str, str]]) -> None:
    for path, module in built.items():
        for table, rule in zip(module.routing.tables, module.rules, strict=True):
            if rule is None and (path, table.name) in trained:
                raise ValueError(
                    f"table {table.name!r} of module {path!r} has ordinary gradients: the optimizer that "
                    "holds its parameters would go on with the old ones. Give it an optimizer that is fused "
                    "into backward, or save a checkpoint and load it under the new plan."
                )


def _allocated(
    path: str, built: ModuleParts, plan: EmbeddingModuleShardingPlan, trained: set[tuple[str, str]]
) -> _New:
    routing = compiled(built.routing.tables, plan, built.rules, built.env)
    own = routing.work[built.env.shard.rank].rectangles
    flags = [(path, table.name) in trained for table in routing.tables]
    local = routing.local.rectangles
    return _New(plan, routing, flags, _empty(own, built, flags), _empty(local, built, flags))


def _empty(rectangles: Sequence[Rectangle], built: ModuleParts, trained: Sequence[bool]) -> Holdings:
    specs = [None if rule is None else rule.spec for rule in built.rules]
    return allocate(rectangles, built.storages, specs, trained, built.device)


def _planes(built: ModuleParts, new: _New) -> Iterator[_Plane]:
    for t, table in enumerate(built.routing.tables):
        transfers = list(transfers_of(_holders(built.routing, t), _holders(new.routing, t), built.env.shard))
        held = new.local if new.routing.replicated[t] else new.split
        storage, shards, here = built.storages[t], built.shards[table.name], held.of_table(t)
        assert isinstance(shards, TableShards)
        old = _parts(storage, shards.rectangles, [shard.detach() for shard in shards.shards()])
        rectangles = [] if here is None else here.packing.rectangles
        new_parts = _parts(
            storage, rectangles, [] if here is None else here.packing.views(here.parameter.detach())
        )
        for number, part in enumerate(storage.row_parts):
            yield _Plane(
                [parts[number] for parts in old],
                [parts[number] for parts in new_parts],
                part.per_row,
                list(_per_row(transfers)) if part.per_row else transfers,
                part.dtype.itemsize,
                built.device,
                storage.part_column,
            )
        if (rule := built.rules[t]) is None:
            continue
        before = built.tables.local if built.routing.replicated[t] else built.tables.split
        for number, slot in enumerate(rule.spec.state_slots()):
            old_parts = [own[number] for own in before.held.state_of_table(t)]
            parts = [own[number] for own in held.state_of_table(t)]
            wanted = list(_per_row(transfers)) if slot.per_row else transfers
            yield _Plane(old_parts, parts, slot.per_row, wanted, 4, built.device)


def _parts(
    storage: RowStorage, rectangles: Sequence[Rectangle], weights: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return the parts of the rows of each rectangle."""
    return [storage.parts(w, r.c1 - r.c0) for w, r in zip(weights, rectangles, strict=True)]


def _holders(routing: Routing, table: int) -> list[RankRectangle] | None:
    """Return the rectangles of a table and their ranks; None if every rank holds the whole table."""
    if routing.replicated[table]:
        return None
    found = []
    for rank, work in enumerate(routing.work):
        own = [rectangle for rectangle in work.rectangles if rectangle.table == table]
        found += [RankRectangle(rank, number, rectangle) for number, rectangle in enumerate(own)]
    return found


def transfers_of(
    old: list[RankRectangle] | None, new: list[RankRectangle] | None, axis: Axis
) -> Iterator[Transfer]:
    """Yield the transfers, in the same order on all ranks. None stands for a table that every rank holds
    whole.
    """
    if old is None and new is None:
        return
    everyone = range(axis.size)
    if new is None:
        assert old is not None
        whole = _hull(old)
        new = [RankRectangle(rank, 0, whole) for rank in everyone]
    for target in new:
        sources = old if old is not None else [RankRectangle(target.rank, 0, _hull(new))]
        for source in sources:
            a, b = source.rectangle, target.rectangle
            r0, r1 = max(a.r0, b.r0), min(a.r1, b.r1)
            c0, c1 = max(a.c0, b.c0), min(a.c1, b.c1)
            if r0 < r1 and c0 < c1:
                yield Transfer(source, target, r0, r1, c0, c1)


def _hull(held: Sequence[RankRectangle]) -> Rectangle:
    """Return the rectangle of the whole table, which the rectangles cover."""
    return Rectangle(
        held[0].rectangle.table,
        0,
        max(each.rectangle.r1 for each in held),
        0,
        max(each.rectangle.c1 for each in held),
    )


def _per_row(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Yield one transfer per target and rows, from the target's own rank if possible.

    State per row has the same value for all columns of a row. A row-wise optimizer's table is cut at the same
    rows in all columns, so it is enough to compare rows.
    """
    chosen: dict[tuple[RankRectangle, int, int], Transfer] = {}
    for each in transfers:
        key = (each.target, each.r0, each.r1)
        if key not in chosen or each.source.rank == each.target.rank:
            chosen[key] = each
    yield from chosen.values()


class _CutTransfer(NamedTuple):
    """A transfer, or some rows of it, in one plane."""

    plane: _Plane
    transfer: Transfer
    num_bytes: int

    def source(self) -> Tensor:
        """Return the memory to send, on the sending rank."""
        return _region(self.plane, self.plane.old, self.transfer.source, self.transfer)

    def target(self) -> Tensor:
        """Return the memory to fill, on the receiving rank."""
        return _region(self.plane, self.plane.new, self.transfer.target, self.transfer)


def _region(plane: _Plane, parts: Sequence[Tensor], held: RankRectangle, transfer: Transfer) -> Tensor:
    rows = parts[held.number][transfer.r0 - held.rectangle.r0 : transfer.r1 - held.rectangle.r0]
    c0, first, last = map(plane.place, (held.rectangle.c0, transfer.c0, transfer.c1))
    return rows if plane.per_row else rows[:, first - c0 : last - c0]


def _move(planes: Sequence[_Plane], axis: Axis) -> None:
    rounds: list[_CutTransfer] = []
    size = 0
    for plane in planes:
        if not plane.transfers:
            for old, new in zip(plane.old, plane.new, strict=True):
                new.copy_(old)  # every rank holds the whole table before and after
        for cut in _cuts(plane, axis):
            rounds.append(cut)
            size += cut.num_bytes
            if size >= _ROUND_BYTES * axis.size:
                _send_round(rounds, axis)
                rounds, size = [], 0
    _send_round(rounds, axis)


def _cuts(plane: _Plane, axis: Axis) -> Iterator[_CutTransfer]:
    """Yield the transfers of a plane in pieces of bounded size. Transfers within a rank are done at once."""
    for transfer in plane.transfers:
        if transfer.source.rank == transfer.target.rank:
            if transfer.source.rank == axis.rank:
                cut = _CutTransfer(plane, transfer, 0)
                cut.target().copy_(cut.source())
            continue
        width = 1 if plane.per_row else plane.place(transfer.c1) - plane.place(transfer.c0)
        row_bytes = width * plane.item_bytes
        step = max(1, _TRANSFER_BYTES // row_bytes)
        for r0 in range(transfer.r0, transfer.r1, step):
            r1 = min(r0 + step, transfer.r1)
            num_bytes = -(-(r1 - r0) * row_bytes // _ALIGNMENT) * _ALIGNMENT
            yield _CutTransfer(plane, transfer._replace(r0=r0, r1=r1), num_bytes)


def _send_round(cuts: Sequence[_CutTransfer], axis: Axis) -> None:
    """Run one all-to-all. Pieces are ordered by the other rank, then as in the list."""
    if not cuts:
        return
    sent: list[list[_CutTransfer]] = [[] for _ in range(axis.size)]
    received: list[list[_CutTransfer]] = [[] for _ in range(axis.size)]
    for cut in cuts:
        source_rank, target_rank = cut.transfer.source.rank, cut.transfer.target.rank
        if source_rank == axis.rank:
            sent[target_rank].append(cut)
        if target_rank == axis.rank:
            received[source_rank].append(cut)
    splits = Splits([_bytes(each) for each in sent], [_bytes(each) for each in received])
    device = cuts[0].plane.device
    buffer = torch.empty(sum(splits.sent), dtype=torch.uint8, device=device)
    for cut, room in _rooms(sent, buffer):
        source = cut.source()
        room[: source.nbytes].view(source.dtype).view(source.shape).copy_(source)
    arrived = all_to_all(buffer, splits, axis, "resharding").wait()
    for cut, room in _rooms(received, arrived):
        target = cut.target()
        target.copy_(room[: target.nbytes].view(target.dtype).view(target.shape))


def _bytes(cuts: Sequence[_CutTransfer]) -> int:
    return sum(cut.num_bytes for cut in cuts)


def _rooms(
    by_rank: Sequence[Sequence[_CutTransfer]], buffer: Tensor
) -> Iterator[tuple[_CutTransfer, Tensor]]:
    """Yield each piece with its part of the buffer."""
    begin = 0
    for cuts in by_rank:
        for cut in cuts:
            yield cut, buffer[begin : begin + cut.num_bytes]
            begin += cut.num_bytes
