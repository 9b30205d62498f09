"""``meshrec calibrate``: measure this machine and save a hardware profile."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table as Grid

from meshrec.cli.arguments import check_output, parse
from meshrec.comms.joining import form_group
from meshrec.comms.launchers import launched
from meshrec.comms.leaving import leave_process_group
from meshrec.planner.calibration.calibrate import Sizes, calibrate, measure_disk
from meshrec.planner.hardware import HardwareProfile
from meshrec.train.ranks import choose_device


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """Measure this machine in about a minute, and save a hardware profile for `meshrec plan --hardware FILE`.

    Under torchrun it measures the process group as well: torchrun --nproc-per-node=2 -m meshrec calibrate
    """

    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[FILE]")] = Path("hardware.json")
    """File to write the profile to."""
    force: bool = False
    """Replace an existing file."""
    name: str = "calibrated"
    """Name of the profile."""
    ranks_per_node: int | None = None
    """Ranks per node; none: all ranks share a node."""
    device: str = "cpu"
    """Device to measure: cpu or cuda."""
    disk: Path | None = None
    """Folder on a disk to measure, for tables in files (`meshrec.FileRows`)."""
    quick: bool = False
    """Measure small tables for a few rounds: a rough profile in seconds."""


def main(arguments: Sequence[str]) -> int:
    run(parse(CalibrateOptions, arguments, program="meshrec calibrate"))
    return 0


def run(options: CalibrateOptions) -> None:
    """Measure this machine, and save and print the hardware profile on rank 0."""
    check_output(options.out, force=options.force, option="FILE")
    # Under torchrun, this process is a rank, and the links between ranks are measured as well.
    is_rank = launched()
    if is_rank and not dist.is_initialized():
        form_group("gloo" if options.device == "cpu" else "nccl", timedelta(minutes=30))
    sizes = Sizes(batch_size=64, steps=3, rounds=1) if options.quick else Sizes()
    try:
        device = torch.device(choose_device(options.device))
        group = dist.group.WORLD if dist.is_initialized() else None
        profile = calibrate(group, local_size=options.ranks_per_node, device=device, sizes=sizes)
        if group is None or group.rank() == 0:
            if options.disk is not None:
                profile = with_disk(profile, options.disk, quick=options.quick)
            profile = profile.named(options.name)
            profile.save(options.out)
            _print(profile, options.out)
    finally:
        if is_rank:
            # Also after an error, so that the other ranks do not wait.
            leave_process_group()


def with_disk(profile: HardwareProfile, folder: Path, *, quick: bool) -> HardwareProfile:
    """Measure a disk, and return the profile with the results.

    Args:
        profile: hardware profile of this machine.
        folder: folder on the disk.
        quick: whether to measure only a few rows.
    """
    reads, writes = measure_disk(folder, num_rows=20_000 if quick else 500_000)
    sources = {**profile.sources, "disk": f"measured in {folder.absolute()}"}
    return replace(profile, disk_reads=reads, disk_writes=writes, sources=sources)


def _print(profile: HardwareProfile, path: Path) -> None:
    """Print a table with the measured values, and how they were measured."""
    grid = Grid("figure", "value", title=str(path))
    for name, value in profile.to_json().items():
        if name != "sources":
            grid.add_row(name, f"{value:.4g}" if isinstance(value, float) else str(value))
    for name, source in profile.sources.items():
        grid.add_row(f"source of {name}", source)
    Console().print(grid)
