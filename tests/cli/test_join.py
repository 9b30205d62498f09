import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.cli import join
from tests.data.broker_servers import redis_server  # noqa: F401 - a fixture


def write(folder, table):
    folder.mkdir()
    pq.write_table(table, folder / "0001.parquet")


OPTIONS = ["--key", "request", "--time", "ts", "--label", "clicked", "--window-seconds", "60", "--once"]


def test_folders_are_joined(tmp_path, capsys):
    write(tmp_path / "shown", pa.table({"request": ["a", "b", "c"], "ts": [0, 5, 99]}))
    write(tmp_path / "clicks", pa.table({"request": ["b", "x", "c"], "ts": [30, 40, 99]}))
    names = [str(tmp_path / name) for name in ("shown", "clicks", "labelled")]
    for _ in range(2):
        assert join.main([*names, *OPTIONS]) == 0
        printed = capsys.readouterr().out
        assert "labelled: 2 rows; 2 records wait, 1 unmatched actions" in printed
    (path,) = (tmp_path / "labelled").glob("*.arrow")
    with pa.ipc.open_file(str(path)) as file:
        assert file.read_all()["clicked"].to_pylist() == [1, 0]
    with pytest.raises(ValueError, match="at_once"):
        join.main([*names, *OPTIONS, "--negatives", "at_once"])


def test_options_reach_the_join(tmp_path):
    write(tmp_path / "shown", pa.table({"request": ["a", None], "ts": [0, 1]}))
    write(tmp_path / "clicks", pa.table({"request": ["a"], "ts": [1]}))
    names = [str(tmp_path / name) for name in ("shown", "clicks", "labelled")]
    aside = tmp_path / "aside.jsonl"
    words = ["--on-error", "skip", "--set-aside", str(aside), "--clock-lag-seconds", "0", "--time-unit", "ms"]
    assert join.main([*names, *OPTIONS, *words]) == 0
    assert '"problem": "invalid"' in aside.read_text()
    (path,) = (tmp_path / "labelled").glob("*.arrow")
    with pa.ipc.open_file(str(path)) as file:
        assert file.read_all().num_rows == 1


def test_actions_may_come_from_redis(tmp_path, redis_server):  # noqa: F811
    write(tmp_path / "shown", pa.table({"request": ["a", "b", "c"], "ts": [0, 5, 99]}))
    for request, ts in (("b", 30), ("x", 40), ("c", 99)):
        redis_server.client.xadd("clicks", {"request": request, "ts": ts})
    names = [str(tmp_path / "shown"), redis_server.address("clicks"), str(tmp_path / "labelled")]
    assert join.main([*names, *OPTIONS]) == 0
    (path,) = (tmp_path / "labelled").glob("*.arrow")
    with pa.ipc.open_file(str(path)) as file:
        assert file.read_all()["clicked"].to_pylist() == [1, 0]


def test_a_missing_option_is_named(capsys):
    with pytest.raises(SystemExit):
        join.main(["shown", "clicks", "labelled", *OPTIONS[2:]])
    assert "--key" in capsys.readouterr().err
