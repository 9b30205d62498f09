"""Move tables and optimizer state from one plan to another, rank to rank, without a disk.

All ranks derive the same transfer list from the two plans. A transfer is a rectangle that an old owner has
and a new owner needs. The old owner streams the rows, and the new owner loads them. Rows travel in rounds
with bounded size, a single all-to-all per round; before a round, the ranks exchange block headers. The old
tables do not change, so they remain valid if anything fails.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.agreement import together
from meshrec.comms.collectives import Splits, all_to_all, gather_objects
from meshrec.comms.failures import announced_on_failure
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.distributed.build import Blueprint, Contents, ModuleParts, assemble, check_cuts, compiled
from meshrec.distributed.routing import Routing
from meshrec.ops.index import unique
from meshrec.ops.operators import OutOfMemoryError
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan
from meshrec.tables.dense.table import parts_of
from meshrec.tables.hashed.table import HashedTable, has_growable_rows
from meshrec.tables.local_shards import LocalShards, allocate
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Table

# Maximum bytes in a block.
_TRANSFER_BYTES = 1 << 22
# Bytes a rank sends in a round, which bounds the buffers.
_ROUND_BYTES = 1 << 26
# Parts start at multiples of this, so their bytes can be viewed as any dtype.
_ALIGNMENT = 8


class RankRectangle(NamedTuple):
    """A rectangle on a rank. ``number`` is the index among that table's rectangles on the rank."""

    rank: int
    number: int
    rectangle: Rectangle


class Transfer(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) that move from one rectangle to another."""

    source: RankRectangle
    target: RankRectangle
    r0: int
    r1: int
    c0: int
    c1: int


class _BlockHeader(NamedTuple):
    """Description that precedes a row block, for the receiving rank."""

    target: int
    """Receiving rank."""
    module: int
    table: int
    number: int
    """Index of the target rectangle among the table's rectangles on that rank."""
    first: int | None
    """First key if keys are consecutive; None if keys travel with the rows."""
    num_rows: int
    columns: tuple[int, int]
    parts: tuple[str, ...]
    """Part names."""


@announced_on_failure
def moved(built: Mapping[str, ModuleParts], plan: ShardingPlan, env: ShardingEnv) -> dict[str, ModuleParts]:
    """Return the same tables under another (verified) plan. ``built`` does not change. Collective.

    Args:
        built: module parts by path.
        plan: the new plan.
        env: the ranks.

    Raises:
        ValueError: tables have ordinary gradients, quantised tables are cut within a byte, or a table's
            optimizer does not allow the plan. Raised on every rank.
        OutOfMemoryError: a rank has too little memory; raised on every rank.
        RuntimeError: a rank cannot write a table's file; raised on every rank.
    """
    for path, module in built.items():
        names = [table.name for table in module.routing.tables]
        check_cuts(dict(zip(names, module.storages, strict=True)), plan.plan[path])
    trained = _trained(built, env)
    _check_fused(built, trained)
    # Both plans' tables exist at the same time from here to the end.
    allocated: dict[str, _New] = {}
    with together(env.world, "allocation"):
        try:
            for path, module in built.items():
                allocated[path] = _allocated(path, module, plan.plan[path], trained)
        except (RuntimeError, MemoryError) as failure:
            raise OutOfMemoryError(
                f"there is no memory for the tables under the new plan: {failure}. The old plan stays."
            ) from failure
    # The plan may still be refused here, on all ranks, before anything moves.
    new = {path: allocated[path].assembled(module) for path, module in built.items()}
    with torch.no_grad():
        _Move(list(built.values()), list(allocated.values()), env.shard).run()
        for module in new.values():
            module.tables.recount()
    return new


class _New(NamedTuple):
    """Memory for a module's tables under the new plan."""

    plan: EmbeddingModuleShardingPlan
    routing: Routing
    trained: list[bool]
    split: LocalShards
    local: LocalShards

    def tables(self, number: int) -> Sequence[Table]:
        """Return a table's rectangles on this rank."""
        held = self.local if self.routing.replicated[number] else self.split
        here = held.of_table(number)
        return [] if here is None else here.tables

    def assembled(self, old: ModuleParts) -> ModuleParts:
        """Create the module's parts."""
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
    """Return the unfrozen tables as (module, name), from the ranks that hold a part. Collective."""
    local = {
        (path, name)
        for path, module in built.items()
        for name, shards in module.shards.items()
        if not shards.over_devices and shards.rectangles and shards.weight.requires_grad
    }
    return set().union(*gather_objects(local, env.world, "trained tables"))


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
    routing = compiled(built.routing.tables, plan, built.rules, built.storages, built.env)
    split = routing.work[built.env.shard.rank].rectangles
    flags = [(path, table.name) in trained for table in routing.tables]
    local = routing.local.rectangles
    return _New(plan, routing, flags, _empty(split, built, flags), _empty(local, built, flags))


def _empty(rectangles: Sequence[Rectangle], built: ModuleParts, trained: Sequence[bool]) -> LocalShards:
    specs = [None if rule is None else rule.spec for rule in built.rules]
    names = [table.name for table in built.routing.tables]
    return allocate(rectangles, names, built.storages, specs, trained, device=built.device)


def _holders(routing: Routing, table: int) -> list[RankRectangle] | None:
    """Return a table's rectangles with their ranks; None if every rank holds the whole table."""
    if routing.replicated[table]:
        return None
    owners = []
    for rank, work in enumerate(routing.work):
        rank_rectangles = [rectangle for rectangle in work.rectangles if rectangle.table == table]
        owners += [RankRectangle(rank, number, rectangle) for number, rectangle in enumerate(rank_rectangles)]
    return owners


def transfers_of(
    old: list[RankRectangle] | None, new: list[RankRectangle] | None, axis: Axis
) -> Iterator[Transfer]:
    """Yield the transfers, in the same order on all ranks.

    Args:
        old: rectangles under the old plan; None: every rank holds the whole table.
        new: rectangles under the new plan; None as for ``old``.
        axis: the ranks.
    """
    if old is None and new is None:
        return
    ranks = range(axis.size)
    if new is None:
        assert old is not None
        whole = _hull(old)
        new = [RankRectangle(rank, 0, whole) for rank in ranks]
    for target in new:
        sources = old if old is not None else [RankRectangle(target.rank, 0, _hull(new))]
        for source in sources:
            a, b = source.rectangle, target.rectangle
            r0, r1 = max(a.r0, b.r0), min(a.r1, b.r1)
            c0, c1 = max(a.c0, b.c0), min(a.c1, b.c1)
            if r0 < r1 and c0 < c1:
                yield Transfer(source, target, r0, r1, c0, c1)


def _hull(held: Sequence[RankRectangle]) -> Rectangle:
    """Return the whole table's rectangle, which the rectangles cover."""
    return Rectangle(
        held[0].rectangle.table,
        min(part.rectangle.r0 for part in held),
        max(part.rectangle.r1 for part in held),
        0,
        max(part.rectangle.c1 for part in held),
    )


def _per_row(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Yield transfers that bring every target row once, from the target's own rank if possible.

    Per-row values are equal in all columns, and waiting-ID counts must not arrive twice. Sources in a single
    column have every row once; the column with the fewest travelling rows is selected.
    """
    for _, group in groupby(transfers, attrgetter("target")):
        of_target = list(group)
        by_column = [[x for x in of_target if x.c0 <= c < x.c1] for c in sorted({x.c0 for x in of_target})]
        yield from min(by_column, key=_num_travelling)


def _num_travelling(transfers: Sequence[Transfer]) -> int:
    return sum(
        transfer.r1 - transfer.r0 for transfer in transfers if transfer.source.rank != transfer.target.rank
    )


class _Move:
    """Transport from the old tables to the new tables."""

    def __init__(self, old: Sequence[ModuleParts], new: Sequence[_New], axis: Axis) -> None:
        self._old, self._new, self._axis = old, new, axis
        self._keys: dict[int, tuple[HashedTable, list[Tensor]]] = {}
        """Keys that every new hashed table will have, by table identity."""

    def run(self) -> None:
        """Move keys, then rows."""
        # Rows arrive in a rank-dependent order, but slots must not depend on it: see ``tables.index.Index``.
        self._move(self._outgoing_keys())
        with together(self._axis, "resharding"):
            for table, keys in self._keys.values():
                table.reserve(unique(torch.cat(keys))[0])  # other columns in a row come from other rectangles
        self._keys.clear()
        self._move(self._outgoing())

    def _move(self, outgoing: Iterator[tuple[_BlockHeader, RowBlock]]) -> None:
        """Send and receive in rounds, until no rank has anything left to send."""
        while True:
            sent: list[tuple[_BlockHeader, RowBlock]] = []
            size = 0
            with together(self._axis, "resharding"):  # rows that stay are loaded here, possibly into files
                while size < _ROUND_BYTES and (pair := next(outgoing, None)) is not None:
                    sent.append(pair)
                    size += self._num_bytes(pair[0])
            headers = gather_objects([header for header, _ in sent], self._axis, "resharding")
            # All ranks see the same headers, so they stop together.
            if not any(headers):
                return
            self._exchange(sent, headers)

    def _outgoing(self) -> Iterator[tuple[_BlockHeader, RowBlock]]:
        """Yield the blocks that other ranks need from this rank. Local blocks are loaded along the way."""
        for m, (old, new) in enumerate(zip(self._old, self._new, strict=True)):
            for t, table in enumerate(old.routing.tables):
                shards, targets = old.shards[table.name], new.tables(t)
                before, after = _holders(old.routing, t), _holders(new.routing, t)
                if before is None and after is None:
                    for source, target in zip(shards.tables, targets, strict=True):
                        target.load(source.stream())  # the table is whole everywhere, before and after
                    continue
                transfers = list(transfers_of(before, after, self._axis))
                with_per_row = set(_per_row(transfers))
                for transfer in transfers:
                    if transfer.source.rank != self._axis.rank:
                        continue
                    blocks = _blocks(
                        shards.tables[transfer.source.number], transfer, transfer in with_per_row
                    )
                    if transfer.target.rank == self._axis.rank:
                        targets[transfer.target.number].load(blocks)
                        continue
                    for block in blocks:
                        yield _header(m, t, transfer.target, block), block

    def _outgoing_keys(self) -> Iterator[tuple[_BlockHeader, RowBlock]]:
        """Yield the future hashed-table keys on other ranks."""
        for m, (old, new) in enumerate(zip(self._old, self._new, strict=True)):
            for t, table in enumerate(old.routing.tables):
                shards, targets = old.shards[table.name], new.tables(t)
                before, after = _holders(old.routing, t), _holders(new.routing, t)
                if not old.storages[t].is_growable or (before is None and after is None):
                    continue
                for transfer in _per_row(list(transfers_of(before, after, self._axis))):
                    if transfer.source.rank != self._axis.rank:
                        continue
                    source = shards.tables[transfer.source.number]
                    assert has_growable_rows(source)
                    keys, columns = source.listed((transfer.r0, transfer.r1))[0], (transfer.c0, transfer.c1)
                    for some in keys.split(_TRANSFER_BYTES // keys.itemsize):
                        block = RowBlock(some, columns, {})
                        if transfer.target.rank == self._axis.rank:
                            self._take(targets[transfer.target.number], block)
                        else:
                            yield _header(m, t, transfer.target, block), block

    def _take(self, table: Table, block: RowBlock) -> None:
        """Load an arriving block. A block without parts announces keys."""
        if block.parts:
            table.load([block])
        else:
            assert has_growable_rows(table)
            assert isinstance(block.keys, Tensor)
            self._keys.setdefault(id(table), (table, []))[1].append(block.keys)

    def _exchange(
        self, sent: Sequence[tuple[_BlockHeader, RowBlock]], headers: Sequence[Sequence[_BlockHeader]]
    ) -> None:
        """Exchange a round's blocks, ordered by target rank, and load the arriving blocks."""
        rank, ranks = self._axis.rank, range(self._axis.size)
        # all_to_all splits the buffer by target rank; the receiver walks headers in the same order.
        by_target = sorted(sent, key=lambda item: item[0].target)
        arriving = [header for rank_headers in headers for header in rank_headers if header.target == rank]
        splits = Splits(
            [sum(self._num_bytes(h) for h in headers[rank] if h.target == other) for other in ranks],
            [sum(self._num_bytes(h) for h in headers[other] if h.target == rank) for other in ranks],
        )
        buffer = torch.empty(sum(splits.sent), dtype=torch.uint8, device=self._old[0].device)
        start = 0
        for header, block in by_target:
            room, start = buffer[start:], start + self._num_bytes(header)
            for name, part in self._laid_out(header, room).items():
                part.copy_(block.keys if name is None else block.parts[name])  # type: ignore[arg-type]
        buffer = all_to_all(buffer, splits, self._axis, "resharding").wait()
        with together(self._axis, "resharding"):
            self._load(arriving, buffer)

    def _load(self, arriving: Sequence[_BlockHeader], buffer: Tensor) -> None:
        """Load a round's blocks, which are consecutive in a buffer."""
        start = 0
        for header in arriving:
            room, start = buffer[start:], start + self._num_bytes(header)
            parts = self._laid_out(header, room)
            keys = (
                parts.pop(None)
                if header.first is None
                else range(header.first, header.first + header.num_rows)
            )
            block = RowBlock(keys, header.columns, {name: part for name, part in parts.items() if name})
            self._take(self._new[header.module].tables(header.table)[header.number], block)

    def _sizes(self, header: _BlockHeader) -> Iterator[tuple[str | None, torch.dtype, tuple[int, ...]]]:
        """Yield name, dtype and shape for every tensor in a block.

        Non-consecutive keys come first, without a name.
        """
        module, n = self._old[header.module], header.num_rows
        storage, rule = module.storages[header.table], module.rules[header.table]
        if header.first is None:
            yield None, torch.int64, (n,)
        c0, c1 = map(storage.part_column, header.columns)
        waiting = RowPart("waiting", torch.int64, True)
        for part in [*parts_of(storage, None if rule is None else rule.spec), waiting]:
            if part.name in header.parts:
                yield part.name, part.dtype, (n,) if part.per_row else (n, c1 - c0)

    def _num_bytes(self, header: _BlockHeader) -> int:
        return sum(_aligned(prod(shape) * dtype.itemsize) for _, dtype, shape in self._sizes(header))

    def _laid_out(self, header: _BlockHeader, room: Tensor) -> dict[str | None, Tensor]:
        """Return views into a buffer that starts with the block, by part name."""
        views: dict[str | None, Tensor] = {}
        start = 0
        for name, dtype, shape in self._sizes(header):
            num_bytes = prod(shape) * dtype.itemsize
            views[name] = room[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)
        return views


def _blocks(table: Table, transfer: Transfer, with_per_row: bool) -> Iterator[RowBlock]:
    """Yield a transfer's rows in blocks with bounded size."""
    columns, keys = (transfer.c0, transfer.c1), (transfer.r0, transfer.r1)
    for block in table.stream(columns, keys=keys):
        parts = {name: part for name, part in block.parts.items() if with_per_row or part.dim() > 1}
        if not parts:
            continue  # counts of waiting IDs, which another rectangle with the same rows sends
        num_rows = len(block.keys)
        # Bound the blocks, so a round exceeds the byte limit by at most a block.
        step = max(1, _TRANSFER_BYTES * num_rows // max(1, sum(part.nbytes for part in parts.values())))
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            yield RowBlock(block.keys[rows], columns, {name: part[rows] for name, part in parts.items()})


def _header(module: int, table: int, target: RankRectangle, block: RowBlock) -> _BlockHeader:
    first = block.keys.start if isinstance(block.keys, range) else None
    return _BlockHeader(
        target.rank,
        module,
        table,
        target.number,
        first,
        len(block.keys),
        block.columns,
        tuple(block.parts),
    )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
