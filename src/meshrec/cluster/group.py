"""Checks which need several ranks. All ranks run every check. A rank gets only findings on its own host."""

import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from meshrec.cluster.findings import Finding
from meshrec.comms.host_link import link_or_reason
from meshrec.durable import CreatedPath
from meshrec.runs.host_folder import ranks_not_seeing
from meshrec.runs.same_start import versions
from meshrec.train.ranks import Ranks

# Largest allowed clock offset in seconds. File time stamps and S3 signatures tolerate more, lock files do
# not.
_MAX_SKEW = 1.0
# Round trips per host in the clock check.
_PINGS = 8
# Message size in the bandwidth check.
_BYTES = 4 << 20
# A host gets a warning if its bandwidth is below this fraction of the fastest host's.
_SLOW_LINK = 0.5
# Bytes per second (0.8 Gb/s). With less, exchanges take longer than the computation of most models.
_SLOW_NETWORK = 100e6


def same_versions(ranks: Ranks) -> Iterator[Finding]:
    """Check that this rank has the same package versions as most ranks. Collective.

    Yields:
        A failure for every package whose version on this rank differs from most ranks; if there is none, a
        single finding with this rank's versions.
    """
    mine = versions()
    every: list[dict[str, str]] = ranks.collect(mine)
    # The most frequent version, so that only the odd hosts report a failure.
    usual = {name: statistics.mode(of_rank[name] for of_rank in every) for name in mine}
    for name, value in mine.items():
        if value != usual[name]:
            remedy = f"Install the same {name} on all hosts: other versions do not train together."
            yield Finding(f"version of {name}", "fail", f"{value}; most ranks have {usual[name]}", remedy)
    if mine == usual:
        short = ", ".join(f"{name} {mine[name].split()[0]}" for name in ("meshrec", "torch"))
        yield Finding("versions", "ok", short)


def clock(ranks: Ranks, firsts: Sequence[int]) -> Iterator[Finding]:
    """Compare the clock of every host with the clock of rank 0. Collective.

    Args:
        ranks: all ranks.
        firsts: first rank on every host.

    Yields:
        A single finding on the first rank of every host. Other ranks get no finding.
    """
    # The offset measured in a round trip is wrong by at most half its duration, so use the fastest round
    # trip.
    word = torch.zeros(1, dtype=torch.float64)
    group = ranks.control
    for rank in firsts[1:]:
        offsets = []
        for _ in range(_PINGS if ranks.rank in (0, rank) else 0):
            # Rank 0 answers with its time.
            if ranks.is_first:
                dist.recv(word, rank, group=group)
                word.fill_(time.time())
                dist.send(word, rank, group=group)
            else:
                sent = time.time()
                dist.send(word, 0, group=group)
                dist.recv(word, 0, group=group)
                arrived = time.time()
                # As in NTP: rank 0's time is compared with the round trip's midpoint.
                offsets.append((arrived - sent, (sent + arrived) / 2 - float(word)))
        if offsets:
            yield clock_finding(min(offsets)[1])
    if ranks.is_first:
        yield Finding("clock", "ok", "reference for other hosts")


def clock_finding(seconds: float) -> Finding:
    """Return the finding for a clock which is ``seconds`` ahead of rank 0's clock (behind, if negative)."""
    direction = "ahead of" if seconds > 0 else "behind"
    if abs(seconds) <= _MAX_SKEW:
        return Finding("clock", "ok", f"within {_MAX_SKEW:.0f} s of rank 0's")
    return Finding(
        "clock",
        "fail",
        f"{abs(seconds):.1f} s {direction} rank 0's: object stores refuse requests, and logs and "
        "locks are unreliable",
        "Run chrony or systemd-timesyncd on every host (`timedatectl set-ntp true`).",
    )


def shared_folder(ranks: Ranks, folder: Path) -> Iterator[Finding]:
    """Check that ``folder`` is the same folder on this rank and on rank 0. Collective.

    Folders created for the check are removed again.
    """
    # Only rank 0 creates the folder; other ranks must see it.
    created = CreatedPath.create_folders(folder) if ranks.is_first else []
    blind, error = ranks_not_seeing(folder, ranks)
    for folder_created in created:
        folder_created.remove()
    remedy = "Mount one folder on all hosts and give it with --out, or give an object store (--out s3://bucket/runs)."
    if error is not None:
        yield Finding("shared folder", "fail", error, remedy)
    elif ranks.rank in blind:
        yield Finding("shared folder", "fail", f"{folder.absolute()} is not rank 0's folder", remedy)
    else:
        yield Finding("shared folder", "ok", str(folder.absolute()))


def host_link(ranks: Ranks, by_host: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """Check whether the ranks on this host can read each other's memory (host link). Collective.

    If they cannot, their messages go through sockets, which is slower.

    Args:
        ranks: all ranks.
        by_host: ranks on every host.

    Yields:
        A single finding.
    """
    # new_group is collective over all ranks: every rank creates the groups of all hosts, in the same order.
    for on_host in by_host:
        group = dist.new_group(list(on_host), backend="gloo") if len(on_host) > 1 else None
        if ranks.rank not in on_host:
            continue
        if group is None:
            yield Finding("host link", "ok", "not needed: one rank on this host")
            continue
        link, reason = link_or_reason(group)
        if link is not None:
            link.close()
            yield Finding("host link", "ok", f"{len(on_host)} ranks read each other's memory")
            continue
        yield Finding(
            "host link",
            "warn",
            f"messages between ranks of this host go through sockets ({reason})",
            "Run the ranks of a host as one user in one PID namespace (one container for all, `docker run "
            "--pid`, shareProcessNamespace), with the kernels, and without MESHREC_HOST_LINK=0.",
        )


def bandwidth(ranks: Ranks, firsts: Sequence[int]) -> Iterator[Finding]:
    """Measure the network bandwidth from every host to the next host, one pair of hosts at a time.
    Collective.

    Args:
        ranks: all ranks.
        firsts: first rank on every host. These ranks send and receive.

    Yields:
        A single finding on the first rank of every host. Other ranks get no finding, unless there is only one
        host.
    """
    if len(firsts) < 2:
        yield Finding("bandwidth", "ok", "one host: not measured")
        return
    block, group, mine = torch.zeros(_BYTES, dtype=torch.uint8), ranks.control, 0.0
    for number, receiver in enumerate(firsts):
        # The host before the first is the last, so every host receives once.
        sender = firsts[number - 1]
        for measured in (False, True):  # the first round opens the connection
            if ranks.rank == sender:
                dist.send(block, receiver, group=group)
                dist.recv(block[:1], receiver, group=group)
            elif ranks.rank == receiver:
                began = time.perf_counter()
                dist.recv(block, sender, group=group)
                mine = _BYTES / (time.perf_counter() - began) if measured else 0.0
                dist.send(block[:1], sender, group=group)
        # One pair at a time, so that measurements do not disturb each other.
        ranks.wait_for_all()
    # Ranks which did not receive have sent 0.
    every = [rate for rate in ranks.collect(mine) if rate]
    if ranks.rank in firsts:
        before = firsts[firsts.index(ranks.rank) - 1]
        yield bandwidth_finding(mine, max(every), before)


def bandwidth_finding(rate: float, best: float, sender: int) -> Finding:
    """Return the finding for the bandwidth with which this rank receives.

    Args:
        rate: bytes per second received by this rank.
        best: bytes per second on the fastest host.
        sender: rank which sends to this rank.
    """
    observation = f"{8 * rate / 1e9:.2f} Gb/s from rank {sender}"
    # A slow host among fast hosts is probably a fault; equally slow hosts are a slow network.
    if rate < _SLOW_LINK * best:
        remedy = "Check this host's cable, port and shaping (ethtool, tc qdisc): every step waits for it."
        return Finding(
            "bandwidth", "warn", f"{observation}, where another host gets {8 * best / 1e9:.2f}", remedy
        )
    if rate < _SLOW_NETWORK:
        remedy = "Choose a faster interface (GLOO_SOCKET_IFNAME), or plan for this one (`meshrec calibrate`)."
        return Finding("bandwidth", "warn", observation, remedy)
    return Finding("bandwidth", "ok", observation)


def ranks_by_host(ranks: Ranks) -> list[list[int]]:
    """Return the ranks on every host, as lists. Collective.

    Ranks are on the same host if they have the same host name, boot ID and GROUP_RANK, which torchrun sets.
    """
    # Host names alone may be equal on different hosts, for example in containers.
    boot = Path("/proc/sys/kernel/random/boot_id")
    name = socket.gethostname(), boot.read_text() if boot.exists() else ""
    by_host: dict[object, list[int]] = {}
    for rank, host in enumerate(ranks.collect((*name, os.environ.get("GROUP_RANK")))):
        by_host.setdefault(host, []).append(rank)
    return list(by_host.values())
