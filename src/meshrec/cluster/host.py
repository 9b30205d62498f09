"""Checks on this host which need no other ranks. Every check returns a finding."""

import os
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from meshrec.checkpoint.stored import ObjectStore
from meshrec.cluster.findings import Finding
from meshrec.ops.library import has_kernels

GIB = 1 << 30
# Minimum free memory per rank in bytes. Imports and a small model need about as much.
_MIN_MEMORY = 1 * GIB
# Docker's default, 64 MiB, is too small for NCCL and for data loader workers.
_MIN_SHM = 256 << 20
_MIN_DISK = 1 * GIB
# Open files which a rank may need: sockets to every rank in a process group, and all other files.
_FILES_PER_RANK, _OTHER_FILES = 8, 512
_SYS, _PROC = Path("/sys"), Path("/proc")


def host_checks(*, num_ranks: int, local_ranks: int, folder: Path) -> Iterator[Finding]:
    """Run all checks on this host.

    Args:
        num_ranks: number of ranks on all hosts.
        local_ranks: number of ranks on this host.
        folder: folder in which runs are stored.

    Yields:
        A finding per check.
    """
    yield kernels()
    yield cores(local_ranks)
    yield memory(local_ranks)
    yield huge_pages()
    yield shared_memory()
    yield files(num_ranks)
    yield disk(folder)


def kernels() -> Finding:
    """Check that MeshRec's compiled kernels are loaded."""
    if has_kernels:
        return Finding("kernels", "ok", "compiled")
    return Finding(
        "kernels",
        "warn",
        "none: plain torch is used instead, which is much slower",
        "Install the wheel; or install a C++20 compiler, and reinstall MeshRec without MESHREC_NO_KERNELS.",
    )


def cores(local_ranks: int) -> Finding:
    """Check that this host has a core for every torch thread of all local ranks."""
    # Linux: the cores this process may use, which a container or a launcher may limit.
    available = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    threads = torch.get_num_threads()
    observation = f"cores {available}, ranks {local_ranks}, threads per rank {threads}"
    if threads * local_ranks <= available or threads == 1:
        return Finding("cores", "ok", observation)
    fitting = max(1, available // local_ranks)
    return Finding("cores", "warn", observation, f"Set OMP_NUM_THREADS={fitting} on every rank.")


def memory(local_ranks: int) -> Finding:
    """Check that the host and the container have at least 1 GiB of free memory per rank."""
    free = free_memory()
    if free is None:
        return Finding("memory", "ok", "unknown on this system")
    observation = f"{free / GIB:.1f} GiB free for {local_ranks} ranks"
    if free < local_ranks * _MIN_MEMORY:
        remedy = "Give the host or the container more memory, or start fewer ranks there."
        return Finding("memory", "fail", observation, remedy)
    # With strict accounting, fork fails if the child could not have a full copy of the memory.
    if _read(_PROC / "sys/vm/overcommit_memory") == "2":
        return Finding(
            "memory",
            "warn",
            f"{observation}; vm.overcommit_memory is 2",
            "Checkpoints in the background fork: set `sysctl vm.overcommit_memory=0`.",
        )
    return Finding("memory", "ok", observation)


def free_memory() -> int | None:
    """Return the free bytes of memory on the host or in the container, whichever is less; None if unknown."""
    limits = []
    for line in (_read(_PROC / "meminfo") or "").splitlines():
        if line.startswith("MemAvailable:"):
            limits.append(1024 * int(line.split()[1]))
    # Limits of the container, from cgroup v2. "max" stands for no limit.
    limit, used = (_read(_SYS / "fs/cgroup" / name) for name in ("memory.max", "memory.current"))
    if limit is not None and limit.isdigit() and used is not None and used.isdigit():
        limits.append(int(limit) - int(used))
    return min(limits, default=None)


def huge_pages() -> Finding:
    """Check that Linux allows transparent huge pages, with which lookups in large tables are faster."""
    text = _read(_SYS / "kernel/mm/transparent_hugepage/enabled")
    if text is None:
        return Finding("huge pages", "ok", "unknown on this system")
    # The active mode is in brackets: "always [madvise] never".
    mode = text[text.find("[") + 1 : text.find("]")]
    if mode != "never":
        return Finding("huge pages", "ok", mode)
    return Finding(
        "huge pages",
        "warn",
        "never: rows of large tables miss the TLB",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
    )


def shared_memory() -> Finding:
    """Check that /dev/shm has at least 256 MiB."""
    if not Path("/dev/shm").is_dir():
        return Finding("/dev/shm", "ok", "none on this system")
    size = shutil.disk_usage("/dev/shm").total
    if size >= _MIN_SHM:
        return Finding("/dev/shm", "ok", f"{size / GIB:.1f} GiB")
    return Finding(
        "/dev/shm",
        "warn",
        f"{size / (1 << 20):.0f} MiB",
        "docker run --shm-size 2g; Kubernetes: an emptyDir of medium Memory at /dev/shm.",
    )


def files(num_ranks: int) -> Finding:
    """Check that this process may open enough files, which include sockets to ``num_ranks`` ranks."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _OTHER_FILES + _FILES_PER_RANK * num_ranks
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return Finding("open files", "ok", f"up to {soft}")
    return Finding(
        "open files",
        "fail",
        f"up to {soft}, where {num_ranks} ranks may need {needed}",
        f"ulimit -n {max(needed, 65536)} (LimitNOFILE= of systemd, `--ulimit nofile` of Docker)"
        + ("." if hard == resource.RLIM_INFINITY or hard >= needed else f"; the hard limit is {hard}."),
    )


def disk(folder: Path) -> Finding:
    """Check that ``folder`` is writable or can be created, and that the disk has at least 1 GiB free."""
    existing = folder.absolute()
    # The folder need not exist yet: check the closest parent which does.
    while not existing.exists():
        existing = existing.parent
    if not os.access(existing, os.W_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        remedy = "Pass another folder (--out), or give this user write permission."
        return Finding("folder of runs", "fail", f"{existing} cannot be written to", remedy)
    free = shutil.disk_usage(existing).free
    if free < _MIN_DISK:
        remedy = "Free disk space, or pass another folder (--out)."
        return Finding("folder of runs", "fail", f"{free / (1 << 20):.0f} MiB free at {existing}", remedy)
    return Finding("folder of runs", "ok", f"{free / GIB:.0f} GiB free at {existing}")


def object_store(address: str) -> Finding:
    """Check that a small object can be written to the checkpoint store, read, and removed."""
    try:
        ObjectStore(address).check()
    except (OSError, ValueError) as error:
        observation = f"{address} cannot be written to: {str(error).splitlines()[0][:200]}"
        remedy = "Check the address, the region, and the store's keys on this host (AWS_ACCESS_KEY_ID, ...)."
        return Finding("object store", "fail", observation, remedy)
    return Finding("object store", "ok", address)


def _read(path: Path) -> str | None:
    """Return a file's content as a string without surrounding white space; None if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return None
