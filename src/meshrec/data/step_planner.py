"""Division of a stream's records into steps.

[Note: positions in partitions]

A broker has partitions, and a partition has records in one order. A record has one row, or several if it is
an Arrow table. With W ranks and B samples per batch, a step takes W * B rows. All partitions are merged by
the time of their records, and a record never comes before an earlier one of its partition: its key is the
maximum of all times in the partition so far. Ties are in the order of the partitions' names.

A step takes the first rows of the records that have arrived, without waiting for slower partitions. The
position after a step has three values per partition: the ID of the last record that is consumed entirely,
the number of consumed rows in the record after it, and the last key. Two positions therefore determine the
rows of the step between them, and their order.

With several partitions, which records a step has depends on their arrival. Rank 0 therefore writes each
position to a `StepLog` before the step is trained. A run that continues from a checkpoint repeats the steps
in the log.

All ranks have all records that have arrived, and plan alike. After a plan, fewer rows wait than a step has.
"""

from typing import Any, NamedTuple

import numpy as np

from meshrec.data.brokers import Payload, RecordId, Records, id_order
from meshrec.data.faults import DataError
from meshrec.data.samples import Ints
from meshrec.data.streams import Position


class Runs(NamedTuple):
    """Rows of some steps, in order, as runs of consecutive rows of a record. A field has an entry per run."""

    partitions: list[str]
    """Partition of the record."""
    ids: list[RecordId]
    """ID of the record."""
    times: list[int]
    """Time of the record in microseconds since 1970."""
    payloads: list[Payload]
    record_rows: list[int]
    """Number of rows of the whole record."""
    first_rows: list[int]
    """First row in the record."""
    num_rows: list[int]
    """Number of rows of the run."""

    @staticmethod
    def empty() -> "Runs":
        """Return no runs, to which runs may be added."""
        return Runs([], [], [], [], [], [], [])

    def name(self, run: int) -> str:
        """Name the record of a run, for messages."""
        return f"record {self.ids[run]} of {self.partitions[run]!r}"


class _Partition:
    """Records of a partition that are in no step yet.

    Args:
        last: ID of the last record that is consumed entirely.
        row: number of consumed rows in the record after it.
        key: key of the last consumed record.
    """

    def __init__(self, last: RecordId, row: int, key: int) -> None:
        self.last, self.row, self.key = last, row, key
        self.records = Records.empty()
        self.num_rows: list[int] = []

    def add(self, records: Records, num_rows: list[int]) -> None:
        """Add records after the others."""
        self.records.ids.extend(records.ids)
        self.records.times.extend(records.times)
        self.records.payloads.extend(records.payloads)
        self.num_rows += num_rows

    def position(self, num: int, row: int, keys: Ints) -> list[Any]:
        """Return the position after some records and rows.

        Args:
            num: number of records.
            row: number of rows that are taken of the next record.
            keys: keys of the records, see `keys`.
        """
        if num == 0:
            return [self.last, self.row + row, self.key]
        return [self.records.ids[num - 1], row, int(keys[num - 1])]

    def keys(self, num: int) -> Ints:
        """Return the keys of the first ``num`` records, int64 [num]."""
        times = np.array([self.key, *self.records.times[:num]], np.int64)
        return np.maximum.accumulate(times)[1:]

    def remove(self, position: list[Any]) -> None:
        """Remove the records before a position."""
        last, row, key = position
        num = 0 if last == self.last else self.records.ids.index(last) + 1
        for values in (*self.records, self.num_rows):
            del values[:num]
        self.last, self.row, self.key = last, row, key

    def count_before(self, position: list[Any]) -> tuple[int, int] | None:
        """Return the number of records before a position, and of rows that it takes of the next one.

        None: these records have not arrived.

        Raises:
            DataError: later records have arrived, so these never will.
        """
        last, row, _ = position
        if last != self.last and last not in self.records.ids:
            if self.records.ids and id_order(self.records.ids[-1]) > id_order(last):
                raise DataError(
                    f"record {last} was read before a kill, and the broker now lacks it: it has "
                    f"{self.records.ids[-1]}. The record was deleted, or the broker lost it in a crash. "
                    "If there is a step log, remove it to continue from the position alone; otherwise start "
                    "a new run from the weights of this one."
                )
            return None
        num = 0 if last == self.last else self.records.ids.index(last) + 1
        row -= self.row if num == 0 else 0
        return None if row and num == len(self.records.ids) else (num, row)


class MergedPartitions:
    """Waiting records of partitions, merged by their times; see [Note: positions in partitions].

    Args:
        position: position after which the first record is read.
    """

    def __init__(self, position: Position) -> None:
        self._partitions: dict[str, _Partition] = {}
        for name, values in position.items():
            self._partitions[name] = _Partition(*values)

    @property
    def names(self) -> list[str]:
        """Names of all partitions, in the order in which they were added."""
        return list(self._partitions)

    @property
    def position(self) -> Position:
        """Position after the last consumed row."""
        return {name: [part.last, part.row, part.key] for name, part in self._partitions.items()}

    def add_partition(self, name: str, start: RecordId) -> None:
        """Add a partition that is read from its start."""
        self._partitions[name] = _Partition(start, 0, 0)

    def last(self, name: str) -> RecordId:
        """Return the ID of the last record of a partition that is consumed entirely."""
        return self._partitions[name].last

    def waiting(self, name: str) -> Records:
        """Return the records of a partition that are not consumed entirely. They must not be changed."""
        return self._partitions[name].records

    def add(self, name: str, records: Records, num_rows: list[int]) -> None:
        """Add records of a partition that have arrived.

        Args:
            name: partition name.
            records: the records after those of earlier calls.
            num_rows: number of rows per record.
        """
        self._partitions[name].add(records, num_rows)

    def has_arrived(self, name: str, values: list[Any]) -> bool:
        """Return whether the records of a partition before a position in it have arrived.

        Raises:
            DataError: later records have arrived, so these never will.
        """
        return self._partitions[name].count_before(values) is not None

    def take_first(self) -> tuple[Position, Runs]:
        """Take the records that come first, whatever arrives later in the partitions that have records now.

        Returns:
            - Position after them, of the partitions of which records were taken.
            - The rows of the records.
        """
        keys = {name: part.keys(len(part.num_rows)) for name, part in self._partitions.items()}
        keys = {name: of_partition for name, of_partition in keys.items() if len(of_partition)}
        runs = Runs.empty()
        if not keys:
            return {}, runs
        # The next record of this partition may have the same key, and records of other partitions then come
        # before or after it by the order of names.
        bound, last_name = min((int(of_partition[-1]), name) for name, of_partition in keys.items())
        counts = {
            name: int(np.searchsorted(of_partition, bound, "right" if name <= last_name else "left"))
            for name, of_partition in keys.items()
        }
        counts = {name: num for name, num in counts.items() if num}
        position = {name: self._partitions[name].position(num, 0, keys[name]) for name, num in counts.items()}
        self._take_records(counts, position, runs)
        return position, runs

    def take_before(self, position: Position) -> Runs:
        """Take the records before a position, all of which have arrived. No record is consumed in part."""
        counts, runs = {}, Runs.empty()
        for name, values in position.items():
            count = self._partitions[name].count_before(values)
            assert count is not None
            counts[name] = count[0]
        self._take_records(counts, position, runs)
        return runs

    def _take_records(self, counts: dict[str, int], position: Position, runs: Runs) -> None:
        """Move the first records of some partitions to the runs, up to a position."""
        merged = self._merge(counts)
        self._take(merged, int(merged.num_rows.sum()), position, runs)

    def _merge(self, nums: dict[str, int]) -> "_Merged":
        """Merge the first records of the partitions. ``nums`` has their numbers, by partition."""
        names = sorted(nums)
        keys = [self._partitions[name].keys(nums[name]) for name in names]
        partitions = np.repeat(np.arange(len(names)), [len(part) for part in keys])
        indices = np.concatenate([np.arange(len(part)) for part in keys]) if keys else np.zeros(0, np.int64)
        # Stable, so records of a partition stay in order.
        order = np.lexsort((partitions, np.concatenate(keys))) if keys else indices
        rows = []
        for name in names:
            part = self._partitions[name]
            num_rows = np.array(part.num_rows[: nums[name]], np.int64)
            num_rows[:1] -= part.row
            rows.append(num_rows)
        num_rows = np.concatenate(rows) if rows else indices
        return _Merged(names, partitions[order], indices[order], num_rows[order])

    def _take(self, merged: "_Merged", num_rows: int, position: Position, runs: Runs) -> None:
        """Move the first rows of merged records to the runs, up to a position."""
        ends = np.cumsum(merged.num_rows)
        starts = ends - merged.num_rows
        # The last record may have more rows, and some have none.
        taken = np.minimum(merged.num_rows, num_rows - starts)
        is_taken = taken > 0
        partitions, indices = merged.partitions[is_taken].tolist(), merged.indices[is_taken].tolist()
        parts = [self._partitions[name] for name in merged.names]
        consumed = np.array([part.row for part in parts])
        runs.partitions.extend([merged.names[partition] for partition in partitions])
        pairs = list(zip(partitions, indices, strict=True))
        runs.ids.extend([parts[partition].records.ids[index] for partition, index in pairs])
        runs.times.extend([parts[partition].records.times[index] for partition, index in pairs])
        runs.payloads.extend([parts[partition].records.payloads[index] for partition, index in pairs])
        runs.record_rows.extend([parts[partition].num_rows[index] for partition, index in pairs])
        runs.first_rows.extend(
            np.where(merged.indices == 0, consumed[merged.partitions], 0)[is_taken].tolist()
        )
        runs.num_rows.extend(taken[is_taken].tolist())
        for name, values in position.items():
            self._partitions[name].remove(values)


class StepPlanner(MergedPartitions):
    """Planner of the steps of a stream; see [Note: positions in partitions].

    Args:
        position: position after which the first step starts.
        step_rows: rows per step, over all ranks.
        repeated: positions after steps that were planned before, which are repeated first.
    """

    def __init__(self, position: Position, step_rows: int, repeated: list[Position]) -> None:
        super().__init__(position)
        self._step_rows, self._repeated = step_rows, list(repeated)

    @property
    def num_repeated(self) -> int:
        """Number of steps that will be repeated."""
        return len(self._repeated)

    def needs(self, name: str) -> bool:
        """Return whether more records of a partition should be read.

        Before steps are repeated, only those that the next one waits for. So few records wait.
        """
        if not self._repeated:
            return True
        position = self._repeated[0].get(name)
        return position is not None and not self.has_arrived(name, position)

    def plan(self) -> tuple[list[Position], Runs]:
        """Return the positions after all steps whose records have arrived, and their rows.

        Raises:
            DataError: the records of a step that is repeated are not those of before.
        """
        positions, runs = list[Position](), Runs.empty()
        while self._repeated and self._repeat(self._repeated[0], runs):
            positions.append(self._repeated.pop(0))
        if not self._repeated:
            positions += self._plan_new(runs)
        return positions, runs

    def _repeat(self, position: Position, runs: Runs) -> bool:
        """Add the rows before a position to the runs; return False if they have not all arrived."""
        counts = {}
        for name, values in position.items():
            count = self._partitions[name].count_before(values) if name in self._partitions else None
            if count is None:
                return False
            counts[name] = count
        merged = self._merge({name: num + (row > 0) for name, (num, row) in counts.items()})
        for number, name in enumerate(merged.names):
            num, row = counts[name]
            if row:
                merged.num_rows[(merged.partitions == number) & (merged.indices == num)] = row
        if merged.num_rows.sum() != self._step_rows:
            raise DataError(
                f"the step before {position} had {self._step_rows} rows, and its records now have "
                f"{merged.num_rows.sum()}. The broker's records were changed, or the step log belongs to "
                "other records. Remove the step log to go on from the position alone."
            )
        self._take(merged, self._step_rows, position, runs)
        return True

    def _plan_new(self, runs: Runs) -> list[Position]:
        """Add the rows of all further steps to the runs, and return the positions after them."""
        merged = self._merge({name: len(part.num_rows) for name, part in self._partitions.items()})
        ends = np.cumsum(merged.num_rows)
        num_steps = int(ends[-1]) // self._step_rows if len(ends) else 0
        if num_steps == 0:
            return []
        # Number of records per step boundary that are consumed entirely, and rows taken of the next one.
        boundaries = self._step_rows * np.arange(1, num_steps + 1)
        wholes = np.searchsorted(ends, boundaries, side="right")
        partial = boundaries - np.concatenate([[0], ends])[wholes]
        positions: list[Position] = [{} for _ in boundaries]
        for number, name in enumerate(merged.names):
            part = self._partitions[name]
            where = np.flatnonzero(merged.partitions == number)
            nums = np.searchsorted(where, wholes)
            keys = part.keys(len(where))
            is_next = np.append(merged.partitions, -1)[wholes] == number
            for position, num, row in zip(
                positions, nums.tolist(), (partial * is_next).tolist(), strict=True
            ):
                position[name] = part.position(num, row, keys)
        self._take(merged, num_steps * self._step_rows, positions[-1], runs)
        return positions


class _Merged(NamedTuple):
    """Records of all partitions in one order."""

    names: list[str]
    """Partition names, sorted."""
    partitions: Ints
    """Partition per record, an index of ``names``, int64 [n]."""
    indices: Ints
    """Index per record among those of its partition that wait, int64 [n]."""
    num_rows: Ints
    """Number of rows per record that are not consumed, int64 [n]."""
