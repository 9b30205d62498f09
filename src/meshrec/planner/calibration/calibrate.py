"""Measure the speed of this machine and of the links in a process group, as a `HardwareProfile`."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.comms.collectives import Splits, all_gather, all_to_all
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.planner.calibration.fit import fit
from meshrec.planner.calibration.trials import make_trials, measure
from meshrec.planner.hardware import HardwareProfile, Link, get_profile
from meshrec.planner.types import Topology
from meshrec.tables.cached.file import RowFile, new_path

_logger = logging.getLogger("meshrec")
# A small message shows the latency. The difference to the large message shows the bandwidth.
_MESSAGE_BYTES = (1 << 14, 1 << 22)
# Seconds. Noise may make the computed latency negative, which a Link rejects.
_LEAST_LATENCY = 1e-7
# Timed calls per collective and message size.
_CALLS = 9
# Values per row of the disk measurement, and rows per transfer.
_DISK_WIDTH, _DISK_BATCH = 64, 4096


class Sizes(NamedTuple):
    """Amount of measurements by `calibrate`; see `make_trials` and `measure`.

    Attributes:
        batch_size: samples per rank in the largest trials.
        steps: timed steps per trial and round.
        rounds: maximum round count over all trials.
        seconds: time limit; a round which would end later does not start.
    """

    batch_size: int = 1024
    steps: int = 6
    rounds: int = 6
    seconds: float = 45.0


def calibrate(
    group: dist.ProcessGroup | None = None,
    *,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    sizes: Sizes | None = None,
) -> HardwareProfile:
    """Measure a hardware profile of this machine in about a minute. Collective.

    All ranks get the same profile. Training steps with small sharded modules run on all ranks at once. The
    profile gets the speeds with which the cost model best explains the measured phase durations. If nodes
    have fewer ranks than the group, links are timed within nodes and over all ranks. Otherwise one measured
    link is used for both.

    A built-in profile (``cpu`` or ``h100``) provides the speeds which the steps cannot determine because of
    noise. Without a group, it also provides the links. Undetermined speeds are logged, and listed in
    `HardwareProfile.sources`.

    Args:
        group: process group of the ranks; None: this process alone.
        local_size: ranks per node; None: one node.
        device: device to measure.
        sizes: how much to measure.
    """
    device, sizes = torch.device(device), sizes or Sizes()
    on_cpu = device.type == "cpu"
    env, num_ranks = ShardingEnv.single_process(), 1
    base = get_profile("cpu" if on_cpu else "h100")
    inter_source = intra_source = f"the built-in profile {base.name!r}: one process measures no link"
    measured = f"measured on {device.type} with torch {torch.__version__}, {torch.get_num_threads()} threads"
    base_profile = replace(base, full_duplex=not on_cpu, sorts_once=on_cpu)
    if group is not None and group.size() > 1:
        env, num_ranks = ShardingEnv.from_process_group(group, device_type=device.type), group.size()
        inter, inter_source = _link(group, device, measured, full_duplex=not on_cpu)
        intra, intra_source = inter, inter_source
        if local_size is not None and 1 < local_size < num_ranks:
            # Collective over all ranks, although each rank uses one subgroup.
            nodes, _ = dist.new_subgroups(local_size)
            intra, intra_source = _link(nodes, device, measured, full_duplex=not on_cpu)
        base_profile = replace(base_profile, intra=intra, inter=inter)
    # ShardingEnv.from_process_group has no node axis, so nothing is summed within nodes.
    topology = Topology(
        world_size=num_ranks, compute_device=device.type, local_world_size=local_size, sum_in_node=False
    )
    trials = make_trials(num_ranks, sizes.batch_size)
    phase_seconds = measure(
        trials, env, device, steps=sizes.steps, rounds=sizes.rounds, max_seconds=sizes.seconds
    )
    profile = fit(base_profile, trials, phase_seconds, topology)
    if group is None or group.rank() == 0:
        for name, source in profile.sources.items():
            _logger.warning("calibration: %s is %s", name, source)
    return replace(
        profile,
        name="calibrated",
        memory=_memory_per_rank(device, group, local_size),
        sources={"kernels": measured, "intra": intra_source, "inter": inter_source, **profile.sources},
    )


def _link(
    group: dist.ProcessGroup, device: torch.device, measured: str, *, full_duplex: bool
) -> tuple[Link, str]:
    """Measure latency and bandwidths of a group's collectives on the slowest rank. Collective.

    Args:
        full_duplex: whether a rank sends and receives at the same time.

    Returns:
        The link, and a description of where the values come from. This is `measured`, with a remark if noise
        hid some values.
    """
    size = group.size()
    axis = Axis(size=size, rank=group.rank(), group=group)
    times = torch.zeros(3, 2, dtype=torch.float64, device=device)
    for column, num_bytes in enumerate(_MESSAGE_BYTES):
        elements = num_bytes // 4 // size * size
        calls: list[Callable[[Tensor], object]] = [
            lambda sent: all_to_all(sent, _even(sent, size), axis, "calibration").wait(),
            lambda sent: all_gather(sent[: sent.numel() // size], axis, "calibration").wait(),
            lambda sent: dist.all_reduce(sent, dist.ReduceOp.MAX, group=group),
        ]
        for row, call in enumerate(calls):
            # All ranks time every call, and the slowest rank counts.
            taken = _seconds(call, elements, group, device)
            # The minimum for small messages: scheduler noise is many times their duration.
            times[row, column] = min(taken) if column == 0 else statistics.median(taken)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    link, bounds = link_of(times.tolist(), size, full_duplex=full_duplex)
    if not bounds:
        return link, measured
    source = f"{measured}; noise hid {', '.join(bounds)}, for which a bound stands"
    if dist.get_rank() == 0:
        _logger.warning("calibration: a link is %s. Measure again on a quiet machine.", source)
    return link, source


def link_of(times: Sequence[tuple[float, float]], size: int, *, full_duplex: bool) -> tuple[Link, list[str]]:
    """Compute latency and bandwidths from the durations of all_to_all, all_gather and all_reduce.

    Args:
        times: for each of the three collectives, seconds for a small and for a large message.
        size: rank count in the group.
        full_duplex: whether a rank sends and receives at the same time.

    Returns:
        The link, and the names of fields that are only bounds, because noise hid the actual value. A
        bandwidth counts as measured if the large message takes at least a tenth longer than the small
        message.
    """
    peer_share = (size - 1) / size
    # Bytes sent per rank; in half duplex, received bytes count as well.
    weights = (peer_share * (1 if full_duplex else 2), peer_share, 2 * peer_share)
    sizes = _MESSAGE_BYTES[1] - _MESSAGE_BYTES[0]
    per_byte = [
        # Noise may make the difference tiny or negative, so at least a tenth of the larger time counts.
        # `bounds` names these figures.
        max(large - small, large / 10) / (weight * sizes)
        for weight, (small, large) in zip(weights, times, strict=True)
    ]
    names = ("all_to_all", "reduce_scatter", "all_reduce")
    bounds = [name for name, (small, large) in zip(names, times, strict=True) if large - small < large / 10]
    latency = times[0][0] - weights[0] * _MESSAGE_BYTES[0] * per_byte[0]
    link = Link(
        latency=max(latency, _LEAST_LATENCY),
        all_to_all=1 / per_byte[0],
        reduce_scatter=1 / per_byte[1],
        all_reduce=1 / per_byte[2],
    )
    return link, [*bounds, *(["latency"] if latency < _LEAST_LATENCY else [])]


def _even(sent: Tensor, size: int) -> Splits:
    """Return the send and receive splits of an all-to-all with equal messages between all `size` ranks."""
    splits = [sent.numel() // size] * size
    return Splits(splits, splits)


def _seconds(
    call: Callable[[Tensor], object], elements: int, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Return the seconds of several calls, without the first call, which warms up. Collective.

    Every call gets a freshly written message.
    """
    times = []
    for _ in range(_CALLS + 1):
        message = torch.ones(elements, device=device)
        # Ranks start together, so that waiting for a late rank does not count as transfer time.
        dist.barrier(group)
        _synchronize(device)
        started = time.perf_counter()
        call(message)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return times[1:]


def _synchronize(device: torch.device) -> None:
    """Wait for all kernels on a CUDA device; do nothing for other devices."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory_per_rank(device: torch.device, group: dist.ProcessGroup | None, local_size: int | None) -> int:
    """Return the bytes per rank: the GPU's memory, or else the host memory divided by the ranks of a node."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks = local_size or (group.size() if group is not None else 1)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def measure_disk(folder: Path, *, num_rows: int = 500_000, batches: int = 8) -> tuple[float, float]:
    """Measure how many random 260-byte records a disk reads, and writes, per second.

    Args:
        folder: folder on the disk. A file with half a KiB per row is created there, and removed at the end.
        num_rows: row count in the file.
        batches: number of 4,096-row batches to read, and to write.

    Returns:
        Records read per second, and records written per second.

    Raises:
        RowFileError: the disk is full or fails.
    """
    path = new_path(folder, "calibration")
    file = RowFile(path, "calibration", [4 * _DISK_WIDTH], first_key=0, num_rows=num_rows)
    try:
        step = 1 << 16
        zeros = [torch.zeros(step, _DISK_WIDTH)]
        for first in range(0, num_rows, step):
            keys = torch.arange(first, min(first + step, num_rows))
            file.write(keys, zeros, torch.arange(len(keys)))
        generator = torch.Generator().manual_seed(0)
        rates = []
        for transfer in (file.read, file.write):
            seconds = rows = 0.0
            for _ in range(batches):
                # Distinct, sorted keys, as a table reads and writes them.
                keys = torch.randint(0, num_rows, (_DISK_BATCH,), generator=generator).unique()
                start = time.perf_counter()
                transfer(keys, zeros, torch.arange(len(keys)))
                seconds, rows = seconds + time.perf_counter() - start, rows + len(keys)
            rates.append(rows / seconds)
        return rates[0], rates[1]
    finally:
        file.close()
