"""Measurement of this machine and process group, which results in a `HardwareProfile`."""

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.calibration.fit import fit
from meshrec.calibration.trials import make_trials, measure
from meshrec.comms.collectives import Splits, all_gather, all_to_all
from meshrec.comms.mesh import Axis, ShardingEnv
from meshrec.planner.hardware import HardwareProfile, Link, get_profile
from meshrec.planner.types import Topology

_logger = logging.getLogger("meshrec")
_MESSAGE_BYTES = (1 << 14, 1 << 22)
_LEAST_LATENCY = 1e-7
_CALLS = 9


class Sizes(NamedTuple):
    """Sizes of the measurement: see `make_trials` and `measure`."""

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
    """Measure a hardware profile in about a minute. Collective over `group`; all ranks get the same figures.

    Training steps of small sharded modules run on all ranks at once. The profile has the figures with which
    the cost model best explains the duration of their phases. If `local_size` ranks per node are fewer than
    the group has, links are timed inside the nodes and over all ranks; otherwise one measured link stands for
    both. Without a group the links come from a built-in profile, ``cpu`` or ``h100``, and so does every
    figure that the steps cannot determine because of noise. Such figures are logged, and named in `sources`.
    """
    device, sizes = torch.device(device), sizes or Sizes()
    on_cpu = device.type == "cpu"
    env, num_ranks = ShardingEnv.single_process(), 1
    base = get_profile("cpu" if on_cpu else "h100")
    inter_source = intra_source = f"the built-in profile {base.name!r}: one process measures no link"
    measured = f"measured on {device.type} with torch {torch.__version__}, {torch.get_num_threads()} threads"
    known = replace(base, full_duplex=not on_cpu, sorts_once=on_cpu)
    if group is not None and group.size() > 1:
        env, num_ranks = ShardingEnv.from_process_group(group, device_type=device.type), group.size()
        inter, inter_source = _link(group, device, measured, full_duplex=not on_cpu)
        intra, intra_source = inter, inter_source
        if local_size is not None and 1 < local_size < num_ranks:
            nodes, _ = dist.new_subgroups(local_size)
            intra, intra_source = _link(nodes, device, measured, full_duplex=not on_cpu)
        known = replace(known, intra=intra, inter=inter)
    topology = Topology(
        world_size=num_ranks, compute_device=device.type, local_world_size=local_size, sum_in_node=False
    )
    trials = make_trials(num_ranks, sizes.batch_size)
    found = measure(trials, env, device, steps=sizes.steps, rounds=sizes.rounds, max_seconds=sizes.seconds)
    profile = fit(known, trials, found, topology)
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
    """Measure latency and bandwidths of a group's collectives alone, on the slowest rank; return them with
    their source.
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
            # Of small messages what they can take: a scheduler's whim is many times that.
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
    """Compute a link from the seconds of all_to_all, all_gather and all_reduce for a small and a large
    message.

    Returns:
        The link, and which of its figures are only bounds. A figure is measured, not a bound, where the
        large message takes at least a tenth longer than the small one.
    """
    others = (size - 1) / size
    # Bytes a rank sends; where sending and receiving exclude each other, both count.
    weights = (others * (1 if full_duplex else 2), others, 2 * others)
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
    """Measure some calls after one to warm up, each with a message that has just been written."""
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
