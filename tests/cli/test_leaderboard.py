import pyarrow.parquet as pq
import pytest

from meshrec.cli import leaderboard
from meshrec.train.trees import has_trees
from tests.cli.test_inspect import ratings


def test_models_stand_side_by_side(tmp_path, capsys):
    pq.write_table(ratings(3000), tmp_path / "ratings.parquet")
    out = tmp_path / "board.html"
    arguments = [str(tmp_path / "ratings.parquet"), "--label", "stars", "--time", "time", "--out", str(out)]
    assert leaderboard.main([*arguments, "--models", "wide_deep", "dlrm", "--epochs", "1"]) == 0
    told = capsys.readouterr().out
    for name in ["wide_deep", "dlrm", "logistic regression"] + ["LightGBM"] * has_trees():
        assert name in told
        assert name in out.read_text()
    assert str(out) in told
    with pytest.raises(ValueError, match="--force"):
        leaderboard.main(arguments)


def test_models_that_are_not_there_are_named(tmp_path):
    pq.write_table(ratings(300), tmp_path / "ratings.parquet")
    arguments = [str(tmp_path / "ratings.parquet"), "--label", "stars", "--out", str(tmp_path / "a.html")]
    with pytest.raises(ValueError, match=r"'bert'.*wide_deep"):
        leaderboard.main([*arguments, "--models", "bert"])
    with pytest.raises(ValueError, match=r"--epochs.*0"):
        leaderboard.main([*arguments, "--epochs", "0"])
