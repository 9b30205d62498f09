"""``meshrec doctor``: check the hosts before training."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table

from meshrec.cli.arguments import parse
from meshrec.cluster import Examination, ExaminationOptions, examine
from meshrec.comms.leaving import leave_process_group
from meshrec.data.locations import is_address
from meshrec.train.recipe_files import resolve
from meshrec.train.run_folder import RUNS

# Table width if the output is not a terminal.
_WIDTH = 150
# Text styles by level of a finding.
_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


@dataclass(frozen=True, kw_only=True)
class DoctorOptions:
    """Check the hosts before training: prints a line per check, with a remedy for failures.

    Start it like the training, with any launcher: torchrun ... -m meshrec doctor [RECIPE].
    Exit code 0: training works; 1: a check failed, or with --strict there are warnings.
    """

    recipe: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECIPE]")] = None
    """Recipe whose data is checked."""
    out: str = str(RUNS)
    """Run folder that all hosts reach, or object store address."""
    timeout: float = 60.0
    """Seconds to wait for other ranks."""
    strict: bool = False
    """Exit with code 1 for warnings too."""


def main(arguments: Sequence[str]) -> int:
    """Check the hosts, print the findings, and return the exit code.

    Rank 0 prints the findings of all ranks. If the ranks cannot connect, every rank prints its findings.
    """
    options = parse(DoctorOptions, arguments, program="meshrec doctor")
    is_store = is_address(options.out)
    requested = ExaminationOptions(
        folder=None if is_store else Path(options.out),
        runs=RUNS if is_store else Path(options.out),
        store=options.out if is_store else None,
        recipe=None if options.recipe is None else resolve(options.recipe),
        join_seconds=options.timeout,
    )
    try:
        examination = examine(requested)
    finally:
        # Leave also after an error, because other ranks would wait for this rank.
        if dist.is_initialized():
            leave_process_group()
    if examination.rank == 0 or not examination.has_met:
        _print(examination)
    return int(examination.level == "fail" or (options.strict and examination.level == "warn"))


def _print(examination: Examination) -> None:
    """Print a table with a row per finding."""
    title = f"{examination.num_ranks} ranks"
    if not examination.has_met:
        title = f"rank {examination.rank} of {title}, which have not met: each prints its own findings"
    grid = Table(title=title)
    for name in ("check", "", "ranks", "found", "remedy"):
        grid.add_column(name, overflow="fold")
    for finding, ranks in examination.findings:
        # Equal findings of several ranks share a row.
        everywhere = len(ranks) == examination.num_ranks
        named = "all" if everywhere else ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        style = _STYLES[finding.level]
        level = f"[{style}]{finding.level}[/]"
        grid.add_row(finding.check, level, named, finding.observation, finding.remedy)
    console = Console()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(width=_WIDTH)
    console.print(grid)
