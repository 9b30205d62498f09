"""``meshrec join``: join impressions and later actions to labelled rows, which a model follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import tyro

from meshrec.cli.arguments import parse
from meshrec.data.folder_join import open_join
from meshrec.data.label_options import LabelOptions


@dataclass(frozen=True, kw_only=True)
class JoinOptions(LabelOptions):
    """Join a growing folder of impressions with later actions, and write labelled rows to another folder.

    Files are Parquet or Arrow IPC, and are read in the order of their names, as they appear. Actions may also
    be Redis streams or Kafka topics, as for `meshrec follow`. An impression is positive if an action with the
    same key comes within the window. The command runs until Ctrl-C. Start it again after that, or after a
    crash: it continues exactly.

    Example: meshrec join shown clicks labelled --key request --time ts --label clicked --window-seconds 600
    """

    impressions: Annotated[str, tyro.conf.Positional]
    """Folder of impressions, or its address in a store."""
    actions: Annotated[str, tyro.conf.Positional]
    """Folder of actions, its address in a store, or the address of Redis streams or Kafka topics."""
    out: Annotated[Path, tyro.conf.Positional]
    """Folder for the labelled rows; it is created."""
    # Without a default, unlike those of `LabelOptions`.
    key: str = field()
    """Column of impressions and actions, with the integers or strings by which they are joined."""
    time: str
    """Column of both, with timestamps, or integers in --time-unit since 1970."""
    label: str
    """Name of the label, a column that is added to the impressions: 1 or 0."""
    window_seconds: float = field()
    """Time after an impression in which an action counts."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of integers in the time column."""
    on_error: Literal["raise", "skip"] = "raise"
    """With a damaged record or file: end with an error, or count and skip it."""
    set_aside: Path | None = None
    """File that receives records without a row, as JSON lines; none: they are only counted."""
    poll_seconds: float = 1.0
    """Time between listings of the folders."""
    once: bool = False
    """End when all records have been read."""


def main(arguments: Sequence[str]) -> int:
    """Join until Ctrl-C, print the counts, and return the exit code."""
    options: JoinOptions = parse(JoinOptions, arguments, program="meshrec join")
    join = open_join(
        options,
        options.impressions,
        options.actions,
        options.out,
        time=options.time,
        time_unit=options.time_unit,
        label=options.label,
        on_error=options.on_error,
        set_aside=options.set_aside,
        poll_seconds=options.poll_seconds,
    )
    try:
        join.run(lambda: options.once)
    finally:
        counts = "".join(f", {num:,} {name.replace('_', ' ')}" for name, num in join.counts.items() if num)
        print(f"{options.out}: {join.num_written:,} rows; {join.num_waiting:,} records wait{counts}")
    return 0
