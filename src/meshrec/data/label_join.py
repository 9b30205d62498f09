"""Labels that come later: impressions and actions, two streams that are joined on a key within a window.

[Note: event time in a label join]
The records of each stream are numbered as they arrive. A record is late if its time is before the largest
earlier time of its stream, minus the allowed lateness. The watermark of a stream is this bound after its last
record, and the watermark of the join is the smaller one of both: no record before it can come any more. All
records before the watermark are processed in the order of their times, impressions before actions at equal
times, and then by number. Every row has a decision time:

- ``at_window_end``: a positive is decided at the time of its action, a negative at the end of its window;
- ``at_once``: a negative is decided at the time of its impression, a positive at the time of its action.

Rows are returned once the watermark is above their decision times, in the order of (decision time, label,
number of the impression). All of this follows from the order of records within each stream. The rows and
their order do therefore not depend on how the streams were cut into calls, nor on how far one was read ahead
of the other. There are three exceptions, which depend on the sequence of calls: `LabelJoin.add` with a
``watermark``, ``idle_seconds`` while one stream is further ahead, and rows decided early because of
``max_rows``.

For a checkpoint between two training steps, save the state of the join, the positions of both inputs after
the last call, and the returned rows that are not trained yet.
"""

import logging
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from meshrec.data.arrow import pa, records_of
from meshrec.data.event_columns import (
    MAX_TIME,
    TimeUnit,
    key_kind,
    key_values,
    nanoseconds,
    table_bytes,
    table_of,
    value_type,
)
from meshrec.data.faults import (
    REMEDY,
    DataError,
    OnError,
    append_json_lines,
    missing_column,
    rows_text,
)
from meshrec.data.held_rows import HeldRows, PendingImpressions, Timed, TimeQueue
from meshrec.data.samples import Bools, Ints

_log = logging.getLogger(__name__)

# Durations in nanoseconds are limited, so that their sums with times are int64 values.
_MAX_DURATION = 2**61
_MIN_TIME = -MAX_TIME
# Watermark of two streams that have ended, and of two that have not begun.
_END, _START = 2**63 - 1, -(2**63)

_REASONS = (
    "invalid_impressions",
    "invalid_actions",
    "late_impressions",
    "late_actions",
    "duplicate_impressions",
    "repeated_actions",
    "unmatched_actions",
    "early_decisions",
)


class _Arrival(NamedTuple):
    """Checked records of one call."""

    table: Any
    times: Ints
    """Nanoseconds since 1970, int64 [n]."""
    is_valid: Bools
    """Whether key and time are present, and the time is in range; bool [n]."""


class _Stream:
    """Records of one stream that wait for the watermark or, for impressions, for the end of their window."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows = HeldRows()
        # Records at or after the watermark.
        self.waiting = TimeQueue()
        # Records that have arrived, and the largest time of the valid ones.
        self.count, self.max_time = 0, _MIN_TIME
        # Schema of all tables; None before the first.
        self.schema: Any = None

    def state(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        held, waiting = self.rows.held(), self.waiting.rows()
        table = self.schema and self.schema.empty_table()
        indices = np.zeros(0, dtype=np.int64)
        if held is not None:
            indices, table = held
        return {
            "count": self.count,
            "max_time": self.max_time,
            "waiting_times": _tensor(waiting.times),
            "waiting_indices": _tensor(waiting.indices),
            "row_indices": _tensor(indices),
            "rows": None if table is None else table_bytes(table),
        }

    @staticmethod
    def restored(name: str, state: Mapping[str, Any]) -> "_Stream":
        """Create a stream from the output of `state`."""
        stream = _Stream(name)
        stream.count, stream.max_time = state["count"], state["max_time"]
        # Equal times are in the order of arrival, and so is a run of the queue.
        stream.waiting.append(state["waiting_times"].numpy(), state["waiting_indices"].numpy())
        if state["rows"] is not None:
            table = table_of(state["rows"])
            stream.schema = table.schema
            stream.rows.append(state["row_indices"].numpy(), table)
        return stream


class _Matches(NamedTuple):
    """Result of processing records before the watermark, in the order of their times."""

    accepted: Timed
    """Impressions that are not duplicates."""
    duplicates: Ints
    """Numbers of the other impressions."""
    positives: Timed
    """Impressions that got their first action, and the times of these actions."""
    repeated: Ints
    """Numbers of the actions on an impression that had one."""
    unmatched: Ints
    """Numbers of the actions without an impression."""


class _Decided(NamedTuple):
    """Decided rows."""

    times: Ints
    """Decision times, int64 [n]."""
    labels: Ints
    """Int64 [n]."""
    indices: Ints
    """Indices of the impressions in the order of arrival, int64 [n]."""

    @staticmethod
    def of(label: int, rows: Timed) -> "_Decided":
        """Create rows with the same label."""
        return _Decided(rows.times, np.full(len(rows.times), label, dtype=np.int64), rows.indices)

    @staticmethod
    def sorted(parts: "list[_Decided]") -> "_Decided":
        """Concatenate rows, and sort them by decision time, label and number."""
        times, labels, indices = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.lexsort((indices, labels, times))
        return _Decided(times[order], labels[order], indices[order])


class LabelJoin:
    """Join of impressions with later actions, which returns each labelled row once it is decided.

    An impression at time t is positive if there is an action with the same key at a time in
    [t, t + window]. Event times alone decide, with a watermark; see [Note: event time in a label join].

    Records that lead to no row are counted in ``counts``. An impression is a duplicate while the window of an
    earlier one with the same key has not ended. An action is repeated if its impression has an action
    already, and unmatched without an impression. Late and invalid records (key or time is null, or the
    time is before 1751 or after 2188) are left out.

    Args:
        key: column of both streams, with integers, strings or bytes.
        time: column of both streams, with timestamps, or integers in ``time_unit`` since 1970.
        label: name of the label column, int64, which is added to impressions.
        window_seconds: length of the window. Both ends belong to it.
        allowed_lateness_seconds: how far a record may be behind the largest time of its stream.
        negatives: "at_window_end": one row per impression. "at_once": each impression is a negative row, and
            a second row with label 1 follows if there is an action. Train on these rows with
            ``BinaryCrossEntropy(fake_negative_weighting=True)``.
        time_unit: unit of integers in the time column.
        idle_seconds: event time by which one stream may hold back the other. A stream that is further behind
            counts as idle, and its next records may be late. None: a stream waits for the other without
            limit.
        max_rows: number of records in memory above which ``on_full`` applies. An impression takes its Arrow
            bytes, and about 200 bytes for the index of keys.
        on_full: "raise", or "decide" to decide about the oldest records early and count them.
        on_error: "raise" for invalid records, or "skip" to count and omit them.
        set_aside: file that receives records without a row as JSON lines, with stream, number and reason.
            After a resume, records may be listed again. None: they are only counted.

    Attributes:
        key: column by which records are joined.
        time: column with the time of records.
        label: name of the label.
        set_aside: file that receives records without a row.
        counts: number of records by reason, such as "late_actions" and "unmatched_actions".

    Raises:
        ValueError: an argument is not as described.

    Example::

        import pyarrow as pa
        from meshrec.data import LabelJoin

        join = LabelJoin(key="request", time="ts", label="clicked", window_seconds=60)
        shown = pa.table({"request": ["a", "b"], "ts": [0, 5], "item": [7, 8]})
        rows = join.add(shown, pa.table({"request": ["b"], "ts": [30]}))
        assert rows.num_rows == 0  # the impressions may still have actions
        rows = join.add(shown.slice(0, 0), pa.table({"request": ["x"], "ts": [100]}))
        print(join.finish().to_pylist())  # b is positive, a is negative
    """

    def __init__(
        self,
        *,
        key: str,
        time: str,
        label: str,
        window_seconds: float,
        allowed_lateness_seconds: float = 0.0,
        negatives: Literal["at_window_end", "at_once"] = "at_window_end",
        time_unit: TimeUnit = "s",
        idle_seconds: float | None = None,
        max_rows: int = 10_000_000,
        on_full: Literal["raise", "decide"] = "raise",
        on_error: OnError = "raise",
        set_aside: Path | None = None,
    ) -> None:
        _check_choice("negatives", negatives, ("at_window_end", "at_once"))
        _check_choice("time_unit", time_unit, get_args(TimeUnit))
        _check_choice("on_full", on_full, ("raise", "decide"))
        _check_choice("on_error", on_error, ("raise", "skip"))
        if len({key, time, label}) < 3:
            raise ValueError(f"key, time and label are {[key, time, label]}; name three different columns.")
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}; it must be at least 1. Take 10_000_000, for example.")
        self.key, self.time, self.label = key, time, label
        self._window = _duration("window_seconds", window_seconds)
        self._lateness = _duration("allowed_lateness_seconds", allowed_lateness_seconds)
        self._idle = None if idle_seconds is None else _duration("idle_seconds", idle_seconds)
        self._at_once, self._time_unit = negatives == "at_once", time_unit
        self._max_rows, self._decides_early = max_rows, on_full == "decide"
        self._skips, self.set_aside = on_error == "skip", set_aside
        self._impressions, self._actions = _Stream("impressions"), _Stream("actions")
        self._pending = PendingImpressions()
        # Impressions that need no more rows, until the rows of the call are returned.
        self._finished: list[Ints] = []
        # All records before it have been processed.
        self._watermark = _START
        self.counts = dict.fromkeys(_REASONS, 0)

    @property
    def watermark(self) -> int | None:
        """Nanoseconds since 1970: all rows decided before this time were returned. None: no records yet."""
        return None if self._watermark <= _MIN_TIME else self._watermark

    @property
    def num_rows(self) -> int:
        """Number of records in memory, including impressions of which only the key is kept."""
        return len(self._pending) + len(self._impressions.waiting) + len(self._actions.waiting)

    @property
    def num_bytes(self) -> int:
        """Bytes of the records in memory, without the index of keys."""
        return self._impressions.rows.num_bytes + self._actions.rows.num_bytes

    @property
    def stream_behind(self) -> str:
        """Name of the stream whose largest time is smaller. To save memory, read it next."""
        behind = min((self._impressions, self._actions), key=lambda stream: stream.max_time)
        return behind.name

    def add(self, impressions: Any = None, actions: Any = None, *, watermark: int | None = None) -> Any:
        """Take the next records of both streams, and return the rows that are decided now.

        Args:
            impressions: Arrow table with the same columns in every call; None: no records.
            actions: Arrow table with key and time, and any other columns; None: no records.
            watermark: nanoseconds since 1970: no record before this time comes in a later call, as a clock
                may tell while both streams are idle. None: only event times tell.

        Returns:
            Arrow table with the columns of impressions, and the label. It has no columns before the first
            impressions.

        Raises:
            DataError: a column is missing or has another type, a record is invalid, or more than ``max_rows``
                records are in memory. No record was taken.
            OSError: ``set_aside`` cannot be written. Continue from an earlier state.
        """
        streams = (self._impressions, impressions), (self._actions, actions)
        given = [(stream, table) for stream, table in streams if table is not None]
        if given and self.num_rows > self._max_rows and not self._decides_early:
            raise DataError(
                f"{self.num_rows:,} records wait for their labels, more than max_rows={self._max_rows:,}. "
                "Raise max_rows, shorten the window, set idle_seconds if one stream is behind, or take "
                "on_full='decide'."
            )
        arrivals = [(stream, self._checked(stream, table)) for stream, table in given]
        self._check_keys(arrivals)
        for stream, arrival in arrivals:
            self._receive(stream, arrival)
        decided = _Decided.sorted(self._advance(self._next_watermark(watermark)))
        early = self._make_room() if self._decides_early else []
        if early:
            parts = zip(decided, _Decided.sorted(early), strict=True)
            decided = _Decided(*(np.concatenate(part) for part in parts))
        return self._labelled(decided)

    def finish(self) -> Any:
        """Return all remaining rows, as both streams have ended. Later records are late."""
        return self.add(watermark=_END)

    def state_dict(self) -> dict[str, Any]:
        """Return the exact state as plain values and tensors, which a checkpoint may have."""
        pending = self._pending
        keys = None
        if len(pending):
            field = pa.field(self.key, value_type(self._impressions.schema.field(self.key).type))
            keys = pa.table([pa.array(pending.keys[pending.num_ended :], field.type)], pa.schema([field]))
        return {
            "options": self._options(),
            "watermark": self._watermark,
            "counts": dict(self.counts),
            "impressions": self._impressions.state(),
            "actions": self._actions.state(),
            "pending": {
                "ends": _tensor(np.array(pending.ends[pending.num_ended :], dtype=np.int64)),
                "indices": _tensor(np.array(pending.indices[pending.num_ended :], dtype=np.int64)),
                "has_action": _tensor(np.array(pending.has_action[pending.num_ended :], dtype=np.uint8)),
                "keys": None if keys is None else table_bytes(keys),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of a join with the same options. Limits and ``on_error`` may differ.

        Args:
            state: output of `state_dict`.

        Raises:
            ValueError: the state is that of a join with other options.
        """
        differences = [
            f"{name} is {value!r}, and {state['options'].get(name)!r} in the state"
            for name, value in self._options().items()
            if value != state["options"].get(name)
        ]
        if differences:
            raise ValueError(
                f"the state comes from a label join with other options: {'; '.join(differences)}. Create the "
                "join with the options of the state, or start without a state."
            )
        pending, saved = PendingImpressions(), state["pending"]
        pending.ends = array("q", saved["ends"].tolist())
        pending.indices = array("q", saved["indices"].tolist())
        pending.has_action = bytearray(saved["has_action"].tolist())
        if saved["keys"] is not None:
            pending.keys = key_values(table_of(saved["keys"]), self.key)
        pending.slot_of = {key: slot for slot, key in enumerate(pending.keys)}
        self._impressions = _Stream.restored("impressions", state["impressions"])
        self._actions = _Stream.restored("actions", state["actions"])
        self._pending, self._watermark, self.counts = pending, state["watermark"], dict(state["counts"])

    def _options(self) -> dict[str, Any]:
        """Return the options that determine the rows."""
        return {
            "key": self.key,
            "time": self.time,
            "label": self.label,
            "window": self._window,
            "allowed_lateness": self._lateness,
            "at_once": self._at_once,
            "idle": self._idle,
            "time_unit": self._time_unit,
            # Without it, only key and time of actions are held.
            "sets_aside": self.set_aside is not None,
        }

    def _checked(self, stream: _Stream, table: Any) -> _Arrival:
        """Check a table before any state changes, and read the times."""
        for column in (self.key, self.time):
            if column not in table.column_names:
                raise missing_column(stream.name, column, table.column_names)
        if stream is self._impressions and self.label in table.column_names:
            raise DataError(f"impressions have a column {self.label!r} already. Give the label another name.")
        if stream is self._actions and self.set_aside is None:
            table = table.select([self.key, self.time])
        table = table.replace_schema_metadata(None)
        self._check_types(stream, table.schema)
        times, is_valid = nanoseconds(table[self.time], self._time_unit)
        is_valid &= table[self.key].is_valid().to_numpy()
        if not self._skips and not is_valid.all():
            row = int(is_valid.argmin())
            record = records_of(table.select([self.key, self.time]).slice(row, 1))[0]
            raise DataError(
                f"{stream.name}, record {stream.count + row:,}: {record}; key and time must be present, and "
                f"the time from 1751 to 2188{REMEDY}"
            )
        return _Arrival(table, times, is_valid)

    def _check_types(self, stream: _Stream, schema: Any) -> None:
        """Raise DataError if columns have other types than before, or types that cannot be joined."""
        if stream.schema is not None and schema != stream.schema:
            raise DataError(
                f"the columns of {stream.name} have changed from {_shown(stream.schema)} to "
                f"{_shown(schema)}. Write the same columns in every file, or start a new join."
            )
        key, time = (schema.field(name).type for name in (self.key, self.time))
        if key_kind(key) is None:
            raise DataError(f"{stream.name}: the key {self.key!r} is {key}. Take integers, strings or bytes.")
        if not (pa.types.is_timestamp(time) or pa.types.is_integer(time)):
            raise DataError(f"{stream.name}: the time {self.time!r} is {time}. Take timestamps or integers.")

    def _check_keys(self, arrivals: list[tuple[_Stream, _Arrival]]) -> None:
        """Raise DataError if the keys of both streams are of different kinds, which are never equal."""
        schemas = {s.name: s.schema for s in (self._impressions, self._actions) if s.schema is not None}
        schemas |= {stream.name: arrival.table.schema for stream, arrival in arrivals}
        types = {name: schema.field(self.key).type for name, schema in schemas.items()}
        if len({key_kind(kind) for kind in types.values()}) > 1:
            text = " and ".join(f"{kind} in {name}" for name, kind in types.items())
            raise DataError(f"the key {self.key!r} is {text}. Write the same kind of key to both.")

    def _receive(self, stream: _Stream, arrival: _Arrival) -> None:
        """Number the records of a call, and hold those that are neither invalid nor late."""
        table, times, is_valid = arrival
        stream.schema = table.schema
        indices = np.arange(stream.count, stream.count + len(times), dtype=np.int64)
        stream.count += len(times)
        # Largest time up to and including a record, after that of earlier calls.
        max_times = np.concatenate([[stream.max_time], np.where(is_valid, times, _MIN_TIME)])
        max_times = np.maximum.accumulate(max_times)
        stream.max_time = int(max_times[-1])
        is_late = times < np.maximum(max_times[:-1] - self._lateness, self._watermark)
        for reason, is_left_out in (("invalid", ~is_valid), ("late", is_valid & is_late)):
            index = np.flatnonzero(is_left_out)
            self._count_left_out(reason, stream, indices[index], table, index)
        accepted = np.flatnonzero(is_valid & ~is_late)
        # A copy, because a slice would hold the memory of the whole file.
        stream.rows.append(indices[accepted], table.take(pa.array(accepted)))
        stream.waiting.append(times[accepted], indices[accepted])

    def _next_watermark(self, promised: int | None) -> int:
        """Return the watermark after the records of a call."""
        behind, ahead = sorted(s.max_time - self._lateness for s in (self._impressions, self._actions))
        watermark = behind if self._idle is None else max(behind, ahead - self._idle)
        return max(watermark, self._watermark, _START if promised is None else min(promised, _END))

    def _advance(self, watermark: int) -> list[_Decided]:
        """Process the records before a watermark, and return the decided rows."""
        self._watermark = watermark
        impressions = self._impressions.waiting.take_before(watermark)
        actions = self._actions.waiting.take_before(watermark)
        matches = self._match(impressions, actions)
        for reason, stream, indices in (
            ("duplicate", self._impressions, matches.duplicates),
            ("repeated", self._actions, matches.repeated),
            ("unmatched", self._actions, matches.unmatched),
        ):
            self._count_left_out(reason, stream, indices, stream.rows, indices)
        self._actions.rows.release(actions.indices)
        self._impressions.rows.release(matches.duplicates)
        self._finished.append(matches.positives.indices)
        decided = [_Decided.of(1, matches.positives)]
        if self._at_once:
            decided.append(_Decided.of(0, matches.accepted))
        return [*decided, self._end_windows(self._pending.num_ending_before(watermark))]

    def _match(self, impressions: Timed, actions: Timed) -> _Matches:
        """Process records in the order of their times, and impressions before actions at equal times."""
        times = np.concatenate([impressions.times, actions.times])
        order = np.argsort(times, kind="stable")
        times = times[order]
        # The number of an impression, or -1 - number of an action.
        indices = np.concatenate([impressions.indices, ~actions.indices])[order]
        keys = self._keys(self._impressions, impressions) + self._keys(self._actions, actions)
        keys = [keys[index] for index in order.tolist()]
        pending, window, first = self._pending, self._window, self._pending.first
        slot_of, ends, has_action = pending.slot_of, pending.ends, pending.has_action
        has_action.extend(bytes(len(impressions.times)))
        # Indices of records, by what becomes of them.
        accepted, duplicates, positives, positive_slots, repeated, unmatched = ([] for _ in range(6))
        rows = zip(keys, times.tolist(), (indices >= 0).tolist(), strict=True)
        for index, (key, time, is_impression) in enumerate(rows):
            slot = slot_of.get(key)
            is_pending = slot is not None and ends[slot - first] >= time
            if is_impression:
                if is_pending:
                    duplicates.append(index)
                else:
                    slot_of[key] = first + len(ends)
                    ends.append(time + window)
                    accepted.append(index)
            elif slot is None or not is_pending:
                unmatched.append(index)
            elif has_action[slot - first]:
                repeated.append(index)
            else:
                has_action[slot - first] = 1
                positives.append(index)
                positive_slots.append(slot - first)
        del has_action[len(ends) :]
        pending.indices.extend(indices[accepted].tolist())
        pending.keys.extend([keys[index] for index in accepted])
        positive_indices = np.array([pending.indices[slot] for slot in positive_slots], dtype=np.int64)
        return _Matches(
            Timed(times[accepted], indices[accepted]),
            indices[duplicates],
            Timed(times[positives], positive_indices),
            ~indices[repeated],
            ~indices[unmatched],
        )

    def _keys(self, stream: _Stream, records: Timed) -> list[Any]:
        """Return the keys of held records as Python values."""
        if len(records.indices) == 0:
            return []
        return key_values(stream.rows.take(records.indices, [self.key]), self.key)

    def _end_windows(self, num: int) -> _Decided:
        """End the windows of the oldest ``num`` impressions, and return their negatives, if any are due."""
        ends, indices, has_action = self._pending.remove(num)
        self._finished.append(indices[~has_action])
        is_due = ~has_action & (not self._at_once)
        return _Decided.of(0, Timed(ends[is_due], indices[is_due]))

    def _make_room(self) -> list[_Decided]:
        """Decide about the oldest records until at most ``max_rows`` are in memory."""
        decided: list[_Decided] = []
        while (num := self.num_rows - self._max_rows) > 0:
            if len(self._pending):
                num = min(num, len(self._pending))
                decided.append(self._end_windows(num))
                self._count("early_decisions", num)
            else:
                # All records are at or after the watermark, which has to rise above the oldest ones.
                times = [s.waiting.rows().times for s in (self._impressions, self._actions)]
                oldest = np.partition(np.concatenate(times), num - 1)[num - 1]
                decided += self._advance(int(oldest) + 1)
        return decided

    def _labelled(self, decided: _Decided) -> Any:
        """Return decided rows with their labels, and release the impressions that are finished."""
        finished, self._finished = self._finished, []
        rows, schema = self._impressions.rows, self._impressions.schema
        if schema is None:
            return pa.table({})
        table = rows.take(decided.indices) if len(decided.indices) else schema.empty_table()
        rows.release(np.concatenate(finished))
        return table.append_column(self.label, pa.array(decided.labels))

    def _count_left_out(
        self, reason: str, stream: _Stream, indices: Ints, rows: "HeldRows | pa.Table", index: Ints
    ) -> None:
        """Count records that lead to no row, and set them aside: those of ``rows.take(index)``."""
        if len(indices) == 0:
            return
        self._count(f"{reason}_{stream.name}", len(indices))
        if self.set_aside is not None:
            table = rows.take(index) if isinstance(rows, HeldRows) else rows.take(pa.array(index))
            append_json_lines(
                self.set_aside,
                [
                    {"stream": stream.name, "number": number, "problem": reason, "values": values}
                    for number, values in zip(indices.tolist(), records_of(table), strict=True)
                ],
            )

    def _count(self, name: str, num: int) -> None:
        """Add to a count. The first time, log a warning."""
        if not self.counts[name]:
            _log.warning("label join: the first %s: %s", name.replace("_", " "), rows_text(num))
        self.counts[name] += num


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise ValueError if an argument is not one of the choices."""
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; take one of {list(choices)}.")


def _duration(name: str, seconds: float) -> int:
    """Return a duration in nanoseconds."""
    if not 0 <= seconds <= _MAX_DURATION / 10**9:
        raise ValueError(f"{name} is {seconds}; it must be from 0 to {_MAX_DURATION // 10**9:,} seconds.")
    return round(seconds * 10**9)


def _shown(schema: Any) -> str:
    """Format a schema in one line."""
    return ", ".join(f"{field.name}: {field.type}" for field in schema)


def _tensor(values: Any) -> Tensor:
    """Copy a NumPy array to a tensor."""
    return torch.from_numpy(values.copy())
