"""Starts the ranks of a run on this machine, through PyTorch's elastic launcher."""

import logging
import os
import sys
import uuid
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshrec.train.run_folder import RunFolder

_SHUTDOWN_SECONDS = 120


class Ended(NamedTuple):
    """How the ranks ended: an exit code, and what went wrong in the first that failed."""

    code: int
    error: str | None


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    folder: RunFolder,
    max_restarts: int,
    environment: Mapping[str, str],
) -> Ended:
    """Runs ``python -m meshrec ARGUMENTS`` in ``num_ranks`` processes, and waits for them.

    Ctrl-C and SIGTERM are passed on: the ranks stop at the next step. Ranks share the cores of this machine
    unless OMP_NUM_THREADS says otherwise.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    added = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
        # A store for each start: in a shared one, ranks that start anew may find the addresses of dead ones.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **environment,
    }
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        shutdown_timeout=_SHUTDOWN_SECONDS,
    )
    before = dict(os.environ)
    os.environ.update(added)
    try:
        elastic_launch(config, sys.executable)("-m", "meshrec", *arguments)
    except ChildFailedError:
        return Ended(1, first_error(folder, num_ranks))
    except SignalException as signal:
        return Ended(128 + int(signal.sigval), None)
    finally:
        os.environ.clear()
        os.environ.update(before)
    return Ended(0, None)


def first_error(folder: RunFolder, num_ranks: int) -> str:
    """What went wrong: not the ranks that only lost a peer, if another says more."""
    found = []
    for rank in range(num_ranks):
        path = folder.error(rank)
        if path.is_file():
            found.append((path.stat().st_mtime, rank, _error_in(path.read_text())))
    if not found:
        return "a rank ended without a word: killed, or out of memory."
    causes = [each for each in found if "CollectiveError" not in each[2]] or found
    _, rank, error = min(causes)
    name, _, message = error.partition(": ")
    if name == "ValueError":
        return message
    return f"rank {rank}: {error} (the traceback is in {folder.error(rank)})"


def _error_in(text: str) -> str:
    """The error at the end of a traceback, which may have several lines: what follows the last call."""
    lines = text.strip().splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith(("Traceback", "  File ", "    "))]
    return "\n".join(lines[calls[-1] + 1 :])
