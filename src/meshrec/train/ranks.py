"""The ranks of a run: join the process group, and exchange small values."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from meshrec.comms.collectives import set_timeout
from meshrec.comms.joining import form_group
from meshrec.comms.launchers import launched
from meshrec.comms.mesh import Axis, ShardingEnv

# A barrier takes no infinite timeout.
_NO_TIMEOUT = timedelta(days=30)


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This rank, and the process groups to which it belongs.

    Attributes:
        rank: this rank's number, from 0.
        size: number of ranks in the run.
        local_size: number of ranks on this node.
        device: this rank's device.
        env: process groups for sharded modules.
        control: gloo group with all ranks, for small values on the CPU; None for a single process.
    """

    rank: int
    size: int
    local_size: int
    device: torch.device
    env: ShardingEnv
    control: dist.ProcessGroup | None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def axis(self) -> Axis:
        """All ranks as an `Axis`, with the group for small values."""
        return Axis(size=self.size, rank=self.rank, group=self.control)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sum of values over all ranks. Collective."""
        if self.control is None:
            return [float(value) for value in values]
        # float64 is exact for sample counts up to 2**53.
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return [float(value) for value in total]

    def broadcast(self, value: Any) -> Any:
        """Return rank 0's value on every rank. Collective. The value must be picklable."""
        if self.control is None:
            return value
        # broadcast_object_list replaces the element on the other ranks.
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order. Collective. Values must be picklable."""
        if self.control is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def wait_for_all(self) -> None:
        """Wait until every rank has called this method, without a timeout.

        A single rank may work for a long time while the others wait. Collective.
        """
        if self.control is not None:
            dist.monitored_barrier(self.control, timeout=_NO_TIMEOUT)

    def expect_answers_within(self, seconds: float) -> None:
        """Set the timeout of all later collectives, in seconds."""
        if self.control is not None:
            set_timeout(seconds)


def choose_device(name: str | None) -> str:
    """Return the device type to use: ``name``, or if it is None, ``cuda`` if torch sees a GPU, else ``cpu``.

    Raises:
        ValueError: ``name`` is unknown, or it is ``cuda`` and torch sees no GPU.
    """
    if name not in (None, "cpu", "cuda"):
        raise ValueError(f"--device {name}: take cpu or cuda.")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch sees no GPU here; take --device cpu.")
    return name or ("cuda" if torch.cuda.is_available() else "cpu")


def join(device: str, *, timeout_seconds: float = 1800.0) -> Ranks:
    """Join the ranks of a run, and return this rank. Collective.

    Use the default process group, or form the group that the launcher's environment variables describe, with
    gloo for CPUs and NCCL for GPUs. Without a group and a launcher, this process is the only rank.

    Args:
        device: ``cpu`` or ``cuda``.
        timeout_seconds: seconds after which a collective fails.
    """
    if not launched() and not dist.is_initialized():
        if device == "cuda":
            torch.cuda.set_device(0)
        return Ranks(
            rank=0, size=1, local_size=1, device=torch.device(device), env=ShardingEnv(), control=None
        )
    where = torch.device(device)
    timeout = timedelta(seconds=timeout_seconds)
    if device == "cuda":
        # With more ranks than GPUs on a host, ranks share GPUs.
        where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(where)
    if not dist.is_initialized():
        form_group("nccl" if device == "cuda" else "gloo", timeout)
    group = dist.group.WORLD
    assert group is not None
    # NCCL cannot reduce CPU tensors, so GPU runs need a second group.
    control = group if device == "cpu" else dist.new_group(backend="gloo", timeout=timeout)
    return Ranks(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        local_size=int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size())),
        device=where,
        env=ShardingEnv.from_process_group(group),
        control=control,
    )
