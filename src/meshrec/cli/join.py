"""``meshrec join``: join impressions and later actions to labelled rows, which a model follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshrec.cli.arguments import parse


@dataclass(frozen=True, kw_only=True)
class JoinOptions:
    """Join a growing folder of impressions with one of actions, and write labelled rows to a third folder.

    Files are Parquet or Arrow IPC, and are read in the order of their names, as they appear. An impression is
    positive if an action with the same key comes within the window. The command runs until Ctrl-C. Start it
    again after that, or after a crash: it continues exactly.

    Example: meshrec join shown clicks labelled --key request --time ts --label clicked --window-seconds 600
    """

    impressions: Annotated[str, tyro.conf.Positional]
    """Folder of impressions, or its address in a store."""
    actions: Annotated[str, tyro.conf.Positional]
    """Folder of actions, or its address in a store."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder for the labelled rows; it is created."""
    key: str
    """Column of both, with the integers or strings by which they are joined."""
    time: str
    """Column of both, with timestamps, or integers in --time-unit since 1970."""
    label: str
    """Name of the label, a column that is added to the impressions: 1 or 0."""
    window_seconds: float
    """Time after an impression in which an action counts."""
    allowed_lateness_seconds: float = 0.0
    """How far a record may be behind the latest one before it, in its folder. Later ones are left out."""
    negatives: Literal["at_window_end", "at_once"] = "at_window_end"
    """When a row with label 0 is written. If at once, an action adds a second row with label 1."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of integers in the time column."""
    idle_seconds: float | None = None
    """Time by which a folder without new records holds back the other; none: without limit."""
    clock_lag_seconds: float | None = None
    """While no new files appear, take all records older than this to have arrived; none: wait for them."""
    max_rows: int = 10_000_000
    """Records that may wait in memory."""
    on_full: Literal["raise", "decide"] = "raise"
    """With more records: end with an error, or decide about the oldest early."""
    on_error: Literal["raise", "skip"] = "raise"
    """With a damaged record or file: end with an error, or count and skip it."""
    set_aside: Path | None = None
    """File that receives records without a row, as JSON lines; none: they are only counted."""
    poll_seconds: float = 1.0
    """Time between listings of the folders."""
    once: bool = False
    """End when all files have been read."""


def main(arguments: Sequence[str]) -> int:
    """Join until Ctrl-C, print the counts, and return the exit code."""
    options: JoinOptions = parse(JoinOptions, arguments, program="meshrec join")
    # Imported here, because torch takes seconds, and mistakes in the options are reported before.
    from meshrec.data import FolderJoin, LabelJoin

    join = LabelJoin(
        key=options.key,
        time=options.time,
        label=options.label,
        window_seconds=options.window_seconds,
        allowed_lateness_seconds=options.allowed_lateness_seconds,
        negatives=options.negatives,
        time_unit=options.time_unit,
        idle_seconds=options.idle_seconds,
        max_rows=options.max_rows,
        on_full=options.on_full,
        on_error=options.on_error,
        set_aside=options.set_aside,
    )
    folders = FolderJoin(
        options.impressions,
        options.actions,
        options.out,
        join,
        on_error=options.on_error,
        clock_lag_seconds=options.clock_lag_seconds,
        poll_seconds=options.poll_seconds,
    )
    try:
        folders.run(lambda: options.once)
    finally:
        counts = "".join(f", {num:,} {name.replace('_', ' ')}" for name, num in join.counts.items() if num)
        print(f"{options.out}: {folders.num_written:,} rows; {join.num_rows:,} records wait{counts}")
    return 0
