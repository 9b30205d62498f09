import pytest

from meshrec.cli.output import check_output


def test_what_can_be_written(tmp_path):
    check_output(None)
    check_output(tmp_path / "new.json")


def test_what_cannot(tmp_path):
    with pytest.raises(ValueError, match="is a folder; name the file to write in it"):
        check_output(tmp_path)
    with pytest.raises(ValueError, match=r"cannot be written: there is no folder .*nowhere. Make it first"):
        check_output(tmp_path / "nowhere" / "plan.json")
