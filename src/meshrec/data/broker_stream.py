"""Unbounded data: records of Redis streams and Kafka topics, read while a model trains on them."""

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from meshrec.comms.agreement import together
from meshrec.comms.collectives import gather_objects
from meshrec.comms.mesh import Axis
from meshrec.data.arrow import pa
from meshrec.data.batch import Batch
from meshrec.data.brokers import Broker, Records, Requests, check_partitions
from meshrec.data.encoding import Encoding, RowOrigin
from meshrec.data.faults import OnError, RecordFaults, append_json_lines
from meshrec.data.messages import DecodedRows, MessageDecoder, num_rows_of, row_content
from meshrec.data.open_broker import open_broker
from meshrec.data.order import LanePart
from meshrec.data.samples import Bools, Ints, PermutedSamples, Samples, concatenated, to_batch, void_samples
from meshrec.data.step_log import StepLog
from meshrec.data.step_planner import Runs, StepPlanner
from meshrec.data.streaming import Lane, background_thread
from meshrec.data.streams import Burst, ColumnTypes, Position, Stream

_log = logging.getLogger(__name__)

_NAME = "reading a stream"
"""Name of the exchanges between ranks."""
_ROUND_BYTES = 1 << 22
"""Approximate size of the records that all ranks read between two bursts."""
_DECODED_ROWS = 1 << 14
"""Rows that are decoded at once."""
_LIST_SECONDS = 30.0
"""Time between listings of the partitions, which may become more."""
_IDLE_SECONDS = 1.0
"""Time without a step after which a burst without steps is yielded."""


class _Round(NamedTuple):
    """Records that a rank has read since the last round. The last three values are those of rank 0."""

    records: dict[str, tuple[Records, list[int]]]
    """Records by partition, with the number of rows of each."""
    partitions: Sequence[str] = ()
    """Partitions that were listed in this round."""
    is_due: bool = False
    """Whether a burst is due, even without steps."""
    has_ended: bool = False
    """Whether reading has ended."""


class BrokerStream(Stream):
    """Records of Redis streams or Kafka topics, in batches for all ranks.

    A record is a JSON object, or an Arrow IPC stream with any number of rows. A Redis entry has one of them
    in its only field, ``json`` or ``arrow``, or it has a field per column. See [Note: values in messages]. If
    ``features`` do not read event times (`meshrec.data.features.TimedFeatures`), events have the time of the
    Redis ID or the timestamp of the Kafka record.

    Partitions are divided among the ranks, which share all records. Positions decide which records are read
    next, and nothing is written to the broker. See [Note: positions in partitions].

    Args:
        address: address of streams or topics; see `meshrec.data.redis_broker.RedisBroker` and
            `meshrec.data.kafka_broker.KafkaBroker`.
        features: fitted features that encode the rows.
        on_error: "raise" for damaged records, or "skip" to count and omit them.
        set_aside: folder that receives omitted rows as JSON lines, a file per rank. After a resume, rows may
            be listed again. None: they are only counted.
        step_log: file for the steps since the last checkpoint, which rank 0 reads and writes. With it, a run
            that was killed repeats these steps with the same records. Only one partition needs none.
        late_seconds: an event is late if the broker got it more than this time after the event.
        poll_seconds: seconds between two requests while no records arrive.

    Attributes:
        faults: counts of omitted rows on this rank, by reason.
        late: counts of late rows on this rank, by partition. They are not omitted.

    Raises:
        ValueError: the address or a number of seconds is wrong.
    """

    faults: RecordFaults

    def __init__(
        self,
        address: str,
        features: Encoding,
        *,
        on_error: OnError = "raise",
        set_aside: Path | None = None,
        step_log: Path | None = None,
        late_seconds: float = 3600.0,
        poll_seconds: float = 0.05,
    ) -> None:
        for name, seconds in (("poll_seconds", poll_seconds), ("late_seconds", late_seconds)):
            if not seconds > 0:
                raise ValueError(f"{name} is {seconds}; it must be above 0. Take 1, for example.")
        self.faults = RecordFaults(on_error)
        self.column_types = ColumnTypes(features.columns())
        self.late = Counter[str]()
        self._broker = open_broker(address)
        self._features, self._set_aside = features, set_aside
        self._late_seconds, self._poll_seconds = late_seconds, poll_seconds
        self._step_log = None if step_log is None else StepLog(step_log)

    def on_checkpoint(self, position: Position) -> None:
        """Remove the steps up to a position from the step log.

        Args:
            position: position of the oldest checkpoint from which the run may continue, which is on disk.
        """
        if self._step_log is not None:
            self._step_log.prune(position)

    @override
    def bursts(
        self,
        batch_size: int,
        *,
        position: Position | None = None,
        axis: Axis = Axis(),  # noqa: B008 - immutable
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Burst]:
        """Yield the steps for which all records have arrived; see `Stream.bursts`.

        Without a ``position``, the first step has the first records that the broker has.

        Raises:
            DataError: a record that this rank reads is damaged; records after ``position`` are gone; or the
                broker refuses access.
            ValueError: ``batch_size`` is below 1, or ``position`` is that of another stream.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}. Take 1024, for example.")
        position = {} if position is None else position
        if not all(isinstance(values, list) and len(values) == 3 for values in position.values()):
            raise ValueError(
                f"{position} is not a position in {self._broker.name}. Take that of its checkpoint."
            )
        planner = StepPlanner(position, batch_size * axis.size, self._logged(position, batch_size, axis))
        aside = None
        if self._set_aside is not None:
            self._set_aside.mkdir(parents=True, exist_ok=True)
            aside = self._set_aside / f"rank{axis.rank}.jsonl"
        rows = _RankRows(
            self._features,
            self.faults,
            self.column_types,
            name=self._broker.name,
            aside=aside,
            batch_size=batch_size,
            axis=axis,
            late=self.late,
            late_seconds=self._late_seconds,
        )
        jobs: deque[Runs] = deque()
        # Also if the consumer stops early, the thread ends.
        with (
            contextlib.closing(self._broker),
            contextlib.closing(self._windows(rows, jobs)) as windows,
            background_thread() as thread,
            background_thread() as reader_thread,
        ):
            reader = _Reader(self._broker, reader_thread, axis, stop)
            yield from self._bursts(planner, reader, Lane(windows, 0, thread), jobs, batch_size)

    def _logged(self, position: Position, batch_size: int, axis: Axis) -> list[Position]:
        """Return the positions after logged steps that follow a position, on all ranks. Collective."""
        logged: list[Position] = []
        with together(axis, _NAME):
            if self._step_log is not None and axis.rank == 0:
                logged = self._step_log.resume(position, batch_size * axis.size)
        shared: list[Position] = gather_objects(logged, axis, _NAME)[0]
        return shared

    def _bursts(
        self, planner: StepPlanner, reader: "_Reader", lane: Lane, jobs: deque[Runs], batch_size: int
    ) -> Iterator[Burst]:
        """Yield bursts until ``stop`` ends them; see `bursts`."""
        num_read = 0
        while not (head := reader.next_round(planner)).has_ended:
            num_repeated = planner.num_repeated
            positions, runs = planner.plan()
            if self._step_log is not None and positions:
                # Before the steps are trained, so that they can be repeated.
                with together(reader.axis, _NAME):
                    if reader.axis.rank == 0:
                        self._step_log.append(positions[num_repeated - planner.num_repeated :])
            reader.start_next(planner, len(positions), is_due=head.is_due)
            if positions:
                jobs.append(runs)
                num = len(positions) * batch_size
                yield Burst(positions, self._batches(lane, range(num_read, num_read + num, batch_size)))
                num_read += num
            elif head.is_due:
                yield Burst([], iter(()))
            elif reader.is_quiet:
                time.sleep(self._poll_seconds)

    def _batches(self, lane: Lane, starts: range) -> Iterator[Batch]:
        """Yield the batches that start at some of this rank's samples, with ``starts.step`` samples each."""
        for start in starts:
            ranges = lane.read(LanePart(0, start, start + starts.step))
            yield to_batch(self._features.keys, self._features.shape, ranges)

    def _windows(self, rows: "_RankRows", jobs: deque[Runs]) -> Generator[PermutedSamples, None, None]:
        """Yield this rank's samples without end; an empty window if there is nothing to decode yet.

        Args:
            rows: decoder.
            jobs: rows of bursts, which are removed. More may be added at any time.
        """
        void = void_samples(0, self._features.shape)
        empty = PermutedSamples(void._replace(times=np.zeros(0, np.int64)))
        while True:
            if not jobs:
                yield empty
                continue
            for samples in rows.samples(jobs.popleft()):
                yield PermutedSamples(samples)


class _Reader:
    """Reader of this rank's partitions, which waits while the broker is away.

    Args:
        broker: the broker.
        thread: thread that reads while the steps before are trained.
        axis: the ranks.
        stop: as for `Stream.bursts`.
    """

    def __init__(
        self, broker: Broker, thread: ThreadPoolExecutor, axis: Axis, stop: Callable[[], bool]
    ) -> None:
        self._broker, self._thread, self._stop = broker, thread, stop
        self._requests = Requests(broker.name)
        self.axis = axis
        # The next round, if it is read in the background.
        self._next: Future[_Round] | None = None
        # This rank's partitions, and all partitions whose readers are known.
        self._local, self._known = list[str](), list[str]()
        # Times of time.monotonic: next listing, and the last burst.
        self._next_listing, self._last_burst = 0.0, time.monotonic()
        # Whether the last round had no steps.
        self._has_no_steps = False
        self.is_quiet = False
        """Whether the last round had no records and no new partitions."""

    def next_round(self, planner: StepPlanner) -> _Round:
        """Read records on all ranks, and add them to the planner. Return rank 0's round. Collective."""
        local = _Round({}, has_ended=True)
        with together(self.axis, _NAME):
            is_due = time.monotonic() - self._last_burst > _IDLE_SECONDS
            waits = self._has_no_steps and (self.is_quiet or is_due)
            # Here, because ``stop`` may not be called by another thread.
            if not (waits and self.axis.rank == 0 and self._stop()):
                local = self._read(planner) if self._next is None else self._next.result()
                local = local._replace(is_due=is_due)
            self._next = None
        rounds: list[_Round] = gather_objects(local, self.axis, _NAME)
        new = sorted(set(rounds[0].partitions) - set(self._known))
        if new:
            with together(self.axis, _NAME):
                self._add_partitions(planner, new)
        # New partitions are read in the next round.
        self.is_quiet = not new and not any(one.records for one in rounds)
        for one in rounds:
            for name, (records, num_rows) in one.records.items():
                planner.add(name, records, num_rows)
        return rounds[0]

    def _read(self, planner: StepPlanner) -> _Round:
        """Read some records; on rank 0, also list the partitions."""
        partitions: Sequence[str] = ()
        if self.axis.rank == 0 and time.monotonic() >= self._next_listing:
            partitions = self._requests.attempt(self._broker.partitions, ())
            if partitions:
                self._next_listing = time.monotonic() + _LIST_SECONDS
                check_partitions(self._broker, planner.names, partitions)
        requested = [name for name in self._local if planner.needs(name)]
        records: dict[str, Records] = {}
        if requested:
            limit = _ROUND_BYTES * len(requested) // len(self._known)
            records = self._requests.attempt(lambda: self._broker.read(requested, limit), records)
        counted = {
            name: (some, [num_rows_of(payload) for payload in some.payloads])
            for name, some in records.items()
        }
        return _Round(counted, partitions)

    def _add_partitions(self, planner: StepPlanner, names: Sequence[str]) -> None:
        """Divide partitions that are new to the readers among the ranks, and start to read them."""
        for name in names:
            if name not in planner.names:
                planner.add_partition(name, self._broker.start)
            if len(self._known) % self.axis.size == self.axis.rank:
                self._local.append(name)
                self._broker.seek({name: planner.last(name)})
            self._known.append(name)

    def start_next(self, planner: StepPlanner, num_steps: int, *, is_due: bool) -> None:
        """Start to read the next round in the background if there are steps to train meanwhile.

        Args:
            planner: the planner.
            num_steps: number of steps that the last round gave.
            is_due: whether a burst was due in the last round.
        """
        self._has_no_steps = num_steps == 0
        if num_steps or is_due:
            self._last_burst = time.monotonic()
        if num_steps:
            self._next = self._thread.submit(self._read, planner)


class _RecordNames:
    """Names of the records of some rows, which are formatted only for messages.

    Args:
        runs: the records.
        of_run: run of each row, int64 [n].
    """

    def __init__(self, runs: Runs, of_run: Ints) -> None:
        self._runs, self._of_run = runs, of_run

    def __getitem__(self, number: int, /) -> str:
        return self._runs.name(int(self._of_run[number]))

    def take(self, indices: Ints) -> "_RecordNames":
        """Return the names of the rows at some indices."""
        return _RecordNames(self._runs, self._of_run[indices])


class _RankRows:
    """Decoder of this rank's rows.

    Args:
        features: fitted features.
        faults: raises for damaged rows, or counts them.
        types: receives the types of decoded columns.
        name: name of the stream, for messages.
        aside: file that receives omitted rows; None: they are only counted.
        batch_size: samples per batch and rank.
        axis: the ranks.
        late: counts of late rows by partition, to which those of this rank are added.
        late_seconds: as for `BrokerStream`.
    """

    def __init__(
        self,
        features: Encoding,
        faults: RecordFaults,
        types: ColumnTypes,
        *,
        name: str,
        aside: Path | None,
        batch_size: int,
        axis: Axis,
        late: Counter[str],
        late_seconds: float,
    ) -> None:
        self._features, self._faults, self._types, self._aside = features, faults, types, aside
        self._origin = RowOrigin(name, 0)
        self._batch_size, self._axis = batch_size, axis
        self._late, self._late_microseconds = late, late_seconds * 1e6
        self._decoder = MessageDecoder(features)

    def samples(self, runs: Runs) -> Iterator[Samples]:
        """Yield this rank's samples of whole steps, in pieces."""
        ends = np.cumsum(runs.num_rows)
        size, num_ranks = self._batch_size, self._axis.size
        local = np.arange(int(ends[-1]) // num_ranks, dtype=np.int64)
        rows = local // size * (size * num_ranks) + self._axis.rank * size + local % size
        # Row numbers count from the first run. Those of a record count from its own first row.
        shifts = np.array(runs.first_rows) - ends + np.array(runs.num_rows)
        for first in range(0, len(rows), _DECODED_ROWS):
            piece = rows[first : first + _DECODED_ROWS]
            of_run = np.searchsorted(ends, piece, side="right")
            yield from self._decoded(runs, of_run, piece + shifts[of_run])

    def _decoded(self, runs: Runs, of_run: Ints, rows: Ints) -> Iterator[Samples]:
        """Yield the samples of some rows, with the run and the row in the record of each, int64 [n]."""
        indices, inverse = np.unique(of_run, return_inverse=True)
        payloads = [runs.payloads[index] for index in indices.tolist()]
        num_rows = np.array(runs.record_rows)[indices]
        # Row among all rows of these records.
        flat = (np.cumsum(num_rows) - num_rows)[inverse] + rows
        first = end = 0
        for decoded in self._decoder.decode(payloads):
            if len(decoded.rows):
                self._types.add(decoded.table.schema, self._decoder.untyped(decoded.table))
            start, first = first, first + decoded.num_rows
            first_flat, end = end, int(np.searchsorted(flat, first))
            of_piece = of_run[first_flat:end]
            samples = self._encoded(decoded, flat[first_flat:end] - start, _RecordNames(runs, of_piece))
            arrivals = np.array(runs.times)[of_piece]
            if samples.times is None:
                samples = samples._replace(times=arrivals)
            elif (is_late := arrivals - samples.times > self._late_microseconds).any():
                valid = is_late if samples.is_valid is None else is_late & samples.is_valid
                self._late.update(runs.partitions[run] for run in of_piece[valid].tolist())
            if self._aside is not None and samples.is_valid is not None:
                for index in np.flatnonzero(~samples.is_valid) + first_flat:
                    self._keep(runs, int(of_run[index]), int(rows[index]))
            yield samples

    def _encoded(self, decoded: DecodedRows, rows: Ints, names: "_RecordNames") -> Samples:
        """Encode some of the decoded rows. Damaged rows are invalid samples.

        Args:
            decoded: the rows.
            rows: row numbers, ascending, int64 [n].
            names: name of the record of each row.
        """
        in_table = np.full(decoded.num_rows, -1, np.int64)
        in_table[decoded.rows] = np.arange(len(decoded.rows))
        indices = in_table[rows]
        good: Bools = indices >= 0
        for index in np.flatnonzero(~good).tolist():
            problem = decoded.problems[int(rows[index])]
            self._faults.report_record(problem.partition(":")[0], f"{names[index]}: {problem}", 1)
        pieces = []
        if good.any():
            table, selected = decoded.table, np.flatnonzero(good)
            if len(selected) < table.num_rows:
                table = table.take(pa.array(indices[selected]))
            self._faults.names = names.take(selected)
            pieces.append(self._features.encode(table, self._origin, self._faults))
        if good.all():
            return pieces[0]
        order = np.where(good, np.cumsum(good) - 1, good.sum())
        void = void_samples(1, self._features.shape)
        if pieces and pieces[0].times is not None:
            void = void._replace(times=np.zeros(1, np.int64))
        return concatenated([*pieces, void]).take(order)

    def _keep(self, runs: Runs, number: int, row: int) -> None:
        """Append an omitted row to the file for them."""
        assert self._aside is not None
        item = {"partition": runs.partitions[number], "id": runs.ids[number], "row": row}
        item["values"] = row_content(runs.payloads[number], row)
        append_json_lines(self._aside, [item])
