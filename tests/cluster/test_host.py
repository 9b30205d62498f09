"""Checks of one host, on hosts that are made up."""

import resource
import shutil
from collections import namedtuple

import pytest
import torch

from meshrec.cluster import host
from meshrec.cluster.findings import Finding, merge_findings, worst_level

Usage = namedtuple("Usage", "total used free")


def test_this_host_is_examined(tmp_path):
    found = list(host.host_checks(num_ranks=2, local_ranks=1, folder=tmp_path / "runs"))
    names = ["kernels", "cores", "memory", "huge pages", "/dev/shm", "open files", "folder of runs"]
    assert [each.check for each in found] == names
    assert all(each.remedy for each in found if each.level != "ok")


def made_up(tmp_path, monkeypatch, **files):
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(host, "_PROC", tmp_path)
    monkeypatch.setattr(host, "_SYS", tmp_path)


def test_memory(tmp_path, monkeypatch):
    made_up(tmp_path, monkeypatch, meminfo="MemTotal: 9 kB\nMemAvailable: 3145728 kB\n")
    assert host.memory(3).level == "ok"
    assert host.memory(4) == Finding(
        "memory",
        "fail",
        "3.0 GiB free for 4 ranks",
        "Give the host or the container more memory, or start fewer ranks there.",
    )
    limits = {"fs__cgroup__memory.max": str(2 << 30), "fs__cgroup__memory.current": str(1 << 30)}
    made_up(tmp_path, monkeypatch, **limits)
    assert host.memory(2).observation == "1.0 GiB free for 2 ranks"  # a container's
    made_up(tmp_path, monkeypatch, sys__vm__overcommit_memory="2\n")
    assert host.memory(1).level == "warn"
    monkeypatch.setattr(host, "_PROC", tmp_path / "none")
    monkeypatch.setattr(host, "_SYS", tmp_path / "none")
    assert host.memory(1).level == "ok"


@pytest.mark.parametrize(
    ("text", "level"), [("always [madvise] never", "ok"), ("always madvise [never]", "warn")]
)
def test_huge_pages(tmp_path, monkeypatch, text, level):
    made_up(tmp_path, monkeypatch, kernel__mm__transparent_hugepage__enabled=text)
    assert host.huge_pages().level == level


def test_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert host.files(8).level == "ok"
    told = host.files(1024)
    assert told.level == "fail"
    assert "ulimit -n 65536" in told.remedy
    assert "the hard limit is 4096" in told.remedy
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(64 << 20, 0, 64 << 20))
    assert host.shared_memory().level == "warn"
    assert host.disk(tmp_path).level == "fail"


def test_cores_and_kernels(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 64)
    assert host.cores(64).remedy == "Set OMP_NUM_THREADS=1 on every rank."
    monkeypatch.setattr(host, "has_kernels", False)
    assert host.kernels().level == "warn"


def test_findings_are_merged():
    well, ill = Finding("a", "ok", "fine"), Finding("b", "fail", "broken", "Mend it.")
    assert merge_findings([[well], [well, ill]]) == [(well, [0, 1]), (ill, [1])]
    assert worst_level([well, ill]) == "fail"
    assert worst_level([]) == "ok"


def test_an_object_store(tmp_path):
    assert host.object_store(f"file://{tmp_path}/store").level == "ok"
    (tmp_path / "file").write_text("")
    told = host.object_store(f"file://{tmp_path}/file")
    assert told.level == "fail"
    assert told.remedy.startswith("Check the address")
