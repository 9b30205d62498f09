"""Run a command on several ranks on this machine, by starting the same command again for every rank."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch.distributed as dist

from meshrec.cli.unread import raise_if_unread
from meshrec.comms.launchers import launched
from meshrec.comms.leaving import leave_process_group
from meshrec.durable import scratch_folder
from meshrec.runs.job import RUN_VARIABLE
from meshrec.train.launch import launch
from meshrec.train.ranks import Ranks, choose_device, join
from meshrec.train.run_folder import RunFolder


def on_ranks(
    command: str, arguments: Sequence[str], work: Callable[[Ranks], None], *, nproc: int, device: str | None
) -> int:
    """Run a function on several ranks, and return the exit code.

    A single rank runs in this process. For more ranks, this function starts the command in new processes,
    where the command calls this function again, as a rank.

    Args:
        command: name of the command, such as "predict".
        arguments: arguments of the command.
        work: function to run on every rank. It may call collectives.
        nproc: number of ranks.
        device: ``cpu`` or ``cuda``; None: ``cuda`` if torch sees a GPU.

    Raises:
        ValueError: ``nproc`` or ``device`` cannot be used. For a single rank, errors in ``work`` are raised
            as well.
    """
    if nproc < 1:
        raise ValueError(f"--nproc is {nproc}; it must be at least 1.")
    device_type = choose_device(device)
    if launched():
        return _as_rank(work, device_type)
    if nproc == 1:
        work(join(device_type))
        return 0
    with scratch_folder("meshrec-command") as folder:
        # In the new processes, `launched()` is true. The last --device wins over one among the arguments.
        ended = launch(
            [command, *arguments, "--device", device_type],
            num_ranks=nproc,
            folder=RunFolder(folder),
            max_restarts=0,
            environment={RUN_VARIABLE: str(folder)},
        )
    if ended.error is not None:
        # A rank whose output nobody reads is not a failure.
        raise_if_unread(ended.error)
        print(f"meshrec: {ended.error}", file=sys.stderr)
    return ended.code


def _as_rank(work: Callable[[Ranks], None], device: str) -> int:
    """Run a function as a rank, and return the exit code.

    An error is written to this rank's error file, from which the launcher reports it.
    """
    ranks = join(device)
    try:
        work(ranks)
        # Wait, because collectives fail on other ranks if a rank ends early.
        ranks.wait_for_all()
    except Exception:
        folder = os.environ.get(RUN_VARIABLE)
        if folder is None:  # started by another launcher
            raise
        RunFolder(Path(folder)).error(ranks.rank).write_text(traceback.format_exc())
        return 1
    finally:
        if dist.is_initialized():
            leave_process_group()
    return 0
