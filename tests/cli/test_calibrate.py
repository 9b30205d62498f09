from meshrec.cli.calibrate import CalibrateOptions, run
from meshrec.planner import get_profile


def test_the_profile_is_saved_under_its_name(tmp_path, capsys):
    run(CalibrateOptions(out=tmp_path / "hardware.json", name="mine", quick=True))
    profile = get_profile(str(tmp_path / "hardware.json"))
    assert (profile.name, profile.device) == ("mine", "cpu")
    assert "read_bandwidth" in capsys.readouterr().out
