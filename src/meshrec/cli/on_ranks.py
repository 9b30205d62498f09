"""Commands on several ranks of this machine: the command is started again for each rank."""

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
    """Run ``work`` on ``nproc`` ranks and return the exit code. A single rank runs in this process.

    Args:
        command: The command that each process runs; it calls this function again.
        arguments: The arguments of the command.
        work: The function to run; it may call collectives.
        nproc: The number of ranks.
        device: ``cpu`` or ``cuda``; None: ``cuda`` if torch sees a GPU.

    Raises:
        ValueError: ``nproc`` or ``device`` cannot be used. With a single rank, errors of ``work`` are raised
            as well.
    """
    if nproc < 1:
        raise ValueError(f"--nproc is {nproc}; it must be at least 1.")
    where = choose_device(device)
    if launched():
        return _as_rank(work, where)
    if nproc == 1:
        work(join(where))
        return 0
    with scratch_folder("meshrec-command") as folder:
        # Every rank runs this command again, and comes here with `launched()` true.
        ended = launch(
            [command, *arguments, "--device", where],
            num_ranks=nproc,
            folder=RunFolder(folder),
            max_restarts=0,
            environment={RUN_VARIABLE: str(folder)},
        )
    if ended.error is not None:
        raise_if_unread(ended.error)
        print(f"meshrec: {ended.error}", file=sys.stderr)
    return ended.code


def _as_rank(work: Callable[[Ranks], None], device: str) -> int:
    """Run ``work`` as one of several ranks, and write an error to this rank's file for the launcher."""
    ranks = join(device)
    try:
        work(ranks)
        # A rank that ends early would break collectives in which others still wait for it.
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
