"""Measure this machine and process group as a `HardwareProfile`."""

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
_LEAST_LATENCY = 1e-7
_CALLS = 9
# Values per row of the disk measurement, and rows per transfer.
_DISK_WIDTH, _DISK_BATCH = 64, 4096


class Sizes(NamedTuple):
    """Measurement sizes: see `make_trials` and `measure`."""

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
    """Measure a hardware profile in about a minute. Collective; all ranks get the same figures.

    Training steps of small sharded modules run on all ranks at once. The profile has the figures for which
    the cost model best explains their phase durations. If nodes have fewer ranks than the group, links are
    timed within nodes and over all ranks; otherwise a single measured link is used for both. Without a group,
    links come from a built-in profile (``cpu`` or ``h100``), and so does every figure which the steps cannot
    determine because of noise. Such figures are logged, and listed in `sources`.

    Args:
        group: process group; None: this process alone.
        local_size: ranks per node.
        device: device to measure.
        sizes: measurement sizes.
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
    """Measure latency and bandwidths of a group's collectives on the slowest rank; return them with their
    source.
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
    """Compute a link from the durations of all_to_all, all_gather and all_reduce.

    Args:
        times: seconds for a small and a large message, per collective.
        size: ranks in the group.
        full_duplex: whether a rank sends and receives at the same time.

    Returns:
        The link, and the names of figures which are only bounds. A figure is measured if the large message
        takes at least a tenth longer than the small message.
    """
    peer_share = (size - 1) / size
    # Bytes sent per rank; in half duplex, received bytes count as well.
    weights = (peer_share * (1 if full_duplex else 2), peer_share, 2 * peer_share)
    sizes = _MESSAGE_BYTES[1] - _MESSAGE_BYTES[0]
    per_byte = [
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
    splits = [sent.numel() // size] * size
    return Splits(splits, splits)


def _seconds(
    call: Callable[[Tensor], object], elements: int, group: dist.ProcessGroup, device: torch.device
) -> list[float]:
    """Time several calls after a warm-up, each with a freshly written message."""
    times = []
    for _ in range(_CALLS + 1):
        message = torch.ones(elements, device=device)
        dist.barrier(group)
        _synchronize(device)
        started = time.perf_counter()
        call(message)
        _synchronize(device)
        times.append(time.perf_counter() - started)
    return times[1:]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _memory_per_rank(device: torch.device, group: dist.ProcessGroup | None, local_size: int | None) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks = local_size or (group.size() if group is not None else 1)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks


def measure_disk(folder: Path, *, num_rows: int = 500_000, batches: int = 8) -> tuple[float, float]:
    """Measure how many 260-byte records a disk reads and writes per second, at random.

    Args:
        folder: folder on the disk. A file with half a KiB per row is created there, and removed.
        num_rows: the file's row count.
        batches: 4,096-row batches to read, and to write.

    Returns:
        Reads and writes per second.

    Raises:
        RowFileError: full or failing disk.
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
                keys = torch.randint(0, num_rows, (_DISK_BATCH,), generator=generator).unique()
                start = time.perf_counter()
                transfer(keys, zeros, torch.arange(len(keys)))
                seconds, rows = seconds + time.perf_counter() - start, rows + len(keys)
            rates.append(rows / seconds)
        return rates[0], rates[1]
    finally:
        file.close()
