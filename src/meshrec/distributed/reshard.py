"""Change the sharding plan of a running model: copy tables and optimizer state between ranks, without a disk.

All ranks derive the same list of transfers from the old and the new plan. A transfer is the overlap of a
rectangle (row and column range) under the old plan with a rectangle under the new plan. The rank with the old
rectangle streams the rows in blocks, and the rank with the new rectangle loads them. Blocks are sent in
rounds of bounded size: the ranks exchange block headers, then the blocks in a single all-to-all. The old
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
from meshrec.distributed.build import Blueprint, Contents, ModuleParts, assemble, check_cuts, compile_routing
from meshrec.distributed.routing import Routing
from meshrec.ops.index import unique
from meshrec.ops.operators import OutOfMemoryError
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan
from meshrec.tables.dense.table import parts_of
from meshrec.tables.hashed.table import HashedTable, has_growable_rows
from meshrec.tables.local_shards import LocalShards, allocate
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Table

# Maximum bytes in a block, a run of rows which is sent and loaded at once.
_TRANSFER_BYTES = 1 << 22
# A rank starts no further block in a round after this many bytes. This bounds the buffers.
_ROUND_BYTES = 1 << 26
# Parts of a block start at multiples of 8 bytes, so their bytes can be viewed as any dtype.
_ALIGNMENT = 8


class RankRectangle(NamedTuple):
    """A rectangle (row and column range) of a table, and the rank which has it."""

    rank: int
    number: int
    """Index among the table's rectangles on the rank."""
    rectangle: Rectangle


class Transfer(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) to copy from a rectangle in the old plan to one in the new plan."""

    source: RankRectangle
    target: RankRectangle
    r0: int
    r1: int
    c0: int
    c1: int


class _BlockHeader(NamedTuple):
    """Header from which the receiving rank computes size and layout of a row block."""

    target: int
    """Receiving rank."""
    module: int
    """Index of the sharded module."""
    table: int
    """Table number in the module."""
    number: int
    """Index of the new rectangle among the table's rectangles on the receiving rank."""
    first: int | None
    """First key if the rows have consecutive keys. None if the block contains the keys."""
    num_rows: int
    columns: tuple[int, int]
    """Table columns [first, end)."""
    parts: tuple[str, ...]
    """Names of the tensors in the block, such as "weight" or an optimizer slot."""


@announced_on_failure
def reshard_tables(
    built: Mapping[str, ModuleParts], plan: ShardingPlan, env: ShardingEnv
) -> dict[str, ModuleParts]:
    """Build all sharded modules again under a new plan, with copies of their tables and optimizer state.

    Collective. Until the caller drops the old parts, memory holds the tables under both plans.

    Args:
        built: parts of the sharded modules under the old plan, by module path. They stay unchanged.
        plan: the new plan, already verified.
        env: the ranks.

    Returns:
        Parts under the new plan, by module path.

    Raises:
        ValueError: a trained table has no fused optimizer, the plan cuts a quantized table within a byte, or
            a table's optimizer does not allow the plan. Raised on every rank.
        OutOfMemoryError: a rank has too little memory; raised on every rank.
        RuntimeError: a rank cannot write a table's file; raised on every rank.
    """
    # Checks come before any allocation, and give the same result on all ranks.
    for path, module in built.items():
        names = [table.name for table in module.routing.tables]
        check_cuts(dict(zip(names, module.storages, strict=True)), plan.plan[path])
    trained = _trained_tables(built, env)
    _check_fused(built, trained)
    # From here to the end, memory holds both plans' tables.
    allocated: dict[str, _NewTables] = {}
    with together(env.world, "allocation"):
        try:
            for path, module in built.items():
                allocated[path] = _allocate_new(path, module, plan.plan[path], trained)
        except (RuntimeError, MemoryError) as failure:
            raise OutOfMemoryError(
                f"there is no memory for the tables under the new plan: {failure}. The old plan stays."
            ) from failure
    # assemble_module may reject the plan, on all ranks, so it runs before anything is sent.
    new = {path: allocated[path].assemble_module(module) for path, module in built.items()}
    with torch.no_grad():
        _TableTransport(list(built.values()), list(allocated.values()), env.shard).run()
        for module in new.values():
            module.tables.recount()
    return new


class _NewTables(NamedTuple):
    """The tables of a module under the new plan on this rank, allocated but not yet filled."""

    plan: EmbeddingModuleShardingPlan
    routing: Routing
    trained: list[bool]
    """Whether a table is trained, by table number."""
    split: LocalShards
    """Shards of the tables split over ranks."""
    local: LocalShards
    """Copies of the data-parallel tables."""

    def tables(self, number: int) -> Sequence[Table]:
        """Return the parts of a table on this rank, a `Table` object per rectangle."""
        held = self.local if self.routing.replicated[number] else self.split
        here = held.of_table(number)
        return [] if here is None else here.tables

    def assemble_module(self, old: ModuleParts) -> ModuleParts:
        """Create the module's parts around these tables, with options and step counts from the old parts."""
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


def _trained_tables(built: Mapping[str, ModuleParts], env: ShardingEnv) -> set[tuple[str, str]]:
    """Return (module path, table name) for all tables which are trained on some rank. Collective.

    A rank without a shard of a table cannot tell whether the table is trained.
    """
    # Only ranks with a shard know; other ranks have an empty parameter.
    local = {
        (path, name)
        for path, module in built.items()
        for name, shards in module.shards.items()
        if not shards.over_devices and shards.rectangles and shards.weight.requires_grad
    }
    return set().union(*gather_objects(local, env.world, "trained tables"))


def _check_fused(built: Mapping[str, ModuleParts], trained: set[tuple[str, str]]) -> None:
    """Raise ValueError if a trained table has no fused optimizer.

    The user's optimizer for such a table refers to the old parameter, and would not update the new table.
    """
    for path, module in built.items():
        for table, rule in zip(module.routing.tables, module.rules, strict=True):
            if rule is None and (path, table.name) in trained:
                raise ValueError(
                    f"table {table.name!r} of module {path!r} has ordinary gradients: its optimizer would "
                    "keep updating the old parameters. Give it an optimizer that is fused "
                    "into backward, or save a checkpoint and load it under the new plan."
                )


def _allocate_new(
    path: str, built: ModuleParts, plan: EmbeddingModuleShardingPlan, trained: set[tuple[str, str]]
) -> _NewTables:
    """Allocate this rank's tables of a module under the new plan."""
    routing = compile_routing(built.routing.tables, plan, built.rules, built.storages, built.env)
    split = routing.work[built.env.shard.rank].rectangles
    flags = [(path, table.name) in trained for table in routing.tables]
    local = routing.local.rectangles
    return _NewTables(plan, routing, flags, _empty(split, built, flags), _empty(local, built, flags))


def _empty(rectangles: Sequence[Rectangle], built: ModuleParts, trained: Sequence[bool]) -> LocalShards:
    """Allocate rectangles (row and column ranges of tables) without filling them."""
    specs = [None if rule is None else rule.spec for rule in built.rules]
    names = [table.name for table in built.routing.tables]
    return allocate(rectangles, names, built.storages, specs, trained, device=built.device)


def _holders(routing: Routing, table: int) -> list[RankRectangle] | None:
    """Return a table's rectangles (row and column ranges) on all ranks; None if all have the whole table."""
    if routing.replicated[table]:
        return None
    owners = []
    for rank, work in enumerate(routing.work):
        rank_rectangles = [rectangle for rectangle in work.rectangles if rectangle.table == table]
        owners += [RankRectangle(rank, number, rectangle) for number, rectangle in enumerate(rank_rectangles)]
    return owners


def plan_transfers(
    old: list[RankRectangle] | None, new: list[RankRectangle] | None, axis: Axis
) -> Iterator[Transfer]:
    """Yield the transfers which fill a table's rectangles under the new plan, in the same order on all ranks.

    A transfer is the overlap of an old and a new rectangle (row and column range). Source and target may be
    the same rank.

    Args:
        old: rectangles on all ranks under the old plan; None: every rank has the whole table.
        new: rectangles on all ranks under the new plan; None: every rank has the whole table.
        axis: the ranks.
    """
    # The table is whole on every rank before and after, so nothing moves.
    if old is None and new is None:
        return
    ranks = range(axis.size)
    if new is None:
        assert old is not None
        whole = _whole_table(old)
        new = [RankRectangle(rank, 0, whole) for rank in ranks]
    for target in new:
        # Every rank has the whole table, so each rank copies from itself.
        sources = old if old is not None else [RankRectangle(target.rank, 0, _whole_table(new))]
        for source in sources:
            # The transfer is the intersection of both rectangles.
            a, b = source.rectangle, target.rectangle
            r0, r1 = max(a.r0, b.r0), min(a.r1, b.r1)
            c0, c1 = max(a.c0, b.c0), min(a.c1, b.c1)
            if r0 < r1 and c0 < c1:
                yield Transfer(source, target, r0, r1, c0, c1)


def _whole_table(held: Sequence[RankRectangle]) -> Rectangle:
    """Return a rectangle with all rows and columns of a table, given its rectangles on all ranks."""
    return Rectangle(
        held[0].rectangle.table,
        min(part.rectangle.r0 for part in held),
        max(part.rectangle.r1 for part in held),
        0,
        max(part.rectangle.c1 for part in held),
    )


def _transfers_by_row(transfers: Sequence[Transfer]) -> Iterator[Transfer]:
    """Select the transfers which also carry values per row, such as row-wise optimizer state.

    If a row's columns are in several rectangles, each of them stores the same values per row. Some of these
    values must not arrive twice, such as counts of IDs waiting for admission. Therefore every row in a target
    rectangle must be in exactly one selected transfer.

    The transfers which contain a given table column have this property: together they contain every row of
    the target once. For every target, the function selects the transfers with a common column. It chooses the
    column for which the fewest rows move to another rank.
    """
    for _, group in groupby(transfers, attrgetter("target")):
        of_target = list(group)
        # Starts of transfers suffice: between two starts, no other set of transfers begins.
        by_column = [[x for x in of_target if x.c0 <= c < x.c1] for c in sorted({x.c0 for x in of_target})]
        yield from min(by_column, key=_num_travelling)


def _num_travelling(transfers: Sequence[Transfer]) -> int:
    """Return the number of rows which the transfers send to another rank."""
    return sum(
        transfer.r1 - transfer.r0 for transfer in transfers if transfer.source.rank != transfer.target.rank
    )


class _TableTransport:
    """Copy of rows and optimizer state from the old tables to the new tables, over all ranks."""

    def __init__(self, old: Sequence[ModuleParts], new: Sequence[_NewTables], axis: Axis) -> None:
        # Lives for a single resharding, during which memory holds the tables under both plans.
        self._old, self._new, self._axis = old, new, axis
        # New hashed tables on this rank, and the keys they will get, by ``id(table)``. Filled and cleared by
        # run().
        self._keys: dict[int, tuple[HashedTable, list[Tensor]]] = {}

    def run(self) -> None:
        """Copy all rows to their new rectangles. Collective."""
        # Keys first. Rows arrive in an order that depends on the rank, but the slots of a row must be equal
        # on all ranks with columns in it (``tables.index.Index``). ``reserve`` assigns the slots in key
        # order.
        self._move(self._outgoing_keys())
        with together(self._axis, "resharding"):
            for table, keys in self._keys.values():
                table.reserve(unique(torch.cat(keys))[0])  # other columns in a row come from other rectangles
        self._keys.clear()
        self._move(self._outgoing())

    def _move(self, outgoing: Iterator[tuple[_BlockHeader, RowBlock]]) -> None:
        """Send and load blocks in rounds, until no rank has a block left. Collective."""
        while True:
            sent: list[tuple[_BlockHeader, RowBlock]] = []
            size = 0
            with together(self._axis, "resharding"):  # rows that stay are loaded here, possibly into files
                # A rank without blocks takes part in further rounds, because the exchange is collective.
                while size < _ROUND_BYTES and (pair := next(outgoing, None)) is not None:
                    sent.append(pair)
                    size += self._num_bytes(pair[0])
            headers = gather_objects([header for header, _ in sent], self._axis, "resharding")
            # All ranks see the same headers, so they stop together.
            if not any(headers):
                return
            self._exchange(sent, headers)

    def _outgoing(self) -> Iterator[tuple[_BlockHeader, RowBlock]]:
        """Yield the blocks of rows which this rank sends to other ranks.

        Blocks for this rank itself are loaded while iterating, without a copy through a message.
        """
        for m, (old, new) in enumerate(zip(self._old, self._new, strict=True)):
            for t, table in enumerate(old.routing.tables):
                shards, targets = old.shards[table.name], new.tables(t)
                before, after = _holders(old.routing, t), _holders(new.routing, t)
                if before is None and after is None:
                    for source, target in zip(shards.tables, targets, strict=True):
                        target.load(source.stream())  # the table is whole everywhere, before and after
                    continue
                transfers = list(plan_transfers(before, after, self._axis))
                with_per_row = set(_transfers_by_row(transfers))
                for transfer in transfers:
                    # Other ranks send these rows.
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
        """Yield blocks with keys only, without rows. The keys tell a rank which rows its hashed tables get.

        Keys for tables on this rank itself are stored in ``self._keys`` while iterating.
        """
        for m, (old, new) in enumerate(zip(self._old, self._new, strict=True)):
            for t, table in enumerate(old.routing.tables):
                shards, targets = old.shards[table.name], new.tables(t)
                before, after = _holders(old.routing, t), _holders(new.routing, t)
                if not old.storages[t].is_growable or (before is None and after is None):
                    continue
                for transfer in _transfers_by_row(list(plan_transfers(before, after, self._axis))):
                    if transfer.source.rank != self._axis.rank:
                        continue
                    source = shards.tables[transfer.source.number]
                    assert has_growable_rows(source)
                    keys, columns = (
                        source.live_keys((transfer.r0, transfer.r1))[0],
                        (transfer.c0, transfer.c1),
                    )
                    # In blocks, which bound the memory for a transfer.
                    for some in keys.split(_TRANSFER_BYTES // keys.itemsize):
                        block = RowBlock(some, columns, {})
                        if transfer.target.rank == self._axis.rank:
                            self._load_block(targets[transfer.target.number], block)
                        else:
                            yield _header(m, t, transfer.target, block), block

    def _load_block(self, table: Table, block: RowBlock) -> None:
        """Load a block of rows into a new table. If the block has only keys, store them in ``self._keys``."""
        if block.parts:
            table.load([block])
        else:
            assert has_growable_rows(table)
            assert isinstance(block.keys, Tensor)
            self._keys.setdefault(id(table), (table, []))[1].append(block.keys)

    def _exchange(
        self, sent: Sequence[tuple[_BlockHeader, RowBlock]], headers: Sequence[Sequence[_BlockHeader]]
    ) -> None:
        """Send the blocks of a round in a single all-to-all, and load the received blocks. Collective.

        Args:
            headers: headers for all blocks in the round, by sending rank.
        """
        rank, ranks = self._axis.rank, range(self._axis.size)
        # all_to_all splits the buffer by target rank; the receiver walks headers in the same order.
        by_target = sorted(sent, key=lambda item: item[0].target)
        arriving = [header for rank_headers in headers for header in rank_headers if header.target == rank]
        splits = Splits(
            [sum(self._num_bytes(h) for h in headers[rank] if h.target == other) for other in ranks],
            [sum(self._num_bytes(h) for h in headers[other] if h.target == rank) for other in ranks],
        )
        # Padding between parts stays uninitialized; the receiver skips it by the same layout.
        buffer = torch.empty(sum(splits.sent), dtype=torch.uint8, device=self._old[0].device)
        start = 0
        for header, block in by_target:
            room, start = buffer[start:], start + self._num_bytes(header)
            for name, part in self._part_views(header, room).items():
                part.copy_(block.keys if name is None else block.parts[name])  # type: ignore[arg-type]
        buffer = all_to_all(buffer, splits, self._axis, "resharding").wait()
        with together(self._axis, "resharding"):
            self._load(arriving, buffer)

    def _load(self, arriving: Sequence[_BlockHeader], buffer: Tensor) -> None:
        """Load all blocks in a received buffer."""
        start = 0
        for header in arriving:
            room, start = buffer[start:], start + self._num_bytes(header)
            parts = self._part_views(header, room)
            keys = (
                parts.pop(None)
                if header.first is None
                else range(header.first, header.first + header.num_rows)
            )
            block = RowBlock(keys, header.columns, {name: part for name, part in parts.items() if name})
            self._load_block(self._new[header.module].tables(header.table)[header.number], block)

    def _sizes(self, header: _BlockHeader) -> Iterator[tuple[str | None, torch.dtype, tuple[int, ...]]]:
        """Yield (name, dtype, shape) for every tensor in a block, in message order.

        If the keys are not consecutive, the block starts with the keys, under the name None.
        """
        module, n = self._old[header.module], header.num_rows
        storage, rule = module.storages[header.table], module.rules[header.table]
        if header.first is None:
            yield None, torch.int64, (n,)
        c0, c1 = map(storage.part_column, header.columns)
        # Counts of IDs waiting for admission, which only blocks of hashed tables may have.
        waiting = RowPart("waiting", torch.int64, True)
        for part in [*parts_of(storage, None if rule is None else rule.spec), waiting]:
            if part.name in header.parts:
                yield part.name, part.dtype, (n,) if part.per_row else (n, c1 - c0)

    def _num_bytes(self, header: _BlockHeader) -> int:
        """Return the bytes of a block in a message, with padding."""
        return sum(_aligned(prod(shape) * dtype.itemsize) for _, dtype, shape in self._sizes(header))

    def _part_views(self, header: _BlockHeader, room: Tensor) -> dict[str | None, Tensor]:
        """Return a block's tensors by name, as views of a message buffer."""
        views: dict[str | None, Tensor] = {}
        start = 0
        for name, dtype, shape in self._sizes(header):
            num_bytes = prod(shape) * dtype.itemsize
            views[name] = room[start : start + num_bytes].view(dtype).view(shape)
            start += _aligned(num_bytes)
        return views


def _blocks(table: Table, transfer: Transfer, with_per_row: bool) -> Iterator[RowBlock]:
    """Yield the rows of a transfer in blocks of at most ``_TRANSFER_BYTES``.

    Args:
        with_per_row: whether blocks also contain values per row, such as row-wise optimizer state.
    """
    # Hashed tables have no first row: the keys travel as a part without a name.
    columns, keys = (transfer.c0, transfer.c1), (transfer.r0, transfer.r1)
    for block in table.stream(columns, keys=keys):
        parts = {name: part for name, part in block.parts.items() if with_per_row or part.dim() > 1}
        if not parts:
            continue  # a block of waiting IDs has only values per row, which another transfer sends
        num_rows = len(block.keys)
        # Rows per block.
        step = max(1, _TRANSFER_BYTES * num_rows // max(1, sum(part.nbytes for part in parts.values())))
        for first in range(0, num_rows, step):
            rows = slice(first, first + step)
            yield RowBlock(block.keys[rows], columns, {name: part[rows] for name, part in parts.items()})


def _header(module: int, table: int, target: RankRectangle, block: RowBlock) -> _BlockHeader:
    """Return the header for a block."""
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
    """Round up to a multiple of ``_ALIGNMENT``."""
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
