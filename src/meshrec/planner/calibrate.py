"""Measures the present machine and process group: where a `HardwareProfile` comes from."""

import math
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401  (the kernels that are timed exist once this is imported)
from meshrec.distributed.collectives import Splits, all_gather, all_to_all
from meshrec.distributed.mesh import Axis
from meshrec.ops.memory import use_huge_pages
from meshrec.planner.hardware import HardwareProfile, Link, get_profile

_WIDTHS = (16, 128)
_BAG = 4
_BATCHES = 4
_ROW_WISE_ADAGRAD = 2
_MESSAGE_BYTES = (1 << 14, 1 << 23)


class Sizes(NamedTuple):
    """How much to measure with. `num_rows` x 512 bytes, the table of all widths, should exceed the caches."""

    num_rows: int = 1 << 18
    num_ids: int = 1 << 17
    stream_bytes: int = 1 << 26
    rounds: int = 5


class _Affine(NamedTuple):
    """seconds = fixed + per_unit * units."""

    fixed: float
    per_unit: float


class _Speeds(NamedTuple):
    read: _Affine
    update: _Affine
    update_id: float
    stream: float
    kernel: float


def calibrate(
    group: dist.ProcessGroup | None = None,
    *,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    sizes: Sizes | None = None,
) -> HardwareProfile:
    """Measures for well under a minute. Every rank of `group` calls it; all get the slowest rank's figures.

    With `local_size` ranks per node, fewer than the default group has, collectives are timed inside the
    nodes and over all ranks; otherwise one measured link serves as both. Without a group the links are the
    ``cpu`` profile's.
    """
    device, sizes = torch.device(device), sizes or Sizes()
    speeds = _speeds(device, sizes)
    figures = torch.tensor([*speeds.read, *speeds.update, *speeds[2:]], dtype=torch.float64, device=device)
    full_duplex = device.type != "cpu"
    measured = f"measured on {device.type} with torch {torch.__version__}, {torch.get_num_threads()} threads"
    if group is not None and group.size() > 1:
        dist.all_reduce(figures, dist.ReduceOp.MAX, group=group)
        inter = _link(group, device, sizes.rounds, full_duplex)
        intra = inter
        if local_size is not None and 1 < local_size < group.size():
            nodes, _ = dist.new_subgroups(local_size)
            intra = _link(nodes, device, sizes.rounds, full_duplex)
        link_source = measured
    else:
        intra, inter = get_profile("cpu").intra, get_profile("cpu").inter
        link_source = "the built-in profile 'cpu': one process measures no link"
    read_row, read_byte, update_row, update_byte, update_id, stream_byte, kernel = figures.tolist()
    return HardwareProfile(
        name="calibrated",
        read_row_seconds=read_row,
        read_bandwidth=1 / read_byte,
        update_row_seconds=update_row,
        update_bandwidth=1 / update_byte,
        update_id_seconds=update_id,
        route_id_seconds=update_id,
        stream_bandwidth=1 / stream_byte,
        kernel_seconds=kernel,
        intra=intra,
        inter=inter,
        full_duplex=full_duplex,
        memory=_memory_per_rank(device, group, local_size),
        sources={"kernels": measured, "intra": link_source, "inter": link_source},
    )


def _speeds(device: torch.device, sizes: Sizes) -> _Speeds:
    """The kernels on this rank. Costs that a fit finds negative count as almost nothing."""
    stream = _stream_seconds(device, sizes)
    bags = sizes.num_ids // _BAG
    kernel = _seconds(_lookup(device, sizes._replace(num_ids=_BAG), _WIDTHS[0], sizes.num_rows), sizes.rounds)
    reads, updates = [], []
    dense = torch.ones(sizes.stream_bytes // 4, device=device)

    def cold(call: Callable[[], object]) -> float:
        """Behind other work on other memory, as in a training step."""
        return _seconds(call, sizes.rounds, between=lambda: dense.mul_(1.0))

    for width in _WIDTHS:
        output = bags * width * 4 * stream
        num_rows = sizes.num_rows * max(_WIDTHS) // width
        reads.append(cold(_lookup(device, sizes, width, num_rows)) - output - kernel)
        spread = cold(_update(device, sizes, width, num_rows))
        few = cold(_update(device, sizes, width, 64))
        distinct = num_rows * -math.expm1(-sizes.num_ids / num_rows)
        updates.append(((spread - few) / distinct, (few - output - kernel) / sizes.num_ids))
    row_bytes = [4.0 * width for width in _WIDTHS]
    read = _fit(row_bytes, [seconds / sizes.num_ids for seconds in reads])
    update = _fit([2 * size for size in row_bytes], [seconds for seconds, _ in updates])
    per_id = max(sum(seconds for _, seconds in updates) / len(updates), 1e-12)
    return _Speeds(read, update, per_id, stream, kernel)


def _fit(sizes: list[float], seconds: list[float]) -> _Affine:
    per_unit = max((seconds[1] - seconds[0]) / (sizes[1] - sizes[0]), 1e-13)
    return _Affine(max(seconds[0] - per_unit * sizes[0], 0.0), per_unit)


def _lookup(device: torch.device, sizes: Sizes, width: int, num_rows: int) -> Callable[[], object]:
    weight, values, offsets, names = _inputs(device, sizes, width, num_rows)
    bags = len(offsets) - 1
    return lambda: torch.ops.meshrec.tbe_forward(
        [weight],
        next(values),
        offsets,
        None,
        None,
        1,
        [0],
        [0],
        [0],
        False,
        bags,
        torch.float32,
        False,
        names,
    )


def _update(device: torch.device, sizes: Sizes, width: int, num_rows: int) -> Callable[[], object]:
    weight, values, offsets, _ = _inputs(device, sizes, width, num_rows)
    gradient = torch.ones(len(offsets) - 1, width, device=device)
    state = torch.zeros(num_rows, device=device)
    hyper = torch.zeros(12, dtype=torch.float64)
    hyper[0], hyper[1], hyper[8] = 1e-6, 1e-8, 1.0
    optimizer = _ROW_WISE_ADAGRAD
    return lambda: torch.ops.meshrec.tbe_update(
        gradient,
        next(values),
        offsets,
        None,
        None,
        1,
        [0],
        [0],
        [0],
        False,
        [width],
        [weight],
        [state],
        optimizer,
        hyper,
        None,
        [],
    )


def _inputs(
    device: torch.device, sizes: Sizes, width: int, num_rows: int
) -> tuple[Tensor, Iterator[Tensor], Tensor, Tensor]:
    """A table, ids that differ from call to call, as batches do, their bags, and names."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    weight = torch.empty(num_rows, width, device=device)
    use_huge_pages(weight)
    weight.fill_(1.0)
    values = [
        torch.randint(0, num_rows, (sizes.num_ids,), generator=generator).to(device) for _ in range(_BATCHES)
    ]
    offsets = torch.arange(0, sizes.num_ids + 1, _BAG).to(device)
    names = torch.tensor(list(b"table\tfeature\n"), dtype=torch.uint8)
    return weight, cycle(values), offsets, names


def _stream_seconds(device: torch.device, sizes: Sizes) -> float:
    """Seconds per byte that is read or written in order."""
    source = torch.ones(sizes.stream_bytes // 4, device=device)
    target = torch.empty_like(source)
    return _seconds(lambda: target.copy_(source), sizes.rounds) / (2 * sizes.stream_bytes)


def _link(group: dist.ProcessGroup, device: torch.device, rounds: int, full_duplex: bool) -> Link:
    """Latency and bandwidths of a group's collectives; the slowest rank's."""
    size = group.size()
    axis = Axis(size=size, rank=group.rank(), group=group)
    times = torch.zeros(3, 2, dtype=torch.float64, device=device)
    for column, num_bytes in enumerate(_MESSAGE_BYTES):
        calls: list[Callable[[], object]] = [
            partial(_exchange, _buffers(num_bytes, size, device), axis),
            partial(_gather, _buffers(num_bytes, size, device), axis),
            partial(_reduce, _buffers(num_bytes, size, device), group),
        ]
        for row, call in enumerate(calls):
            times[row, column] = _seconds(call, rounds)
    dist.all_reduce(times, dist.ReduceOp.MAX, group=group)
    others = (size - 1) / size
    # Bytes a rank sends; where sending and receiving exclude each other, both count.
    weights = (others * (1 if full_duplex else 2), others, 2 * others)
    bandwidths, latencies = [], []
    for weight, (small, large) in zip(weights, times.tolist(), strict=True):
        fit = _fit([weight * num_bytes for num_bytes in _MESSAGE_BYTES], [small, large])
        bandwidths.append(1 / fit.per_unit)
        latencies.append(fit.fixed)
    return Link(
        latency=max(latencies[0], 1e-7),
        all_to_all=bandwidths[0],
        reduce_scatter=bandwidths[1],
        all_reduce=bandwidths[2],
    )


def _buffers(num_bytes: int, size: int, device: torch.device) -> Iterator[Tensor]:
    """Buffers in turn, so that none is in a cache when it is sent: neither is what a step has just made."""
    elements = num_bytes // 4 // size * size
    return cycle([torch.ones(elements, device=device) for _ in range(_BATCHES)])


def _exchange(buffers: Iterator[Tensor], axis: Axis) -> None:
    sent = next(buffers)
    splits = [sent.numel() // axis.size] * axis.size
    all_to_all(sent, Splits(splits, splits), axis, "calibration").wait()


def _gather(buffers: Iterator[Tensor], axis: Axis) -> None:
    whole = next(buffers)
    all_gather(whole[: whole.numel() // axis.size], axis, "calibration").wait()


def _reduce(buffers: Iterator[Tensor], group: dist.ProcessGroup) -> None:
    dist.all_reduce(next(buffers), dist.ReduceOp.MAX, group=group)


def _seconds(call: Callable[[], object], rounds: int, between: Callable[[], object] | None = None) -> float:
    """The median of some calls, after one to warm up; ``between`` runs before each and is not timed."""
    call()
    times = []
    for _ in range(rounds):
        if between is not None:
            between()
        _synchronize()
        started = time.perf_counter()
        call()
        _synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[len(times) // 2]


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _memory_per_rank(device: torch.device, group: dist.ProcessGroup | None, local_size: int | None) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    ranks = local_size or (group.size() if group is not None else 1)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
