"""Tables larger than memory: select the tables to keep in memory, and cache sizes for the others.

Hit rates are predicted from a sample of IDs. IDs are assumed to follow Zipf's law, with the exponent for
which as many draws as in the sample give as many distinct IDs. Che's approximation then gives the hit rate: a
row hits if it was used within the time in which as many rows were used as the cache holds (Che, Tung, Wang:
"Hierarchical Web caching systems", 2002). That is the rate of LRU; the actual clock policy, with several
chances per row, keeps frequent rows longer, so measured rates are usually slightly higher.

Memory is assigned greedily: each step gives a hundredth of a table to the cache in which a byte saves most
reads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.types import Floats, Table, Topology

_BINS = 400
_STEPS = 100
# Alignment of records in table files.
_RECORD_SECTOR = 512


class IdSample(NamedTuple):
    """Statistics for a sample from a table's IDs.

    Attributes:
        draws: ID count.
        distinct: distinct ID count.
    """

    draws: int
    distinct: int


class PlacedTable(NamedTuple):
    """Split of a table's rows between memory and file.

    Attributes:
        name: table name.
        cache_rows: rows in memory; None: all, without a file.
        memory_bytes: memory over all ranks.
        file_bytes: file size over all ranks.
        hit_rate: predicted fraction of a batch's distinct rows in memory.
        reads: predicted record reads per step, over all ranks.
    """

    name: str
    cache_rows: int | None
    memory_bytes: int
    file_bytes: int
    hit_rate: float
    reads: float


class StoragePlan(NamedTuple):
    """Split of all tables between memory and files, over all ranks.

    Attributes:
        tables: split per table.
        disk_seconds: predicted disk time per step, which the pipeline overlaps with the previous step.
    """

    tables: Sequence[PlacedTable]
    disk_seconds: float

    def text(self) -> str:
        """Format the plan as text."""
        header = ("rows in memory", "memory MiB", "file MiB", "hit rate", "reads")
        lines = [f"{'table':<20} " + " ".join(name.rjust(14) for name in header)]
        for t in self.tables:
            rows = "all" if t.cache_rows is None else f"{t.cache_rows:,}"
            memory, file = f"{t.memory_bytes / 2**20:,.1f}", f"{t.file_bytes / 2**20:,.1f}"
            cells = (rows, memory, file, f"{t.hit_rate:.3f}", f"{t.reads:,.0f}")
            lines.append(f"{t.name:<20} " + " ".join(cell.rjust(14) for cell in cells))
        lines.append(f"disk: {1e3 * self.disk_seconds:.1f} ms per step")
        return "\n".join(lines)


class _Law:
    """Zipf's law over a table's rows, in bins of about equally likely rows."""

    def __init__(self, num_rows: int, exponent: float) -> None:
        edges = np.unique(np.geomspace(1, num_rows + 1, _BINS).astype(np.int64))
        self.sizes = np.diff(edges).astype(np.float64)
        middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, edges[:-1]).astype(np.float64))
        weights = middles**-exponent
        self.chances = weights / (weights * self.sizes).sum()

    def distinct(self, draws: float) -> float:
        """Return the expected distinct row count in ``draws`` draws."""
        return float((self.sizes * self._drawn(draws)).sum())

    def hit_rate(self, cached: float, draws: float) -> float:
        """Return the fraction of a batch's distinct rows which a cache of ``cached`` rows holds."""
        if cached >= self.sizes.sum():
            return 1.0
        used = self._drawn(draws)  # by a batch
        low, high = 0.0, 1.0
        while (self.sizes * (1 - (1 - used) ** high)).sum() < cached and high < 1e15:
            high *= 2
        for _ in range(60):
            middle = (low + high) / 2
            if (self.sizes * (1 - (1 - used) ** middle)).sum() < cached:
                low = middle
            else:
                high = middle
        used_rows = self.sizes * used
        return float((used_rows * (1 - (1 - used) ** high)).sum() / used_rows.sum())

    def _drawn(self, draws: float) -> Floats:
        chance: Floats = -np.expm1(draws * np.log1p(-np.minimum(self.chances, 1 - 1e-12)))
        return chance


def exponent_of(num_rows: int, sample: IdSample) -> float:
    """Return the Zipf exponent which gives as many distinct IDs as a sample has, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        if _Law(num_rows, middle).distinct(sample.draws) > sample.distinct:
            low = middle
        else:
            high = middle
    return low


def hit_rate(num_rows: int, cached: int, sample: IdSample, draws: float) -> float:
    """Predict the fraction of a batch's distinct rows which are in a cache.

    Args:
        num_rows: the table's row count.
        cached: rows in memory.
        sample: sample from the table's IDs.
        draws: IDs per batch.
    """
    return _Law(num_rows, exponent_of(num_rows, sample)).hit_rate(cached, draws)


def place_rows(
    tables: Sequence[Table], topology: Topology, samples: Mapping[str, IdSample], *, batch_size: int
) -> StoragePlan:
    """Select the tables to keep in memory, and cache sizes for the others.

    Args:
        tables: tables.
        topology: machine with a ``disk``.
        samples: ID sample by table name.
        batch_size: samples per rank and step.

    Raises:
        ValueError: no disk, a full disk, a table without sample, or too little memory for the rows of two
            batches of every table.
    """
    disk = topology.disk
    if disk is None:
        raise ValueError("the topology has no disk. Give Topology(disk=Disk(num_bytes=...)).")
    if missing := [table.name for table in tables if table.name not in samples]:
        raise ValueError(f"table {missing[0]!r} has no sample of IDs. Give an IdSample per table.")
    memory = topology.memory_cap * topology.world_size
    sizes = [_CacheSize(table, samples[table.name], batch_size * topology.world_size) for table in tables]
    left = memory - sum(size.index_bytes + size.least * size.row_bytes for size in sizes)
    if left < 0:
        raise ValueError(
            f"tables have {memory / 2**20:,.0f} MiB of memory, but the rows of two batches take "
            f"{(memory - left) / 2**20:,.0f} MiB. Use smaller batches, or give more memory."
        )
    waiting = set(range(len(sizes)))
    while waiting:
        best = max(waiting, key=lambda i: sizes[i].gain())
        size = sizes[best]
        if size.step * size.row_bytes > left or size.cached >= size.table.num_embeddings:
            waiting.discard(best)
            continue
        left -= size.grow()
    _keep_nearly_whole_tables_in_memory(sizes)
    placed = [size.placed() for size in sizes]
    num_nodes = topology.world_size // topology.local_size
    needed = sum(table.file_bytes for table in placed)
    if needed > disk.num_bytes * num_nodes:
        raise ValueError(
            f"the table files take {needed / 2**30:,.1f} GiB, but the disks have "
            f"{disk.num_bytes * num_nodes / 2**30:,.1f} GiB. Give more memory or disk, or more nodes."
        )
    reads = sum(table.reads for table in placed) / num_nodes
    per_read, per_write = _rates(topology)
    return StoragePlan(placed, reads / per_read + reads / per_write)


def _rates(topology: Topology) -> tuple[float, float]:
    """Return the records which a node's disk reads and writes per second."""
    disk, profile = topology.disk, topology.profile
    assert disk is not None
    reads, writes = disk.reads or profile.disk_reads, disk.writes or profile.disk_writes
    if not (reads and writes):
        raise ValueError(
            f"the disk was not measured: the profile {profile.name!r} has no disk figures. Give "
            "Disk(reads=..., writes=...), or a profile of `meshrec calibrate --disk FOLDER`."
        )
    return reads, writes


def _keep_nearly_whole_tables_in_memory(sizes: Sequence["_CacheSize"]) -> None:
    for size in sizes:
        if size.cached > 0.98 * size.table.num_embeddings:
            size.cached = size.table.num_embeddings


class _CacheSize:
    """Cache size of a table while memory is assigned."""

    def __init__(self, table: Table, sample: IdSample, samples_per_step: int) -> None:
        self.table = table
        self._law = _Law(table.num_embeddings, exponent_of(table.num_embeddings, sample))
        self._draws = table.ids_per_sample * samples_per_step
        self._distinct = self._law.distinct(self._draws)
        # The index of hashed keys stays in memory completely, and is not part of a record.
        self.index_bytes = table.index_bytes * table.num_embeddings
        self._values = table.num_bytes / table.num_embeddings - table.index_bytes
        self.row_bytes = self._values + _CACHE_NOTES
        # The rows of two batches must fit, the current one and the next, plus a margin.
        self.least = min(table.num_embeddings, int(2.5 * self._distinct) + 1)
        self.step = max(1, table.num_embeddings // _STEPS)
        self.cached = self.least
        self._rate = self._law.hit_rate(self.cached, self._draws)

    def gain(self) -> float:
        """Return the reads saved per additional byte."""
        more = self._law.hit_rate(self.cached + self.step, self._draws)
        return self._distinct * (more - self._rate) / (self.step * self.row_bytes)

    def grow(self) -> float:
        """Enlarge the cache by a step, and return the bytes used."""
        before = self.cached
        self.cached = min(self.table.num_embeddings, self.cached + self.step)
        self._rate = self._law.hit_rate(self.cached, self._draws)
        return (self.cached - before) * self.row_bytes

    def placed(self) -> PlacedTable:
        """Return the split of the table's rows."""
        table = self.table
        if self.cached >= table.num_embeddings:
            return PlacedTable(table.name, None, table.num_bytes, 0, 1.0, 0.0)
        # A record has a 4-byte checksum.
        record = self._values + 4
        per_block = max(1, int(_RECORD_SECTOR // record))
        block = -(-per_block * record // _RECORD_SECTOR) * _RECORD_SECTOR
        reads = self._distinct * (1 - self._rate)
        return PlacedTable(
            table.name,
            self.cached,
            round(self.index_bytes + self.cached * self.row_bytes),
            round(-(-table.num_embeddings // per_block) * block),
            self._rate,
            reads,
        )


_CACHE_NOTES = 38
"""Bytes per cached row in addition to the values: see ``tables.cached.cache``."""
