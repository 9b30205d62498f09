"""Check all hosts before a training run, under any launcher, for the command `meshrec doctor`."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from meshrec.cluster.findings import Finding, Level, merge_findings, worst_level
from meshrec.cluster.group import bandwidth, clock, host_link, ranks_by_host, same_versions, shared_folder
from meshrec.cluster.host import host_checks, object_store
from meshrec.cluster.network import network_checks
from meshrec.comms.joining import form_group
from meshrec.comms.launchers import launched
from meshrec.runs.same_start import file_fingerprints
from meshrec.train.ranks import Ranks, join
from meshrec.train.recipe import Recipe

# Maximum number of differing files which a finding names.
_MAX_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class ExaminationOptions:
    """Options for `examine`: what to check.

    Attributes:
        folder: run folder which all hosts must share. None: not checked, because checkpoints go to a store.
        runs: folder which must be writable on every host.
        store: address of the object store for checkpoints, such as "s3://bucket/runs"; None: not checked.
        recipe: recipe whose data every rank must be able to read; None: not checked.
        join_seconds: how long to wait for all ranks to form a process group, in seconds.
    """

    folder: Path | None
    runs: Path
    store: str | None = None
    recipe: Recipe | None = None
    join_seconds: float = 60.0


@dataclass
class Examination:
    """Result of `examine`.

    Attributes:
        rank: this rank.
        num_ranks: number of ranks.
        has_met: whether the ranks could form a process group. If not, ``findings`` contains only this rank's
            findings.
        findings: pairs (finding, ranks which report it). Equal findings from several ranks are merged.
    """

    rank: int
    num_ranks: int
    has_met: bool = True
    findings: list[tuple[Finding, list[int]]] = field(default_factory=list)

    @property
    def level(self) -> Level:
        """Worst level among the findings."""
        return worst_level([finding for finding, _ in self.findings])


def examine(options: ExaminationOptions) -> Examination:
    """Check this host and, if a launcher has started several ranks, also the network and the other hosts.

    Collective. If the ranks cannot form a process group, every rank returns findings on the local host only.

    Args:
        options: what to check.
    """
    is_rank = launched()  # first, because it sets WORLD_SIZE and RANK from MPI and Slurm variables
    size, rank = (int(os.environ.get(name, default)) for name, default in (("WORLD_SIZE", 1), ("RANK", 0)))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    findings = _run_checks(
        "this host", lambda: host_checks(num_ranks=size, local_ranks=local, folder=options.runs)
    )
    # Every host needs access to the store, because all ranks write checkpoints.
    if options.store is not None:
        findings.append(object_store(options.store))
    ranks: Ranks | None = None
    # A failed network check would make joining wait for the whole timeout, so do not try it then.
    if is_rank and size > 1:
        findings += _run_checks("network", network_checks)
        if (
            worst_level(
                [finding for finding in findings if finding.check in ("address of rank 0", "interface")]
            )
            != "fail"
        ):
            findings.append(_join_ranks(options.join_seconds))
        # Without a process group, other ranks' findings are unavailable.
        if not dist.is_initialized():
            return Examination(
                rank, size, has_met=False, findings=[(finding, [rank]) for finding in findings]
            )
    # These checks need no GPU.
    ranks = join("cpu")
    if ranks.size > 1:
        findings += _group_checks(ranks, options)
    elif options.recipe is not None:
        findings += _run_checks("data", lambda: [_check_data(ranks, options.recipe)])
    return Examination(rank, size, findings=merge_findings(ranks.collect(findings)))


def _join_ranks(seconds: float) -> Finding:
    """Try to form a process group of all ranks within ``seconds``, and return a finding on it."""
    size = os.environ["WORLD_SIZE"]
    try:
        form_group("gloo", timedelta(seconds=seconds))
        # Forming the group may succeed although some rank is late; the barrier waits for all ranks and names
        # missing ones.
        dist.monitored_barrier(timeout=timedelta(seconds=seconds))
    except (RuntimeError, ValueError) as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        return Finding(
            "process group",
            "fail",
            f"the {size} ranks did not meet within {seconds:.0f} s: {str(error).splitlines()[0][:200]}",
            "Check the other ranks' findings first. Open all ports between the hosts, and set "
            "GLOO_SOCKET_IFNAME.",
        )
    return Finding("process group", "ok", f"{size} ranks have met")


def _group_checks(ranks: Ranks, options: ExaminationOptions) -> list[Finding]:
    """Run all checks which need several ranks, and return this rank's findings. Collective."""
    by_host = ranks_by_host(ranks)
    firsts = [on_host[0] for on_host in by_host]
    findings = [
        Finding(
            "hosts",
            "ok",
            f"{len(by_host)} of {'/'.join(str(len(on_one_host)) for on_one_host in by_host)} ranks",
        )
    ]
    findings += same_versions(ranks)
    findings += clock(ranks, firsts)
    # With a single host, the folder is shared in any case.
    if options.folder is not None and len(firsts) > 1:
        findings += shared_folder(ranks, options.folder)
    findings += host_link(ranks, by_host)
    findings += bandwidth(ranks, firsts)
    if options.recipe is not None:
        findings.append(_check_data(ranks, options.recipe))
    return findings


def _check_data(ranks: Ranks, recipe: Recipe | None) -> Finding:
    """Load the recipe's data on this rank, and compare the files with those on rank 0. Collective."""
    assert recipe is not None
    error, files = None, {}
    try:
        # Before loading, so ranks can compare files even if loading fails on some rank.
        files = file_fingerprints(recipe.data)
        recipe.data.load()
    except Exception as refused:
        error = f"{type(refused).__name__}: {str(refused).splitlines()[0][:200]}"
    # Collective, so it comes before the return: ranks which could load the data wait in it too.
    every: list[dict[str, str]] = ranks.collect(files)
    if error is not None:
        return Finding(
            "data", "fail", error, "Copy or mount the data on this host, where the recipe names it."
        )
    # Files which any rank has read.
    names = sorted({name for of_rank in every for name in of_rank})
    other = [name for name in names if files.get(name) != every[0].get(name)]
    if other:
        differences = "; ".join(f"{name}: {files.get(name, 'missing')}" for name in other[:_MAX_NAMED])
        remedy = "Copy the data from rank 0's host: ranks need files with the same names and content."
        return Finding("data", "fail", f"differs from rank 0: {differences}", remedy)
    return Finding("data", "ok", f"{len(files)} files as on rank 0" if files else "can be loaded")


def _run_checks(check: str, function: Callable[[], Iterable[Finding]]) -> list[Finding]:
    """Return the findings which ``function`` yields. If it raises OSError, the last finding is a warning."""
    findings: list[Finding] = []
    try:
        # A generator may raise after some findings, which are kept.
        findings.extend(function())
    except OSError as error:
        remedy = "Check this user's permissions and the system log."
        findings.append(Finding(check, "warn", f"the check failed: {error}", remedy))
    return findings
