"""Growing folders of impressions and actions, joined to a folder of labelled rows that a model follows.

[Note: a joined folder]
`FolderJoin` writes decided rows to Arrow IPC files, named by the number of rows before them. The metadata of
a file's schema lists the calls of `LabelJoin.add` since the file before it. From time to time, the state of
the join and the positions in both folders are saved to ``_state.pt``. After a kill, this state is loaded, and
the calls in the files after it are repeated, which gives exactly the rows of these files. Rows that were
decided but not written had no effect, and are decided again. No row is therefore lost or written twice, and
a file never changes. A trainer that follows the folder needs only its position there; it can be killed and
continued at any time.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from meshrec.data.arrow import pa
from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.folder_tables import FolderTables
from meshrec.data.follow import FilePosition
from meshrec.data.label_join import LabelJoin
from meshrec.durable import durable_file, remove_named, write_durably

_log = logging.getLogger(__name__)

_STREAMS = ("impressions", "actions")
_METADATA = b"meshrec.calls"
_STATE, _LOCK = "_state.pt", "_lock"
_NAME = re.compile(r"\d{16}\.arrow")
# Rows above which a file is written although more records can be read.
_FILE_ROWS = 1 << 16


class FolderJoin:
    """Writer of a folder with labelled rows, joined from growing folders of impressions and actions.

    Both folders are read as by `Follow`. A model trains on the rows with ``Follow(output, ...)``. After an
    error or a kill, create the same object again and `run` it: it continues exactly. See [Note: a joined
    folder].

    Args:
        impressions: folder, or its address in a store.
        actions: folder, or its address in a store.
        output: local folder for labelled rows; it is created. Files in it may be removed once they are
            consumed and older than ``_state.pt``.
        join: new join.
        on_error: "raise" for damaged files, or "skip" to count them in ``faults`` and omit their rows.
        clock_lag_seconds: while neither folder has new files, all records older than this time are taken to
            have arrived. Later ones are late. None: rows wait for new records of both streams.
        poll_seconds: seconds between listings while there is nothing to read, and between files.
        snapshot_rows: records after which the state is saved. After a kill, at most about this number is read
            again.

    Attributes:
        output: folder for labelled rows.
        faults: counts of damaged files, by reason.
        num_written: number of rows in ``output``, including files that were removed.

    Raises:
        ValueError: an argument is not as described.

    Example::

        import pyarrow as pa
        import pyarrow.parquet as pq
        from pathlib import Path
        from meshrec.data import LabelJoin

        for name, table in {
            "shown": pa.table({"request": ["a", "b", "c"], "ts": [0, 5, 99], "item": [7, 8, 9]}),
            "clicks": pa.table({"request": ["b", "x"], "ts": [30, 99]}),
        }.items():
            Path(name).mkdir()
            pq.write_table(table, f"{name}/0001.parquet")
        join = LabelJoin(key="request", time="ts", label="clicked", window_seconds=60)
        FolderJoin("shown", "clicks", Path("labelled"), join).run(stop=lambda: True)
        with pa.ipc.open_file("labelled/0000000000000000.arrow") as file:
            print(file.read_all().to_pylist())
    """

    def __init__(
        self,
        impressions: str | Path,
        actions: str | Path,
        output: Path,
        join: LabelJoin,
        *,
        on_error: OnError = "raise",
        clock_lag_seconds: float | None = None,
        poll_seconds: float = 1.0,
        snapshot_rows: int = 1_000_000,
    ) -> None:
        if not poll_seconds > 0:
            raise ValueError(f"poll_seconds is {poll_seconds}; it must be above 0. Take 1, for example.")
        if clock_lag_seconds is not None and not clock_lag_seconds >= 0:
            raise ValueError(f"clock_lag_seconds is {clock_lag_seconds}; it must be at least 0.")
        if snapshot_rows < 1:
            raise ValueError(f"snapshot_rows is {snapshot_rows}; it must be at least 1.")
        self._folders, self.output, self._join = (impressions, actions), output, join
        self.faults = Faults(on_error)
        self._clock_lag_seconds, self._poll_seconds = clock_lag_seconds, poll_seconds
        self._snapshot_rows = snapshot_rows
        self._initial: dict[str, Any] = {"join": join.state_dict(), "positions": [{}, {}], "num_written": 0}
        self._readers: list[FolderTables] = []
        # Written rows, records read since the last snapshot, and time of the last file.
        self.num_written, self._num_read, self._written_at = 0, 0, 0.0
        # Since the last file or snapshot: the decided rows, and the calls: index of the stream, number of
        # records and None, or None, 0 and a watermark.
        self._rows: list[Any] = []
        self._calls: list[list[Any]] = []

    @property
    def counts(self) -> dict[str, int]:
        """Number of records by reason; see `LabelJoin`."""
        return self._join.counts

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Join records as they arrive, until ``stop`` returns True.

        Args:
            stop: called when all records of both folders have been read.

        Raises:
            DataError: a record or file is damaged, a file has changed since it was read, or too many records
                wait for their labels.
            ValueError: another process writes to the output.
        """
        with self.opened():
            while True:
                if self.advance():
                    continue
                if stop():
                    self.save()
                    return
                time.sleep(self._poll_seconds)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context manager that locks the output, and continues where the last process has ended.

        Raises:
            DataError: a file has changed since it was read.
            ValueError: another process writes to the output, or joined it with other options.
        """
        self.output.mkdir(parents=True, exist_ok=True)
        with self._locked():
            try:
                self._restore()
                yield
            finally:
                # They hold open files.
                self._readers = []

    def advance(self) -> bool:
        """Join the next records, and write the rows that are due. Return whether there were records.

        Call it in the context of `opened`. Without records, all decided rows are written.

        Raises:
            DataError: as for `run`.
        """
        if self._read_next():
            num_rows = sum(rows.num_rows for rows in self._rows)
            if num_rows >= _FILE_ROWS or time.monotonic() - self._written_at >= self._poll_seconds:
                self._write()
            return True
        if self._clock_lag_seconds is not None:
            self._tick(time.time_ns() - round(self._clock_lag_seconds * 1e9))
        self._write()
        return False

    def _read_next(self) -> bool:
        """Join the next records, if possible of the stream that is behind. Return whether there were any."""
        behind = _STREAMS.index(self._join.stream_behind)
        return any(self._read(index) for index in (behind, 1 - behind))

    def _read(self, index: int) -> int:
        """Join the next records of a stream, and return their number; 0 if there are none."""
        table = self._readers[index].read()
        if table is None:
            return 0
        self._rows.append(self._join.add(**{_STREAMS[index]: table}))
        self._calls.append([index, table.num_rows, None])
        self._num_read += table.num_rows
        return int(table.num_rows)

    def _tick(self, watermark: int) -> None:
        """Raise the watermark of the join."""
        self._rows.append(self._join.add(watermark=watermark))
        if self._calls and self._calls[-1][0] is None:
            # One step to the last watermark decides the same rows, in the same order.
            self._calls.pop()
        self._calls.append([None, 0, watermark])

    def _write(self) -> None:
        """Write the decided rows to a file, if there are any, and save the state if that is due."""
        self._written_at = time.monotonic()
        self._rows = [rows for rows in self._rows if rows.num_rows]
        if self._rows:
            table = pa.concat_tables(self._rows).combine_chunks()
            table = table.replace_schema_metadata({_METADATA: json.dumps(self._calls)})
            path = self.output / _file_name(self.num_written)
            with durable_file(path) as file, pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
            self.num_written += table.num_rows
            self._rows, self._calls = [], []
        if self._num_read >= self._snapshot_rows:
            self.save()

    def save(self) -> None:
        """Save the state, so that files written before are not needed to continue."""
        if any(rows.num_rows for rows in self._rows):
            self._write()
        buffer = io.BytesIO()
        state = {
            "join": self._join.state_dict(),
            "positions": [reader.position._asdict() for reader in self._readers],
            "num_written": self.num_written,
        }
        torch.save(state, buffer)
        write_durably(self.output / _STATE, buffer.getvalue())
        self._rows, self._calls, self._num_read = [], [], 0

    def prune(self, name: str) -> None:
        """Save the state, and remove the files before a file, which must have been consumed."""
        self.save()
        remove_named(self.output, [file.name for file in self._files() if file.name < name])

    def _files(self) -> list[Path]:
        """Return the files with rows, in the order of rows."""
        return sorted(file for file in self.output.glob("*.arrow") if _NAME.fullmatch(file.name))

    def _restore(self) -> None:
        """Load the last state, and repeat the calls whose rows were written after it."""
        state = self._initial
        if (self.output / _STATE).exists():
            state = torch.load(self.output / _STATE, weights_only=True)
        self._join.load_state_dict(state["join"])
        self.num_written = state["num_written"]
        self._rows, self._calls, self._num_read = [], [], 0
        self._readers = [
            FolderTables(folder, self.faults, position=FilePosition(**position))
            for folder, position in zip(self._folders, state["positions"], strict=True)
        ]
        names = [file.name for file in self._files()]
        for name in (name for name in names if name >= _file_name(self.num_written)):
            self._repeat(name)
        if not (self.output / _STATE).exists() and not names:
            # So that a later start with other options is noticed.
            self.save()
        _log.info("joining to %s, which has %s rows", self.output, f"{self.num_written:,}")

    def _repeat(self, name: str) -> None:
        """Repeat the calls that led to a file, which must give as many rows."""
        path = self.output / name
        with pa.ipc.open_file(pa.memory_map(str(path))) as file:
            calls = json.loads((file.schema.metadata or {}).get(_METADATA, "null"))
            num_rows = sum(file.get_batch(index).num_rows for index in range(file.num_record_batches))
        if calls is None or name != _file_name(self.num_written):
            raise DataError(
                f"{path} does not continue the {self.num_written:,} rows before it. Put removed files back, "
                "or join to an empty folder."
            )
        for index, num, watermark in calls:
            if index is None:
                self._tick(watermark)
            elif (num_read := self._read(index)) != num:
                raise DataError(
                    f"{self._folders[index]} had {num:,} rows where it has {num_read:,} now, after "
                    f"{self._readers[index].position}. Put its files back, or join to an empty folder."
                )
        num_joined = sum(rows.num_rows for rows in self._rows)
        if num_joined != num_rows:
            raise DataError(
                f"{path} has {num_rows:,} rows, and the same records give {num_joined:,} now. Put the files "
                "of both folders back, or join to an empty folder."
            )
        self.num_written += num_rows
        self._rows, self._calls = [], []

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the output folder."""
        descriptor = os.open(self.output / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"another process joins records to {self.output}. Stop it, or take another folder."
                ) from error
            yield
        finally:
            os.close(descriptor)


def _file_name(num_rows_before: int) -> str:
    """Return the name of a file. Names are in the order of rows."""
    return f"{num_rows_before:016d}.arrow"
