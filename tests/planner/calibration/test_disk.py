"""The figures of a disk."""

from meshrec.cli.calibrate import with_disk
from meshrec.planner import HardwareProfile, get_profile
from meshrec.planner.calibration.calibrate import measure_disk


def test_a_disk_is_measured_and_its_file_removed(tmp_path):
    reads, writes = measure_disk(tmp_path, num_rows=500, batches=1)
    assert reads > 0
    assert writes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_profile_keeps_the_figures(tmp_path):
    made = with_disk(get_profile("cpu"), tmp_path, quick=True)
    made.save(tmp_path / "profile.json")
    read = HardwareProfile.load(tmp_path / "profile.json")
    assert read.disk_reads == made.disk_reads > 0
    assert read.disk_writes == made.disk_writes > 0
    assert str(tmp_path) in read.sources["disk"]
