"""The folder of a run on hosts that may share none.

Rank 0's host has the run's folder. A rank that sees the same folder, through a mount or because it runs on
the same host, uses it. A rank that does not has a folder of its own host, ``runs/NAME.HOST``, for its log
and its error. Whether two ranks see one folder is tried out, and not concluded from names: rank 0 writes a
file with a random word, and the others look for it.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from meshrec.checkpoint.stored import ObjectStore
from meshrec.runs.job import RUN_VARIABLE, Job
from meshrec.runs.lock import RunLock, claim_run
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder, all_runs
from meshrec.train.stored_run import download_run, stored_launch

LAUNCH = "launch.json"
"""The file with the ID of the launch that made the run's folder."""
LAUNCH_VARIABLE = "MESHREC_LAUNCH"
"""The environment variable with the ID of a launch, for launchers that start a job again under one ID.
Without it, torchrun's --rdzv-id is the ID.
"""
_LOOK_SECONDS = 5.0  # network file systems may remember for some seconds that a file was not there
_POLL_SECONDS = 0.1


def host_folder(path: Path, ranks: Ranks) -> tuple[RunFolder, list[int]]:
    """Return the folder that this rank writes to, and the ranks that do not see rank 0's. Collective.

    Args:
        path: the run's folder, as rank 0 names it.
        ranks: the ranks, from `join`.

    Raises:
        ValueError: rank 0 cannot write to the folder, or another rank cannot make one of its own; raised on
            every rank.
    """
    blind, error = ranks_without(path, ranks)
    folder = RunFolder(path)
    if error is None and ranks.rank in blind:
        folder = RunFolder(path.with_name(f"{path.name}.{socket.gethostname()}"))
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as refused:
            error = f"{folder.path} cannot be made for its log ({refused.strerror})"
    for rank, each in enumerate(ranks.collect(error)):
        if each is not None:
            raise ValueError(f"rank {rank}: {each}. Name another --runs, where every host may write.")
    return folder, blind


def ranks_without(path: Path, ranks: Ranks) -> tuple[list[int], str | None]:
    """Return the ranks that do not see the folder of rank 0, and why rank 0 cannot write there, if it cannot.

    Collective.
    """
    probe, error = path / f".seen-{secrets.token_hex(4)}", None
    if ranks.is_first:
        try:
            probe.write_text("")
        except OSError as refused:
            error = f"{path} cannot be written to ({refused.strerror})"
    probe, error = ranks.share((probe, error))
    if error is not None:
        return [], error
    deadline = time.monotonic() + _LOOK_SECONDS
    while not (seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    found = ranks.collect(seen)
    if ranks.is_first:
        probe.unlink(missing_ok=True)
    return [rank for rank, each in enumerate(found) if not each], None


def check_storage(job: Job, folder: RunFolder, blind: Sequence[int], ranks: Ranks) -> None:
    """Check that all ranks reach the place of the checkpoints. Collective.

    Raises:
        ValueError: some do not; raised on every rank.
    """
    if job.store is not None:
        _check_store(job.store, ranks)
        if job.recipe.training.publish_every is not None:
            raise ValueError(
                "training.publish_every needs a folder that servers see, and --out is "
                f"{job.store}. Give a mounted "
                "folder, or leave it out."
            )
        return
    hosts = ranks.collect(socket.gethostname())
    path = ranks.share(str(folder.path.resolve()))
    if not blind:
        return
    names = ", ".join(map(str, blind[:8])) + (", ..." if len(blind) > 8 else "")
    others = ", ".join(sorted({hosts[rank] for rank in blind}))
    raise ValueError(
        f"rank {names} on {others} cannot see {path} on {hosts[0]}, and a checkpoint needs storage that all "
        "hosts reach: give a mounted folder (--out /mnt/shared/runs) or an object store (--out "
        "s3://bucket/runs), or --no-checkpoints to save none."
    )


def _check_store(address: str, ranks: Ranks) -> None:
    error = None
    try:
        ObjectStore(address).check()
    except (OSError, ValueError) as refused:
        error = str(refused).splitlines()[0]
    for rank, each in enumerate(ranks.collect(error)):
        if each is not None:
            raise ValueError(
                f"rank {rank} cannot write to {address}: {each}. Check the address and the store's "
                "keys on every "
                "host, or give a folder that all hosts mount (--out /mnt/shared/runs)."
            )


@contextmanager
def held_folder(job: Job, ranks: Ranks) -> Iterator[tuple[RunFolder, list[int]]]:
    """Yield the folder that this rank writes to, and the ranks that do not see rank 0's. Collective.

    Rank 0 locks the run's folder unless our launcher holds the lock.

    Raises:
        ValueError: rank 0 cannot have the folder; raised on every rank.
    """
    made = os.environ.get(RUN_VARIABLE)
    if made:
        yield RunFolder(Path(made)), []
        return
    lock: RunLock | None = None
    path, refusal = "", ""
    if ranks.is_first:
        try:
            found = job.folder
            if found is None:
                lock = _claim(job)
                found = lock.folder
            path = str(found.path)
        except ValueError as error:
            refusal = str(error)
    path, refusal = ranks.share((path, refusal))
    if refusal:
        raise ValueError(refusal)
    with lock or nullcontext():
        yield host_folder(Path(path), ranks)


def _claim(job: Job) -> RunLock:
    """Take the lock of the run's folder: a new one, or the one that this launch made before it restarted."""
    launch = os.environ.get(LAUNCH_VARIABLE) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if launch != "none":
        for known in reversed(all_runs(job.runs)):
            if _launch_of(known) == launch and known.state().name != "finished":
                return _locked_again(known, job.rank_timeout)
    if launch != "none" and job.store is not None:
        store = ObjectStore(job.store)
        name = stored_launch(launch, LAUNCH, store)
        found = None if name is None else download_run(name, job.runs, store)
        if found is not None:
            return _locked_again(found, job.rank_timeout)
    lock = claim_run(job.name, job.recipe.name, job.runs, resume=job.resume)
    if launch != "none":
        lock.folder.write_json(LAUNCH, {"id": launch})
    return lock


def _launch_of(folder: RunFolder) -> str | None:
    """Return the ID of the launch that made a run's folder; None if there is none, or it cannot be read."""
    try:
        return str((folder.read_json(LAUNCH) or {}).get("id"))
    except ValueError:
        return None


def _locked_again(folder: RunFolder, seconds: float) -> RunLock:
    """Wait for the lock of this launch's folder: on other hosts, ranks from before the restart may still
    hold it.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            return RunLock(folder)
        except ValueError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
