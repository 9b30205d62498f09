"""The examination of all hosts, under any launcher: what `meshrec doctor` does."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshrec.comms.joining import form_group
from meshrec.health.findings import Finding, Level, merged, worst
from meshrec.health.group import bandwidth, clock, host_link, hosts_of, same_versions, shared_folder
from meshrec.health.host import host_checks, object_store
from meshrec.health.network import network_checks
from meshrec.runs.same_start import describe_places
from meshrec.train.ranks import Ranks, join, launched
from meshrec.train.recipe import Recipe

_MOST_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """The options of an examination.

    Attributes:
        folder: the folder of runs that the hosts are to share; None: checkpoints go elsewhere.
        runs: where each host writes.
        store: the address of the object store for checkpoints, if there is one.
        recipe: the recipe whose data is looked at, if any.
        join_seconds: how long to wait for the other ranks.
    """

    folder: Path | None
    runs: Path
    store: str | None = None
    recipe: Recipe | None = None
    join_seconds: float = 60.0


@dataclass
class Examination:
    """The result of an examination, as this rank knows it.

    Attributes:
        rank: this rank.
        num_ranks: the number of ranks.
        has_met: whether the ranks have met. If not, each rank knows only its own findings.
        findings: the findings, with the ranks that have them.
    """

    rank: int
    num_ranks: int
    has_met: bool = True
    findings: list[tuple[Finding, list[int]]] = field(default_factory=list)

    @property
    def level(self) -> Level:
        """The worst level of all findings."""
        return worst([finding for finding, _ in self.findings])


def examine(wanted: Wanted) -> Examination:
    """Run the checks of this rank and, if a launcher has started several, of all together. Collective."""
    size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    found = _caught("this host", lambda: host_checks(num_ranks=size, local_ranks=local, folder=wanted.runs))
    if wanted.store is not None:
        found.append(object_store(wanted.store))
    ranks: Ranks | None = None
    if launched() and size > 1:
        found += _caught("network", network_checks)
        if worst([each for each in found if each.check in ("address of rank 0", "interface")]) != "fail":
            found.append(_joined(wanted.join_seconds))
        if not dist.is_initialized():
            return Examination(rank, size, has_met=False, findings=[(each, [rank]) for each in found])
    ranks = join("cpu")
    if ranks.size > 1:
        found += _together(ranks, wanted)
    elif wanted.recipe is not None:
        found += _caught("data", lambda: [_data(ranks, wanted.recipe)])
    return Examination(rank, size, findings=merged(ranks.collect(found)))


def _joined(seconds: float) -> Finding:
    """Join the other ranks; the finding says whether that worked."""
    size = os.environ["WORLD_SIZE"]
    try:
        form_group("gloo", timedelta(seconds=seconds))
        dist.monitored_barrier(timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Finding(
            "process group",
            "fail",
            f"the {size} ranks did not meet within {seconds:.0f} s: {str(error).splitlines()[0][:200]}",
            "Look at the other ranks' findings first. Open all ports between the hosts, and set "
            "GLOO_SOCKET_IFNAME.",
        )
    return Finding("process group", "ok", f"{size} ranks have met")


def _together(ranks: Ranks, wanted: Wanted) -> list[Finding]:
    by_host = hosts_of(ranks)
    firsts = [on_host[0] for on_host in by_host]
    found = [
        Finding("hosts", "ok", f"{len(by_host)} of {'/'.join(str(len(each)) for each in by_host)} ranks")
    ]
    found += same_versions(ranks)
    found += clock(ranks, firsts)
    if wanted.folder is not None and len(firsts) > 1:
        found += shared_folder(ranks, wanted.folder)
    found += host_link(ranks, by_host)
    found += bandwidth(ranks, firsts)
    if wanted.recipe is not None:
        found.append(_data(ranks, wanted.recipe))
    return found


def _data(ranks: Ranks, recipe: Recipe | None) -> Finding:
    """Read the data of the recipe, and compare its files with those of the other ranks. Collective."""
    assert recipe is not None
    error, files = None, {}
    try:
        files = describe_places(recipe.data)
        recipe.data.load()
    except Exception as refused:
        error = f"{type(refused).__name__}: {str(refused).splitlines()[0][:200]}"
    every: list[dict[str, str]] = ranks.collect(files)
    if error is not None:
        return Finding(
            "data", "fail", error, "Copy or mount the data on this host, where the recipe names it."
        )
    names = sorted({name for each in every for name in each})
    other = [name for name in names if files.get(name) != every[0].get(name)]
    if other:
        told = "; ".join(f"{name}: {files.get(name, 'missing')}" for name in other[:_MOST_NAMED])
        remedy = "Copy the data of rank 0's host here: ranks need files of the same names and contents."
        return Finding("data", "fail", f"not that of rank 0: {told}", remedy)
    return Finding("data", "ok", f"{len(files)} files as on rank 0" if files else "can be loaded")


def _caught(check: str, function: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings of some checks. A check that cannot be made is a finding, too."""
    found: list[Finding] = []
    try:
        found.extend(function())
    except OSError as error:
        remedy = "Look at the rights of this user, and at the system's log."
        found.append(Finding(check, "warn", f"could not be examined: {error}", remedy))
    return found
