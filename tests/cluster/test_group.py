"""Checks that ranks make together, in a pool of ranks that are sound."""

import os
import socket

from meshrec.cluster import ExaminationOptions, examine
from meshrec.cluster.group import bandwidth, bandwidth_finding, clock, clock_finding, ranks_by_host
from meshrec.train import join


def examined(folder, recipe, changed_rank):
    ranks = join("cpu")
    environment = {"RANK": str(ranks.rank), "WORLD_SIZE": str(ranks.size)}
    os.environ.update(environment)
    name = socket.gethostname
    socket.gethostname = lambda: f"host{ranks.rank % 2}"
    try:
        from meshrec.runs import same_start

        real = same_start.versions()
        if ranks.rank == changed_rank:
            from meshrec.cluster import group

            group.versions = lambda: {**real, "torch": "1.0"}
        found = examine(ExaminationOptions(folder=folder, runs=folder, recipe=recipe))
        return [(each, on) for each, on in found.findings], found.level
    finally:
        socket.gethostname = name
        for each in environment:
            del os.environ[each]


def test_sound_ranks(ranks, tmp_path, small):
    findings, level = ranks(2).run(examined, tmp_path / "runs", small(), None)[0]
    by_name = {each.check: each for each, _ in findings}
    assert level != "fail", findings
    assert by_name["hosts"].observation == "2 of 1/1 ranks"
    assert by_name["shared folder"].level == by_name["clock"].level == by_name["data"].level == "ok"
    assert "Gb/s from rank" in by_name["bandwidth"].observation
    assert not (tmp_path / "runs").exists()  # it was made to look at, and removed


def test_another_version_is_named(ranks, tmp_path):
    findings, level = ranks(2).run(examined, tmp_path, None, 1)[0]
    told = [(each, on) for each, on in findings if each.check == "version of torch"]
    assert level == "fail"
    assert len(told) == 1
    assert told[0][0].remedy.startswith("Install the same torch")
    assert [on for each, on in findings if each.check == "versions"] == [[0]]


def test_judgements():
    assert clock_finding(0.2).level == "ok"
    assert "30.0 s behind" in clock_finding(-30).observation
    assert "30.0 s ahead" in clock_finding(30).observation
    assert bandwidth_finding(1e9, 1e9, 0).level == "ok"
    assert bandwidth_finding(1e8, 1e9, 0).level == "warn"
    assert bandwidth_finding(5e7, 6e7, 0).level == "warn"


def alone():
    ranks = join("cpu")
    return [each.level for each in (*clock(ranks, [0]), *bandwidth(ranks, [0]))], len(ranks_by_host(ranks))


def test_one_host(ranks):
    assert ranks(2).run(alone)[0] == (["ok", "ok"], 1)
