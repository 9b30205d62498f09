"""``meshrec delta``: looks after the deltas that training publishes for servers."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.checkpoint import DeltaError, verify_deltas
from meshrec.cli.arguments import parse


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Reads every byte of a folder's deltas, and compares checksums and order."""

    path: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER")]
    """The folder, such as runs/NAME/deltas."""


def main(arguments: Sequence[str]) -> int:
    """Parses and does it; the exit code: 1 for damage."""
    if arguments[:1] != ["verify"]:
        print("usage: meshrec delta {verify} FOLDER")
        return 0 if arguments[:1] in (["-h"], ["--help"]) else 2
    options: VerifyOptions = parse(VerifyOptions, arguments[1:], program="meshrec delta verify")
    if not options.path.is_dir():
        raise ValueError(f"{options.path} is no folder. Give that of a run's deltas.")
    try:
        records = verify_deltas(options.path)
    except DeltaError as error:
        print(error)
        return 1
    if not records:
        print(f"{options.path} holds no deltas yet")
        return 0
    rows = sum(sum(record.rows.values()) for record in records)
    first, last = records[0], records[-1]
    print(f"{len(records)} deltas of run {first.run}, steps ({first.since}, {last.step}], {rows} rows: sound")
    return 0
