import importlib

import pytest

from meshrec.cli import unread
from meshrec.cli.arguments import check_output


def test_what_can_be_written(tmp_path):
    check_output(None, force=False)
    check_output(tmp_path / "new.json", force=False)
    (tmp_path / "old.json").touch()
    check_output(tmp_path / "old.json", force=True)


def test_what_cannot(tmp_path):
    with pytest.raises(ValueError, match="folder"):
        check_output(tmp_path, force=True)
    with pytest.raises(ValueError, match="written"):
        check_output(tmp_path / "nowhere" / "plan.json", force=True)


@pytest.mark.parametrize(
    "error", ["rank 0: BrokenPipeError: 32", "a rank ended without an error. Its log is x"]
)
def test_ranks_whose_output_nobody_reads_are_no_failure(monkeypatch, error):
    monkeypatch.setattr(unread, "has_no_reader", lambda: True)
    with pytest.raises(BrokenPipeError):
        unread.raise_if_unread(error)
    unread.raise_if_unread("rank 0: KeyError: 'x'")
    monkeypatch.setattr(unread, "has_no_reader", lambda: False)
    unread.raise_if_unread(error)


@pytest.mark.parametrize(
    ("line", "path", "option"),
    [
        ("plan dlrm --out FILE", "plan.json", "--out"),
        ("plan dlrm --html FILE", "plan.html", "--html"),
        ("evaluate RUN --data x --json FILE", "m.json", "--json"),
        ("predict RUN --data x --out FILE", "scores.csv", "--out"),
        ("recommend RUN --out FILE", "lists.csv", "--out"),
        ("embed RUN --feature u --out FILE", "u.npy", "--out"),
        ("embed RUN --feature u --out DIR/u.faiss", "u.parquet", "--out"),
        ("calibrate FILE --quick", "hardware.json", "FILE"),
        ("export RUN --out p --tower item --vectors FILE", "v.npy", "--vectors"),
        ("inspect x.csv --label y --out DIR/recipe.py", "recipe.html", "--page"),
        ("inspect x.csv --label y --out FILE", "recipe.py", "--out"),
        ("leaderboard x.csv --label y --out FILE", "board.html", "--out"),
        ("launch slurm dlrm --script FILE", "job.sbatch", "--script"),
        ("recipe to-yaml movielens_dlrm --out FILE", "r.yaml", "--out"),
    ],
)
def test_no_command_replaces_a_file_of_the_user(tmp_path, line, path, option):
    file = tmp_path / path
    file.write_text("of the user")
    command, *words = [word.replace("FILE", str(file)).replace("DIR", str(tmp_path)) for word in line.split()]
    with pytest.raises(ValueError, match=f"{path}.*{option}.*--force"):
        importlib.import_module(f"meshrec.cli.{command}").main(words)
    assert file.read_text() == "of the user"
