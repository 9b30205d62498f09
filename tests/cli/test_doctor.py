import pytest

from meshrec.cli.doctor import main
from meshrec.cluster import host
from meshrec.cluster.findings import Finding


def test_one_process_is_examined(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        host, "shared_memory", lambda: Finding("/dev/shm", "warn", "64 MiB", "Make it larger.")
    )
    assert main(["tests/train/small.py:small", "--out", str(tmp_path / "runs")]) == 0
    printed = capsys.readouterr().out
    assert "1 ranks" in printed
    assert "Make it larger." in printed
    assert "can be loaded" in printed
    assert main(["--out", str(tmp_path / "runs"), "--strict"]) == 1


def test_what_fails_sets_the_exit_code(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "memory", lambda _: Finding("memory", "fail", "none", "Buy some."))
    assert main(["--out", str(tmp_path)]) == 1
    assert "Buy some." in capsys.readouterr().out


def test_wrong_options(capsys):
    with pytest.raises(SystemExit):
        main(["--no-such"])
    assert "--no-such" in capsys.readouterr().err
