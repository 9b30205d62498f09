"""Profile of Parquet files, computed by several processes on this machine."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch

from meshrec.comms.fork_server import start_fork_server
from meshrec.data.features.sketches import max_sample_hash, smallest_row_hashes
from meshrec.data.parquet_tables import ParquetTables
from meshrec.data.profile import Profile, Profiler

# As in meshrec.train.rank_processes: only on Linux are forks of a process with torch safe.
_CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
_SECONDS_BETWEEN_REPORTS = 0.2
_HASHED_ROWS = 1 << 20
"""Rows whose hashes are computed at a time."""


class _Shared(NamedTuple):
    """Values in memory that all processes share."""

    num_rows: Any
    """Rows read by all processes."""
    stop: Any
    """Whether the processes must end, because one of them has failed or the user has stopped the command."""


class _Share(NamedTuple):
    """Rows that a process reads."""

    tables: ParquetTables
    schema: pa.Schema
    """Schema of the converted tables."""
    runs: range
    label: str | None
    convert: Callable[[pa.Table], pa.Table]
    max_hash: np.uint64 | None
    """As for `RowSample.of`."""


# Set by `_start` in the processes of the pool, for `_profile_share`.
_shared: _Shared | None = None


def profile_parquet(
    tables: ParquetTables,
    label: str | None,
    *,
    nproc: int = 1,
    convert: Callable[[pa.Table], pa.Table],
    tell: Callable[[float], None] = lambda share: None,
) -> Profile:
    """Compute the statistics of Parquet files. They do not depend on the number of processes.

    Args:
        tables: the rows.
        label: label column; None: no label.
        nproc: number of processes, each of which reads consecutive row groups.
        convert: function applied to every table, and to a table without rows. Other processes must be able
            to import it.
        tell: called with the finished share of the rows, from 0 to 1.

    Raises:
        DataError: the files cannot be read; no further rows are read then.
        ValueError: the files have no rows.
        RuntimeError: a process died.
    """
    schema = convert(tables.schema.empty_table()).schema
    # Known before rows are read, so processes copy only rows that stay in the sample.
    starts = range(0, tables.num_rows, _HASHED_ROWS)
    numbers = (np.arange(start, min(start + _HASHED_ROWS, tables.num_rows)) for start in starts)
    max_hash = max_sample_hash([smallest_row_hashes(numbers)])
    shares = [_Share(tables, schema, runs, label, convert, max_hash) for runs in tables.shares(nproc)]
    if len(shares) > 1:
        profilers = _on_processes(shares, tables.num_rows, tell)
    else:
        # Without a process per share, nothing else stops the work.
        profilers = [
            _profiler_of(share, lambda num_rows: tell(num_rows / tables.num_rows)) for share in shares
        ]
    first = profilers[0] if profilers else Profiler(schema, label)
    for later in profilers[1:]:
        first.append(later)
    return first.profile()


def _on_processes(shares: list[_Share], num_rows: int, tell: Callable[[float], None]) -> list[Profiler]:
    """Return the statistics of every share, each computed in another process."""
    if _CONTEXT.get_start_method() == "forkserver":
        start_fork_server(["meshrec.data.profile_processes"])
    shared = _Shared(_CONTEXT.Value("q", 0), _CONTEXT.Value("b", 0))
    # Threads of several processes would wait for each other's processors.
    threads = max(len(os.sched_getaffinity(0)) // len(shares), 1)
    with ProcessPoolExecutor(len(shares), _CONTEXT, initializer=_start, initargs=(shared, threads)) as pool:
        try:
            futures = [pool.submit(_profile_share, share) for share in shares]
            # Wakes up to report the progress, and at once if a share fails.
            while wait(futures, _SECONDS_BETWEEN_REPORTS, FIRST_EXCEPTION).not_done:
                if any(future.done() and future.exception() for future in futures):
                    break
                tell(shared.num_rows.value / num_rows)
            failed = next((future for future in futures if future.done() and future.exception()), None)
            profilers = [(failed or future).result() for future in futures]
        except BrokenProcessPool as error:
            raise RuntimeError(
                f"one of {len(shares)} processes died, perhaps killed for its memory. Take fewer processes."
            ) from error
        finally:
            # The processes end before their next table. The pool waits for them.
            shared.stop.value = 1
    return profilers


def _start(shared: _Shared, threads: int) -> None:
    """Start a process of the pool."""
    global _shared
    _shared = shared
    torch.set_num_threads(threads)
    pa.set_cpu_count(threads)
    # Ctrl-C reaches all processes of a command; the first one stops the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _profile_share(share: _Share) -> Profiler:
    """Compute the statistics of a share in a process of the pool."""
    assert _shared is not None
    shared, num_reported = _shared, 0

    def report(num_rows: int) -> None:
        nonlocal num_reported
        with shared.num_rows.get_lock():
            shared.num_rows.value += num_rows - num_reported
        num_reported = num_rows
        if shared.stop.value:
            # Not seen by the user: the command ends with the error that has set ``stop``.
            raise InterruptedError("another process has failed")

    return _profiler_of(share, report)


def _profiler_of(share: _Share, tell: Callable[[int], None]) -> Profiler:
    """Compute the statistics of a share. Call ``tell`` with the number of rows read, after every table."""
    profiler, num_rows = Profiler(share.schema, share.label, share.max_hash), 0
    for first_row, table in share.tables.tables(share.runs):
        profiler.add(share.convert(table), first_row)
        num_rows += table.num_rows
        tell(num_rows)
    return profiler
