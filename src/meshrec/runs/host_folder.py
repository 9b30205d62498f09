"""Choose the run folder on every rank, also on hosts without shared storage.

The run folder is on rank 0's host. A rank that sees the same folder, through a mount or on the same host,
uses it. Any other rank uses a folder on its own host, ``runs/NAME.HOST``, for log and errors. Whether ranks
see the same folder is tested, not inferred from names: rank 0 writes a file with a random name, and all ranks
look for it.
"""

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path

from meshrec.durable import CreatedPath
from meshrec.runs.job import RUN_VARIABLE, Job
from meshrec.runs.lock import RunLock, claim_run
from meshrec.train.ranks import Ranks
from meshrec.train.run_folder import RunFolder, all_runs, make_folder

LAUNCH = "launch.json"
"""File in the run folder with the ID of the launch behind it."""
LAUNCH_VARIABLE = "MESHREC_LAUNCH"
"""Environment variable with a launch ID. Launchers that restart a job set the same ID again, so the restarted
job continues the same run. If the variable is not set, torchrun's --rdzv-id is the ID.
"""
# How long ranks look for rank 0's file: network file systems cache for some seconds that a file is missing.
_LOOK_SECONDS = 5.0
# Pause between two looks.
_POLL_SECONDS = 0.1


def host_folder(path: Path, ranks: Ranks) -> tuple[RunFolder, list[int]]:
    """Choose this rank's output folder: the run folder if visible here, else a local folder. Collective.

    Args:
        path: run folder, as rank 0 names it.
        ranks: the ranks, from `join`.

    Returns:
        This rank's output folder, and the ranks unable to see rank 0's folder.

    Raises:
        ValueError: rank 0 cannot write to the folder, or another rank cannot create a local folder; raised on
            every rank.
    """
    ranks_without_access, error = ranks_not_seeing(path, ranks)
    folder = RunFolder(path)
    if error is None and ranks.rank in ranks_without_access:
        folder = RunFolder(path.with_name(f"{path.name}.{socket.gethostname()}"))
        try:
            make_folder(folder.path)
        except OSError as refused:
            error = f"{folder.path} cannot be made for its log ({refused.strerror})"
    # Collected first, so that all ranks raise the same error.
    for rank, refusal in enumerate(ranks.collect(error)):
        if refusal is not None:
            raise ValueError(f"rank {rank}: {refusal}. Name another --runs, where every host may write.")
    return folder, ranks_without_access


def ranks_not_seeing(path: Path, ranks: Ranks) -> tuple[list[int], str | None]:
    """Test which ranks see rank 0's folder: rank 0 writes a file there, and all look for it. Collective.

    Returns:
        The ranks unable to see the file, and None; or an empty list and a message if rank 0 cannot write it.
    """
    probe, error = path / f".seen-{secrets.token_hex(4)}", None
    if ranks.is_first:
        try:
            descriptor, created = CreatedPath.create_file(probe)
            os.close(descriptor)
        except OSError as refused:
            error = f"{path} cannot be written to ({refused.strerror})"
    # The broadcast also orders the test: the file exists before any rank looks for it.
    probe, error = ranks.broadcast((probe, error))
    if error is not None:
        return [], error
    # Poll, because a network file system may show the new file only after some seconds.
    deadline = time.monotonic() + _LOOK_SECONDS
    while not (seen := probe.exists()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    seen_by_rank = ranks.collect(seen)
    # Remove the file only after all ranks have looked, which the collective above ensures.
    if ranks.is_first:
        created.remove()
    return [rank for rank, is_seen in enumerate(seen_by_rank) if not is_seen], None


def check_storage(job: Job, folder: RunFolder, ranks_without_access: Sequence[int], ranks: Ranks) -> None:
    """Check that all ranks can reach the storage for checkpoints: the run folder or an object store.

    Collective.

    Args:
        job: run options.
        folder: this rank's output folder.
        ranks_without_access: ranks unable to see rank 0's folder.
        ranks: the ranks, from `join`.

    Raises:
        ValueError: some ranks cannot reach the storage; raised on every rank.
    """
    if job.store is not None:
        _check_store(job.store, ranks)
        stream = job.stream_options
        every = job.recipe.training.publish_every if stream is None else stream.delta_seconds
        if every is not None:
            name = "training.publish_every" if stream is None else "--delta-seconds"
            raise ValueError(
                f"{name} is {every}, and deltas need a folder that servers see, but --out is {job.store}. "
                "Give a mounted folder, or publish none."
            )
        return
    # Collectives come before the return, because all ranks must call them.
    hosts = ranks.collect(socket.gethostname())
    path = ranks.broadcast(str(folder.path.resolve()))
    if not ranks_without_access:
        return
    names = ", ".join(map(str, ranks_without_access[:8])) + (", ..." if len(ranks_without_access) > 8 else "")
    blind_hosts = ", ".join(sorted({hosts[rank] for rank in ranks_without_access}))
    raise ValueError(
        f"rank {names} on {blind_hosts} cannot see {path} on {hosts[0]}, and a checkpoint needs storage that "
        "all hosts reach: give a mounted folder (--out /mnt/shared/runs) or an object store (--out "
        "s3://bucket/runs), or --no-checkpoints to save none."
    )


def _check_store(address: str, ranks: Ranks) -> None:
    """Raise ValueError on every rank unless all ranks can write to the object store. Collective."""
    from meshrec.checkpoint.stored import ObjectStore

    error = None
    try:
        ObjectStore(address).check()
    except Exception as refused:
        error = (str(refused) or type(refused).__name__).splitlines()[0]
    # Collected first, so that all ranks raise the same error.
    for rank, refusal in enumerate(ranks.collect(error)):
        if refusal is not None:
            raise ValueError(
                f"rank {rank} cannot write to {address}: {refusal}. Check the address and the store's "
                "keys on every "
                "host, or give a folder that all hosts mount (--out /mnt/shared/runs)."
            )


@contextmanager
def locked_folder(job: Job, ranks: Ranks) -> Iterator[tuple[RunFolder, list[int]]]:
    """Create or find the run folder, and lock it on rank 0 unless MeshRec's launcher holds the lock.

    Collective. The lock is held during the ``with`` block.

    Args:
        job: run options.
        ranks: the ranks, from `join`.

    Yields:
        This rank's output folder, and the ranks unable to see rank 0's folder.

    Raises:
        ValueError: rank 0 cannot claim the folder; raised on every rank.
    """
    # MeshRec's launcher starts all ranks on its own host, so all of them see its folder.
    launcher_folder = os.environ.get(RUN_VARIABLE)
    if launcher_folder:
        yield RunFolder(Path(launcher_folder)), []
        return
    # Only rank 0 takes the lock; the other ranks learn the outcome below.
    lock: RunLock | None = None
    path, refusal = "", ""
    if ranks.is_first:
        try:
            folder = job.folder
            if folder is None:
                lock = _claim_folder(job)
                folder = lock.folder
            path = str(folder.path)
        except ValueError as error:
            refusal = str(error)
    path, refusal = ranks.broadcast((path, refusal))
    if refusal:
        raise ValueError(refusal)
    with lock or nullcontext():
        yield host_folder(Path(path), ranks)


def _claim_folder(job: Job) -> RunLock:
    """Find or create the run folder for this launch, and lock it.

    A launch is a start of the ranks by a launcher, with all later restarts, and has an ID. After a restart,
    use the newest unfinished run with the same ID. If no local folder has such a run, download it from the
    object store. If the store has none either, or the launch has no ID, call `claim_run`.
    """
    from meshrec.checkpoint.stored import ObjectStore
    from meshrec.train.stored_run import download_run, find_launched_run

    # torchrun sets the run ID "none" if no --rdzv-id is given.
    launch = os.environ.get(LAUNCH_VARIABLE) or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if launch != "none":
        # Newest first: a restart continues the latest run of this launch.
        for run in reversed(all_runs(job.runs)):
            if _launch_of(run) == launch and run.state().name != "finished":
                return _wait_for_lock(run, job.rank_timeout)
    if launch != "none" and job.store is not None:
        store = ObjectStore(job.store)
        # The previous host may be gone, together with the run folder.
        name = find_launched_run(launch, LAUNCH, store)
        downloaded = None if name is None else download_run(name, job.runs, store)
        if downloaded is not None:
            return _wait_for_lock(downloaded, job.rank_timeout)
    lock = claim_run(job.name, job.recipe.name, job.runs, resume=job.resume)
    if launch != "none":
        # After a restart, `_claim_folder` finds the run by this file.
        lock.folder.write_json(LAUNCH, {"id": launch})
    return lock


def _launch_of(folder: RunFolder) -> str | None:
    """Return the ID of the launch that created a run folder; None if it is not recorded or damaged."""
    try:
        launch: str | None = (folder.read_json(LAUNCH) or {}).get("id")
    except ValueError:
        return None
    return launch


def _wait_for_lock(folder: RunFolder, seconds: float) -> RunLock:
    """Lock the folder of this launch once earlier ranks release it. Raise ValueError on timeout."""
    # A file lock cannot be awaited with a time limit, so it is tried again and again.
    deadline = time.monotonic() + seconds
    while True:
        try:
            return RunLock(folder)
        except ValueError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.2)
