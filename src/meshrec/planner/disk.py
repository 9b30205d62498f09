"""Tables larger than memory: which of them stay in memory, and how large the caches of the others are.

A cache's hit rate is predicted from a sample of IDs. The law of the IDs is Zipf's, with the exponent that
gives as many distinct IDs in as many draws as the sample has. Che's approximation then gives the hit rate
of a cache: a row is found if it was used within the time in which as many rows were used as the cache holds
(Che, Tung, Wang: "Hierarchical Web caching systems", 2002). It is that of LRU; the cache's clock with several
chances per row keeps often used rows longer, so the measured rate is as a rule a little higher.

Memory goes where it saves most: each step gives one hundredth of a table to the cache in which a byte saves
the most reads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.types import Floats, Table, Topology

_BINS = 400
_STEPS = 100
_RECORD_SECTOR = 512


class IdSample(NamedTuple):
    """Statistics of a sample of a table's IDs."""

    draws: int
    """The number of IDs in the sample."""
    distinct: int
    """The number of different IDs among them."""


class PlacedTable(NamedTuple):
    """The split of a table's rows between memory and file."""

    name: str
    cache_rows: int | None
    """The rows in memory; None: all of them, and no file."""
    memory_bytes: int
    file_bytes: int
    hit_rate: float
    """The predicted share of the distinct rows of a batch that are in memory."""
    reads: float
    """The predicted number of records that a step reads, over all ranks."""


class StoragePlan(NamedTuple):
    """The split of all tables' rows between memory and files, over all ranks."""

    tables: Sequence[PlacedTable]
    disk_seconds: float
    """The predicted time of a step's reads and writes. The pipeline overlaps it with the step before."""

    def text(self) -> str:
        """Return the plan as text."""
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
    """Zipf's law over the rows of a table, in bins of rows that are about equally likely."""

    def __init__(self, num_rows: int, exponent: float) -> None:
        edges = np.unique(np.geomspace(1, num_rows + 1, _BINS).astype(np.int64))
        self.sizes = np.diff(edges).astype(np.float64)
        middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, edges[:-1]).astype(np.float64))
        weights = middles**-exponent
        self.chances = weights / (weights * self.sizes).sum()

    def distinct(self, draws: float) -> float:
        """Return the expected number of different rows among some draws."""
        return float((self.sizes * self._drawn(draws)).sum())

    def hit_rate(self, cached: float, draws: float) -> float:
        """Return the share of the distinct rows of a batch that a cache of some rows holds."""
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
        found = self.sizes * used
        return float((found * (1 - (1 - used) ** high)).sum() / found.sum())

    def _drawn(self, draws: float) -> Floats:
        chance: Floats = -np.expm1(draws * np.log1p(-np.minimum(self.chances, 1 - 1e-12)))
        return chance


def exponent_of(num_rows: int, sample: IdSample) -> float:
    """Return the exponent of Zipf's law that gives as many different IDs as a sample has, by bisection."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        if _Law(num_rows, middle).distinct(sample.draws) > sample.distinct:
            low = middle
        else:
            high = middle
    return low


def hit_rate(num_rows: int, cached: int, sample: IdSample, draws: float) -> float:
    """Predict the share of the distinct rows of a batch of ``draws`` IDs that are in a cache.

    Args:
        num_rows: the number of rows of the table.
        cached: the number of rows in memory.
        sample: a sample of its IDs.
        draws: the number of IDs of a batch.
    """
    return _Law(num_rows, exponent_of(num_rows, sample)).hit_rate(cached, draws)


def place_rows(
    tables: Sequence[Table], topology: Topology, samples: Mapping[str, IdSample], *, batch_size: int
) -> StoragePlan:
    """Choose which tables stay in memory, and the caches of the others.

    Args:
        tables: the tables.
        topology: the machine, with its ``disk``.
        samples: a sample of the IDs of each table, by name.
        batch_size: the number of samples per rank and step.

    Raises:
        ValueError: there is no disk, it has too little room, a table has no sample, or memory does not hold
            the rows of two batches of each table.
    """
    disk = topology.disk
    if disk is None:
        raise ValueError("the topology has no disk. Give Topology(disk=Disk(num_bytes=...)).")
    if missing := [table.name for table in tables if table.name not in samples]:
        raise ValueError(f"table {missing[0]!r} has no sample of IDs. Give an IdSample for each table.")
    memory = topology.memory_cap * topology.world_size
    places = [_Place(table, samples[table.name], batch_size * topology.world_size) for table in tables]
    left = memory - sum(place.index_bytes + place.least * place.row_bytes for place in places)
    if left < 0:
        raise ValueError(
            f"tables have {memory / 2**20:,.0f} MiB of memory, and two batches of their rows take "
            f"{(memory - left) / 2**20:,.0f} MiB. Use smaller batches, or give more memory."
        )
    waiting = set(range(len(places)))
    while waiting:
        best = max(waiting, key=lambda i: places[i].gain())
        place = places[best]
        if place.step * place.row_bytes > left or place.cached >= place.table.num_embeddings:
            waiting.discard(best)
            continue
        left -= place.grow()
    _return_what_no_file_needs(places)
    found = [place.placed() for place in places]
    num_nodes = topology.world_size // topology.local_size
    needed = sum(each.file_bytes for each in found)
    if needed > disk.num_bytes * num_nodes:
        raise ValueError(
            f"the files of tables take {needed / 2**30:,.1f} GiB, and the disks have "
            f"{disk.num_bytes * num_nodes / 2**30:,.1f} GiB. Give more memory or disk, or more nodes."
        )
    reads = sum(each.reads for each in found) / num_nodes
    per_read, per_write = _rates(topology)
    return StoragePlan(found, reads / per_read + reads / per_write)


def _rates(topology: Topology) -> tuple[float, float]:
    """Return the records that a node's disk reads and writes per second."""
    disk, profile = topology.disk, topology.profile
    assert disk is not None
    reads, writes = disk.reads or profile.disk_reads, disk.writes or profile.disk_writes
    if not (reads and writes):
        raise ValueError(
            f"nobody has measured the disk: the profile {profile.name!r} has no figures of one. Give "
            "Disk(reads=..., writes=...), or a profile of `meshrec calibrate --disk FOLDER`."
        )
    return reads, writes


def _return_what_no_file_needs(places: Sequence["_Place"]) -> None:
    for place in places:
        if place.cached > 0.98 * place.table.num_embeddings:
            place.cached = place.table.num_embeddings


class _Place:
    """A table while memory is given out."""

    def __init__(self, table: Table, sample: IdSample, samples_per_step: int) -> None:
        self.table = table
        self._law = _Law(table.num_embeddings, exponent_of(table.num_embeddings, sample))
        self._draws = table.ids_per_sample * samples_per_step
        self._distinct = self._law.distinct(self._draws)
        # The index of hashed keys is in memory whole, and no part of a record.
        self.index_bytes = table.index_bytes * table.num_embeddings
        self._values = table.num_bytes / table.num_embeddings - table.index_bytes
        self.row_bytes = self._values + _CACHE_NOTES
        self.least = min(table.num_embeddings, int(2.5 * self._distinct) + 1)
        self.step = max(1, table.num_embeddings // _STEPS)
        self.cached = self.least
        self._rate = self._law.hit_rate(self.cached, self._draws)

    def gain(self) -> float:
        """Return the reads that a byte more saves."""
        more = self._law.hit_rate(self.cached + self.step, self._draws)
        return self._distinct * (more - self._rate) / (self.step * self.row_bytes)

    def grow(self) -> float:
        """Enlarge the cache by one step, and return the bytes that this takes."""
        before = self.cached
        self.cached = min(self.table.num_embeddings, self.cached + self.step)
        self._rate = self._law.hit_rate(self.cached, self._draws)
        return (self.cached - before) * self.row_bytes

    def placed(self) -> PlacedTable:
        """Return how the table's rows are split between memory and file."""
        table = self.table
        if self.cached >= table.num_embeddings:
            return PlacedTable(table.name, None, table.num_bytes, 0, 1.0, 0.0)
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
"""Bytes that a cached row takes besides its values: see ``tables.row_cache``."""
