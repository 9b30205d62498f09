import pytest

from meshrec.cli.calibrate import CalibrateOptions, run
from meshrec.planner import get_profile


def test_mistakes_are_named_before_the_measuring(tmp_path):
    with pytest.raises(ValueError, match="--device"):
        run(CalibrateOptions(device="tpu"))
    with pytest.raises(ValueError, match=r"local_world_size.*0.*1"):
        run(CalibrateOptions(ranks_per_node=0))
    with pytest.raises(ValueError, match="folder"):
        run(CalibrateOptions(out=tmp_path / "nowhere" / "hardware.json"))


def test_the_profile_is_saved_under_its_name(tmp_path, capsys):
    run(CalibrateOptions(out=tmp_path / "hardware.json", name="mine", quick=True))
    profile = get_profile(str(tmp_path / "hardware.json"))
    assert (profile.name, profile.device) == ("mine", "cpu")
    shown = capsys.readouterr().out
    assert "read_bandwidth" in shown
    assert "source of split_id_seconds" in shown
    assert "not determined" in profile.sources["split_id_seconds"]
