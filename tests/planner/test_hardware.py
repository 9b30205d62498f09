import json
from dataclasses import replace

import pytest

from meshrec.planner.hardware import BUILTIN_PROFILES, HardwareProfile, Link, get_profile, with_memory

OPTIONAL = {"split_id_seconds", "scan_id_seconds", "scan_bag_seconds", "statistics_seconds"}


def test_a_profile_survives_its_file(tmp_path, profile):
    profile.save(tmp_path / "hardware.json")
    assert HardwareProfile.load(tmp_path / "hardware.json") == profile
    assert get_profile(str(tmp_path / "hardware.json")) == profile


@pytest.mark.parametrize("name", sorted(BUILTIN_PROFILES))
def test_every_built_in_figure_has_a_source(name):
    profile = get_profile(name)
    figures = {
        "read_bandwidth",
        "update_bandwidth",
        "stream_bandwidth",
        "read_row_seconds",
        "update_row_seconds",
    }
    figures |= {"update_id_seconds", "route_id_seconds", "kernel_seconds", "intra", "inter", "memory"}
    figures |= {each for each in OPTIONAL if getattr(profile, each) > 0}
    assert set(profile.sources) == figures


def test_faster_machines_are_faster():
    a100, h100, h200 = (get_profile(name) for name in ("a100", "h100", "h200"))
    assert a100.read_bandwidth < h100.read_bandwidth < h200.read_bandwidth
    assert a100.inter.all_to_all < h100.inter.all_to_all
    assert h100.memory < h200.memory


def test_overrides_change_only_what_they_name(profile):
    changed = profile.with_bandwidths(7.0, None)
    assert (changed.intra.all_to_all, changed.intra.latency) == (7.0, profile.intra.latency)
    assert changed.inter == profile.inter
    assert with_memory(profile, 5).memory == 5
    assert profile.named("x").name == "x"


def test_files_may_leave_out_what_most_machines_lack(profile):
    values = profile.to_json()
    for name in (*OPTIONAL, "sorts_once", "full_duplex", "sources"):
        del values[name]
    assert HardwareProfile.from_json(values) == profile


def test_bad_profiles_are_refused(profile):
    with pytest.raises(ValueError, match=r"'h300'.*\['a100'.*'cpu'"):
        get_profile("h300")
    with pytest.raises(ValueError, match=r"read_bandwidth.*0"):
        replace(profile, read_bandwidth=0)
    with pytest.raises(ValueError, match=r"kernel_seconds.*-1"):
        replace(profile, kernel_seconds=-1)
    with pytest.raises(ValueError, match="scan_id_seconds"):
        replace(profile, scan_id_seconds=float("nan"))
    with pytest.raises(ValueError, match=r"Link\.all_to_all.*0"):
        Link(latency=0, all_to_all=0, reduce_scatter=1, all_reduce=1)
    with pytest.raises(ValueError, match=r"HardwareProfile\.device.*'tpu'.*'cpu'.*'cuda'"):
        replace(profile, device="tpu")
    old = profile.to_json()
    old["dvice"] = old.pop("device")
    message = r"unknown: \['dvice'\], missing: \['device'\]. Measure a profile with `meshrec calibrate`"
    with pytest.raises(ValueError, match=message):
        HardwareProfile.from_json(old)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, r"mine\.json"),
        (
            {"intra": {"speed": 1}},
            r"mine\.json.*'speed'",
        ),
    ],
)
def test_files_that_are_no_profiles_are_named(tmp_path, profile, values, message):
    (tmp_path / "mine.json").write_text(json.dumps(values and profile.to_json() | values))
    with pytest.raises(ValueError, match=message):
        get_profile(str(tmp_path / "mine.json"))
