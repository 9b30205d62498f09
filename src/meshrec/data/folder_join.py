"""Streams of impressions and actions, joined to a folder of labelled rows that a model follows.

[Note: a joined folder]
`FolderJoin` writes decided rows to Arrow IPC files, named by the number of rows before them. The metadata of
a file's schema lists the calls of `LabelJoin.add` since the file before it: the stream, the number of records
and, for a broker, the position after them. From time to time, the state of the join and the positions in both
streams are saved to ``_state.pt``. After a kill, this state is loaded, and the calls in the files after it
are repeated, which gives exactly the rows of these files. Rows that were decided but not written had no
effect, and are decided again. No row is therefore lost or written twice, and a file never changes. A trainer
that follows the folder needs only its position there; it can be killed and continued at any time.

Calls are repeated by `FolderJoin.advance`, so a broker that is away is waited for between steps. Until all
are repeated, the state is not saved. While a broker is away, the clock decides nothing.
"""

import contextlib
import fcntl
import io
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from meshrec.data.arrow import pa
from meshrec.data.broker_tables import BrokerTables
from meshrec.data.brokers import Broker
from meshrec.data.encoding import Encoding
from meshrec.data.event_columns import TimeUnit
from meshrec.data.faults import DataError, Faults, OnError, RecordFaults
from meshrec.data.folder_tables import FolderTables
from meshrec.data.follow import FilePosition
from meshrec.data.label_join import LabelJoin
from meshrec.data.label_options import LabelOptions
from meshrec.data.locations import without_secrets
from meshrec.data.open_broker import is_broker, open_broker
from meshrec.data.table_stream import TableStream
from meshrec.durable import durable_file, remove_named, write_durably

_log = logging.getLogger(__name__)

_STREAMS = ("impressions", "actions")
_METADATA = b"meshrec.calls"
_STATE, _LOCK = "_state.pt", "_lock"
_NAME = re.compile(r"\d{16}\.arrow")
# Rows above which a file is written although more records can be read.
_FILE_ROWS = 1 << 16
# Calls above which the state is saved: small reads of a broker, which decide no rows, are logged in memory.
_MAX_CALLS = 10_000


class FolderJoin:
    """Writer of a folder with labelled rows, joined from streams of impressions and actions.

    Each stream is a growing folder, read as by `Follow`, or Redis streams or Kafka topics, read as described
    in [Note: records of a broker as tables]. A model trains on the rows with ``Follow(output, ...)``. After
    an error or a kill, create the same object again and `run` it: it continues exactly. See [Note: a joined
    folder].

    Args:
        impressions: folder, its address in a store, or the address of a broker.
        actions: likewise.
        output: local folder for labelled rows; it is created. Files in it may be removed once they are
            consumed and older than ``_state.pt``.
        join: new join.
        on_error: "raise" for damaged files, or "skip" to count them in ``faults`` and omit their rows.
        features: fitted features of the labelled rows, which tell the columns of a broker's records. None:
            impressions come from a folder.
        clock_lag_seconds: while neither stream has new records, all records older than this time are taken to
            have arrived. Later ones are late. None: rows wait for new records of both streams.
        poll_seconds: seconds between reads while there is nothing to read, and between files.
        snapshot_rows: records after which the state is saved. After a kill, at most about this number is read
            again, which a broker must still have.

    Attributes:
        output: folder for labelled rows.
        faults: counts of damaged files and records, by reason.
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
        features: Encoding | None = None,
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
        if is_broker(impressions) and features is None:
            raise ValueError(
                f"impressions are {without_secrets(str(impressions))}, and there are no features to tell "
                "their columns. Train with `meshrec follow RECIPE SOURCE --actions ACTIONS`, or write the "
                "records to a folder."
            )
        self._sources: list[str | Path | Broker] = [
            open_broker(str(source)) if is_broker(source) else source for source in (impressions, actions)
        ]
        self.output, self._join = output, join
        has_broker = any(isinstance(source, Broker) for source in self._sources)
        self.faults = RecordFaults(on_error) if has_broker else Faults(on_error)
        self._features = features
        self._clock_lag_seconds, self._poll_seconds = clock_lag_seconds, poll_seconds
        self._snapshot_rows = snapshot_rows
        self._initial: dict[str, Any] = {"join": join.state_dict(), "positions": [{}, {}], "num_written": 0}
        self._readers: list[TableStream] = []
        # Files after the state, whose calls are not repeated yet.
        self._unrepeated = deque[Path]()
        # Written rows, records read since the last snapshot, and time of the last file.
        self.num_written, self._num_read, self._written_at = 0, 0, 0.0
        # Since the last file or snapshot: the decided rows, and the calls: index of the stream, number of
        # records and `TableStream.logged`, or None, 0 and a watermark.
        self._rows: list[Any] = []
        self._calls: list[list[Any]] = []

    @property
    def counts(self) -> dict[str, int]:
        """Number of records by reason; see `LabelJoin`."""
        return self._join.counts

    @property
    def num_waiting(self) -> int:
        """Number of records that wait in memory."""
        return self._join.num_rows

    def run(self, stop: Callable[[], bool] = lambda: False) -> None:
        """Join records as they arrive, until ``stop`` returns True.

        Args:
            stop: called when all records of both streams have been read, or a broker is away.

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
                for reader in self._readers:
                    reader.close()
                self._readers = []

    def advance(self) -> bool:
        """Join the next records, and write the rows that are due. Return whether there were records.

        Call it in the context of `opened`. Without records, all decided rows are written. After a kill, the
        records of a file that was written before are joined first.

        Raises:
            DataError: as for `run`.
        """
        if self._unrepeated:
            return self._repeat(self._unrepeated[0])
        if self._read_next():
            num_rows = sum(rows.num_rows for rows in self._rows)
            if num_rows >= _FILE_ROWS or time.monotonic() - self._written_at >= self._poll_seconds:
                self._write()
            return True
        if self._clock_lag_seconds is not None and not any(reader.is_waiting for reader in self._readers):
            self._tick(time.time_ns() - round(self._clock_lag_seconds * 1e9))
        self._write()
        return False

    def _read_next(self) -> bool:
        """Join the next records, if possible of the stream that is behind. Return whether there were any."""
        behind = _STREAMS.index(self._join.stream_behind)
        if self._read(behind):
            return True
        # Otherwise the records of a broker that is away might be late when it answers.
        return not self._readers[behind].is_waiting and self._read(1 - behind) > 0

    def _read(self, index: int, logged: Any = None) -> int:
        """Join the next records of a stream, and return their number; 0 if there are none.

        Args:
            index: the stream.
            logged: as for `TableStream.read`.
        """
        table = self._readers[index].read(logged)
        if table is None:
            return 0
        self._rows.append(self._join.add(**{_STREAMS[index]: table}))
        self._calls.append([index, table.num_rows, self._readers[index].logged])
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
        if self._num_read >= self._snapshot_rows or len(self._calls) > _MAX_CALLS:
            self.save()

    def save(self) -> None:
        """Save the state, so that files written before are not needed to continue."""
        if self._unrepeated:
            return
        if any(rows.num_rows for rows in self._rows):
            self._write()
        buffer = io.BytesIO()
        state = {
            "join": self._join.state_dict(),
            "positions": [reader.state_dict() for reader in self._readers],
            "num_written": self.num_written,
        }
        torch.save(state, buffer)
        write_durably(self.output / _STATE, buffer.getvalue())
        self._rows, self._calls, self._num_read = [], [], 0

    def prune(self, name: str) -> None:
        """Save the state, and remove the files before a file, which must have been consumed."""
        self.save()
        if not self._unrepeated:
            remove_named(self.output, [file.name for file in self._files() if file.name < name])

    def _files(self) -> list[Path]:
        """Return the files with rows, in the order of rows."""
        return sorted(file for file in self.output.glob("*.arrow") if _NAME.fullmatch(file.name))

    def _restore(self) -> None:
        """Load the last state, and find the files whose rows were written after it."""
        state = self._initial
        if (self.output / _STATE).exists():
            state = torch.load(self.output / _STATE, weights_only=True)
        self._join.load_state_dict(state["join"])
        self.num_written = state["num_written"]
        self._rows, self._calls, self._num_read = [], [], 0
        self._readers = [self._open(index, position) for index, position in enumerate(state["positions"])]
        files = self._files()
        self._unrepeated = deque(file for file in files if file.name >= _file_name(self.num_written))
        if not (self.output / _STATE).exists() and not files:
            # So that a later start with other options is noticed.
            self.save()
        _log.info("joining to %s, which has %s rows", self.output, f"{self.num_written:,}")

    def _open(self, index: int, position: Mapping[str, Any]) -> TableStream:
        """Open a stream at a position, which is empty for the first record.

        Raises:
            ValueError: the position is that of another stream.
        """
        source, join = self._sources[index], self._join
        names = {"partitions", "kinds"} if isinstance(source, Broker) else set(FilePosition._fields)
        if position and position.keys() != names:
            name = source.name if isinstance(source, Broker) else without_secrets(str(source))
            raise ValueError(
                f"{self.output} was joined from other {_STREAMS[index]} than {name}. Give those, or join to "
                "an empty folder."
            )
        if not isinstance(source, Broker):
            return FolderTables(source, self.faults, position=FilePosition(**position))
        assert isinstance(self.faults, RecordFaults)
        columns = self._features.columns() if self._features is not None and index == 0 else []
        return BrokerTables(
            source,
            [name for name in columns if name != join.label],
            {} if self._features is None else self._features.fitted_kinds(),
            key=join.key,
            time=join.time,
            faults=self.faults,
            set_aside=join.set_aside,
            state=position or None,
        )

    def _repeat(self, path: Path) -> bool:
        """Repeat the calls that led to a file, which must give as many rows. False: a broker is away."""
        with pa.ipc.open_file(pa.memory_map(str(path))) as file:
            calls = json.loads((file.schema.metadata or {}).get(_METADATA, "null"))
            num_rows = sum(file.get_batch(index).num_rows for index in range(file.num_record_batches))
        if calls is None or path.name != _file_name(self.num_written):
            raise DataError(
                f"{path} does not continue the {self.num_written:,} rows before it. Put removed files back, "
                "or join to an empty folder."
            )
        for index, num, argument in calls[len(self._calls) :]:
            if index is None:
                self._tick(argument)
                continue
            num_read, reader = self._read(index, argument), self._readers[index]
            if not num_read and reader.is_waiting:
                return False
            if num_read != num:
                raise DataError(
                    f"{reader.name} had {num:,} rows where it has {num_read:,} now, before "
                    f"{reader.state_dict()}. Put its records back, or join to an empty folder."
                )
        num_joined = sum(rows.num_rows for rows in self._rows)
        if num_joined != num_rows:
            raise DataError(
                f"{path} has {num_rows:,} rows, and the same records give {num_joined:,} now. Put the "
                "records of both streams back, or join to an empty folder."
            )
        self.num_written += num_rows
        self._rows, self._calls = [], []
        self._unrepeated.popleft()
        return True

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


def open_join(
    options: LabelOptions,
    impressions: str | Path,
    actions: str | Path,
    output: Path,
    *,
    time: str,
    time_unit: TimeUnit,
    label: str,
    on_error: OnError = "raise",
    set_aside: Path | None = None,
    features: Encoding | None = None,
    poll_seconds: float = 1.0,
) -> FolderJoin:
    """Create a join of impressions with later actions from options.

    Args:
        options: options, of which ``key`` and ``window_seconds`` must be given.
        impressions, actions, output, features, poll_seconds: as for `FolderJoin`.
        time, time_unit, label, on_error, set_aside: as for `LabelJoin`.

    Raises:
        ValueError: an option is not as described.
    """
    assert options.key is not None
    assert options.window_seconds is not None
    join = LabelJoin(
        key=options.key,
        time=time,
        label=label,
        window_seconds=options.window_seconds,
        allowed_lateness_seconds=options.allowed_lateness_seconds,
        negatives=options.negatives,
        time_unit=time_unit,
        idle_seconds=options.idle_seconds,
        max_rows=options.max_rows,
        on_full=options.on_full,
        on_error=on_error,
        set_aside=set_aside,
    )
    return FolderJoin(
        impressions,
        actions,
        output,
        join,
        on_error=on_error,
        features=features,
        clock_lag_seconds=options.clock_lag_seconds,
        poll_seconds=poll_seconds,
    )


def _file_name(num_rows_before: int) -> str:
    """Return the name of a file. Names are in the order of rows."""
    return f"{num_rows_before:016d}.arrow"
