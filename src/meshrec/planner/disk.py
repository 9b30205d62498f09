"""Tables larger than memory: select the tables to keep in memory, and the cache sizes of tables in files.

The hit rate of a cache is predicted from a sample of IDs. IDs are assumed to follow Zipf's law, with the
exponent that gives as many distinct IDs in as many draws as the sample has. Che's approximation then gives
the hit rate of an LRU cache: a row is a hit if it was last used within the time in which the cache fills with
other rows (Che, Tung, Wang: "Hierarchical Web caching systems", 2002). The actual clock policy, with several
chances per row, keeps frequent rows longer, so measured rates are usually slightly higher.

Memory is assigned greedily: each step gives a hundredth of a table's rows to the cache in which an additional
byte saves most disk reads.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.types import Floats, Table, Topology

# Maximum number of bins for the rows of a table in `_ZipfLaw`.
_BINS = 400
# Number of equal steps in which a cache may grow to the whole table.
_STEPS = 100
# Alignment of records in table files.
_RECORD_SECTOR = 512


class IdSample(NamedTuple):
    """Statistics of a sample of IDs looked up in a table, from which the skew is estimated.

    Attributes:
        draws: ID count in the sample.
        distinct: distinct ID count in the sample.
    """

    draws: int
    distinct: int


class PlacedTable(NamedTuple):
    """Split of a table between memory and a file.

    Attributes:
        name: table name.
        cache_rows: rows cached in memory; None: the whole table is in memory, without a file.
        memory_bytes: bytes in memory, summed over all ranks.
        file_bytes: bytes in files, summed over all ranks.
        hit_rate: predicted fraction of a batch's distinct rows to be found in the cache.
        reads: predicted number of records read from files per step, over all ranks.
    """

    name: str
    cache_rows: int | None
    memory_bytes: int
    file_bytes: int
    hit_rate: float
    reads: float


class StoragePlan(NamedTuple):
    """Split of all tables between memory and files.

    Attributes:
        tables: split per table.
        disk_seconds: predicted disk seconds per step. The train pipeline overlaps them
            with the previous step.
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


class _ZipfLaw:
    """Zipf's law over the rows of a table: the chance of the k-th most frequent row is proportional to k^-s.

    Rows with similar ranks k share a bin, and count as equally likely.

    Args:
        exponent: Zipf exponent s; 0 makes all rows equally likely.
    """

    def __init__(self, num_rows: int, exponent: float) -> None:
        edges = np.unique(np.geomspace(1, num_rows + 1, _BINS).astype(np.int64))
        self.sizes = np.diff(edges).astype(np.float64)
        # The geometric mean of the first and last rank in the bin represents all rows in it.
        middles = np.sqrt(edges[:-1] * np.maximum(edges[1:] - 1, edges[:-1]).astype(np.float64))
        weights = middles**-exponent
        self.chances = weights / (weights * self.sizes).sum()

    def distinct(self, draws: float) -> float:
        """Return the expected distinct row count in ``draws`` lookups."""
        return float((self.sizes * self._drawn(draws)).sum())

    def hit_rate(self, cached: float, draws: float) -> float:
        """Return the fraction of a batch's distinct rows expected in a cache."""
        if cached >= self.sizes.sum():
            return 1.0
        used = self._drawn(draws)  # by a batch
        # Che's approximation: search how many batches use `cached` distinct rows. First
        # double `high` until enough rows are used, then bisect.
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
        """Return the chance of a row to be looked up at least once in ``draws`` lookups, per bin of rows."""
        # 1 - (1 - chance) ** draws, without rounding small chances to 0.
        chance: Floats = -np.expm1(draws * np.log1p(-np.minimum(self.chances, 1 - 1e-12)))
        return chance


def exponent_of(num_rows: int, sample: IdSample) -> float:
    """Return the Zipf exponent (0 to 4) under which the expected distinct ID count equals the sample's."""
    # The distinct count falls as the exponent grows, so bisect. 50 halvings reach the precision of a float.
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2
        if _ZipfLaw(num_rows, middle).distinct(sample.draws) > sample.distinct:
            low = middle
        else:
            high = middle
    return low


def hit_rate(num_rows: int, cached: int, sample: IdSample, draws: float) -> float:
    """Predict the fraction of a batch's distinct rows found in a cache.

    Args:
        num_rows: row count in the table.
        cached: row count in the cache.
        sample: statistics on looked-up IDs, from which the skew is estimated.
        draws: ID count per batch.
    """
    return _ZipfLaw(num_rows, exponent_of(num_rows, sample)).hit_rate(cached, draws)


def place_rows(
    tables: Sequence[Table], topology: Topology, samples: Mapping[str, IdSample], *, batch_size: int
) -> StoragePlan:
    """Select the tables to keep in memory, and the cache sizes of tables in files.

    Args:
        tables: all tables in the model.
        topology: machine with a ``disk``.
        samples: statistics on looked-up IDs, by table name.
        batch_size: samples per rank and step.

    Raises:
        ValueError: the topology has no disk, or too small a disk for the files; a table has no sample; or the
            memory is too small for two batches' rows.
    """
    disk = topology.disk
    if disk is None:
        raise ValueError("the topology has no disk. Give Topology(disk=Disk(num_bytes=...)).")
    if missing := [table.name for table in tables if table.name not in samples]:
        raise ValueError(f"table {missing[0]!r} has no sample of IDs. Give an IdSample per table.")
    memory = topology.memory_cap * topology.world_size
    sizes = [_CacheSize(table, samples[table.name], batch_size * topology.world_size) for table in tables]
    # Bytes still to be assigned, over all ranks.
    left = memory - sum(size.index_bytes + size.least * size.row_bytes for size in sizes)
    if left < 0:
        raise ValueError(
            f"tables have {memory / 2**20:,.0f} MiB of memory, but the rows of two batches take "
            f"{(memory - left) / 2**20:,.0f} MiB. Use smaller batches, or give more memory."
        )
    # Tables whose cache can still grow.
    waiting = set(range(len(sizes)))
    while waiting:
        best = max(waiting, key=lambda i: sizes[i].gain())
        # A table leaves the competition when its next step does not fit, or nothing is left to cache.
        size = sizes[best]
        if size.step * size.row_bytes > left or size.cached >= size.table.num_embeddings:
            waiting.discard(best)
            continue
        left -= size.grow()
    _keep_whole_tables_in_memory(sizes, left)
    placed = [size.placed_table() for size in sizes]
    num_nodes = topology.world_size // topology.local_size
    # Files are on the disks of all nodes.
    needed = sum(table.file_bytes for table in placed)
    if needed > disk.num_bytes * num_nodes:
        raise ValueError(
            f"the table files take {needed / 2**30:,.1f} GiB, but the disks have "
            f"{disk.num_bytes * num_nodes / 2**30:,.1f} GiB. Give more memory or disk, or more nodes."
        )
    # A row that is read is also written back once it is evicted from the cache, so writes equal reads.
    reads = sum(table.reads for table in placed) / num_nodes
    per_read, per_write = _rates(topology)
    return StoragePlan(placed, reads / per_read + reads / per_write)


def _rates(topology: Topology) -> tuple[float, float]:
    """Return the records per second that a node's disk reads, and writes, at random."""
    disk, profile = topology.disk, topology.profile
    assert disk is not None
    reads, writes = disk.reads or profile.disk_reads, disk.writes or profile.disk_writes
    if not (reads and writes):
        raise ValueError(
            f"the disk was not measured: the profile {profile.name!r} has no disk figures. Give "
            "Disk(reads=..., writes=...), or a profile of `meshrec calibrate --disk FOLDER`."
        )
    return reads, writes


def _keep_whole_tables_in_memory(sizes: Sequence["_CacheSize"], left: float) -> None:
    """Set the cache size to the whole table for tables that fit in memory, so that they need no file.

    A whole table has no overhead per cached row. It may take less memory than its cache.
    """
    # Smallest first, so that as many tables as possible need no file.
    for size in sorted(sizes, key=_CacheSize.bytes_to_whole):
        additional = size.bytes_to_whole()
        if additional <= left:
            left -= additional
            size.cached = size.table.num_embeddings


class _CacheSize:
    """Cache size of a table while memory is assigned, and the hit rate with this size.

    Attributes:
        cached: rows in the cache so far.
        least: rows in the cache at first, which suffice for two batches.
        step: rows which a call of `grow` adds to the cache.
        row_bytes: memory bytes per cached row.
        index_bytes: memory bytes of the hash index, which does not depend on the cache size.
    """

    def __init__(self, table: Table, sample: IdSample, samples_per_step: int) -> None:
        self.table = table
        self._law = _ZipfLaw(table.num_embeddings, exponent_of(table.num_embeddings, sample))
        self._draws = table.ids_per_sample * samples_per_step
        self._distinct = self._law.distinct(self._draws)
        # The index of hashed keys stays in memory completely, and is not part of a record.
        self.index_bytes = table.index_bytes * table.num_embeddings
        self._values = table.num_bytes / table.num_embeddings - table.index_bytes
        self.row_bytes = self._values + _CACHE_ROW_OVERHEAD
        # The rows of two batches must fit, the current one and the next, plus a margin.
        self.least = min(table.num_embeddings, int(2.5 * self._distinct) + 1)
        self.step = max(1, table.num_embeddings // _STEPS)
        self.cached = self.least
        # Hit rate with `cached` rows, set again by every step, so that `gain` computes only the next step's.
        self._rate = self._law.hit_rate(self.cached, self._draws)

    def gain(self) -> float:
        """Return how many disk reads per training step a larger cache saves, per additional byte of memory.

        The larger cache is the present cache after another call of `grow`.
        """
        more = self._law.hit_rate(self.cached + self.step, self._draws)
        return self._distinct * (more - self._rate) / (self.step * self.row_bytes)

    def grow(self) -> float:
        """Enlarge the cache by one step, and return the additional memory bytes."""
        before = self.cached
        self.cached = min(self.table.num_embeddings, self.cached + self.step)
        self._rate = self._law.hit_rate(self.cached, self._draws)
        return (self.cached - before) * self.row_bytes

    def bytes_to_whole(self) -> float:
        """Return the additional memory bytes of the whole table in memory over the cache; may be negative."""
        return self.table.num_bytes - self.index_bytes - self.cached * self.row_bytes

    def placed_table(self) -> PlacedTable:
        """Return how the table is split between memory and a file with the present cache size."""
        table = self.table
        if self.cached >= table.num_embeddings:
            return PlacedTable(table.name, None, table.num_bytes, 0, 1.0, 0.0)
        # A record has a 4-byte checksum. Small records share a disk sector, large records start at a sector.
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


# Bytes per cached row in addition to the values: see ``tables.cached.cache``.
_CACHE_ROW_OVERHEAD = 38
