"""``meshrec delta``: verify deltas (changed weights), which training publishes for servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.checkpoint import DeltaError, verify_deltas
from meshrec.cli.arguments import parse_subcommand
from meshrec.train.run_folder import CONFIG, DELTAS, RUNS, run_or_path


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Verify checksums and order of all deltas in a folder. Every byte is read.

    A delta contains the table rows changed by training since the previous delta. Training writes deltas with
    `meshrec train RECIPE --training.publish-every STEPS`, into the run's folder `deltas`. Servers apply
    them without a restart: `meshrec serve PACKAGE --deltas NAME=RUN`.

    Prints the number of deltas, steps and rows, or the first damaged or missing delta (exit code 1).

    Example: meshrec delta verify movielens_dlrm-001
    """

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Name or folder of a run, or folder with deltas, such as runs/NAME/deltas."""
    runs: Path = RUNS
    """Folder with all runs."""


def main(arguments: Sequence[str]) -> int:
    """Verify the deltas, print the result, and return 1 if a delta is damaged or missing, else 0."""
    options: VerifyOptions = parse_subcommand(VerifyOptions, arguments, command="delta", name="verify")
    path = run_or_path(options.path, options.runs)
    # For a run, its subfolder.
    path = path / DELTAS if (path / CONFIG).is_file() else path
    if not path.is_dir():
        raise ValueError(
            f"{path} is not a folder of deltas. Give a run that publishes some "
            f"(--training.publish-every), or "
            "their folder, runs/NAME/deltas."
        )
    try:
        records = verify_deltas(path)
    except DeltaError as error:
        print(error)
        return 1
    if not records:
        print(f"{path} holds no deltas yet")
        return 0
    rows = sum(sum(record.rows.values()) for record in records)
    first, last = records[0], records[-1]
    print(f"{len(records)} deltas of run {first.run}, steps ({first.since}, {last.step}], {rows} rows: sound")
    return 0
