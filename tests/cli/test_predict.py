import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli import predict
from meshrec.cli.train import main as train
from meshrec.runs.score_file import write_scores
from meshrec.runs.scoring import load_scorer
from meshrec.train import RunFolder, Scored, join
from tests.cli.scoring_ranks import on_a_rank
from tests.train.clicks import clicks, write_clicks


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clicks")
    write_clicks(folder / "train.parquet", 1500, seed=0)
    write_clicks(folder / "test.parquet", 1300, seed=1)
    source = ["tests/train/clicks.py:recipe", "--data.folder", str(folder)]
    assert train([*source, "--runs", str(folder), "--name", "r", "--quiet"]) == 0
    return folder / "r"


def scores_of(run, out, *more):
    data = str(run.parent / "test.parquet")
    assert predict.main([str(run), "--data", data, "--out", str(out), *more]) == 0
    return pq.read_table(out)


def test_scores_are_those_of_one_process_on_any_number_of_ranks(run, tmp_path, capsys, ranks):
    one = scores_of(run, tmp_path / "1.parquet")
    for num in (2, 3):
        out = tmp_path / f"{num}.parquet"
        found = ranks(num).run(on_a_rank, run, run.parent / "test.parquet", out)
        assert found == [0] + [[]] * (num - 1)
        assert one.equals(pq.read_table(out))
    data = clicks(1300, seed=1)
    assert one.column_names == ["user", "tags", "score"]
    assert one["user"].to_pylist() == data["user"].to_pylist()
    assert one["tags"].to_pylist() == data["tags"].to_pylist()
    scorer = load_scorer(RunFolder(run), join("cpu"), run.parent / "test.parquet", labelled=True)
    (batch,) = scorer.dataset.train.batches(1300)
    with torch.no_grad():
        expected = torch.sigmoid(scorer.model(batch.dense, batch.sparse)).reshape(-1)
    np.testing.assert_allclose(one["score"].to_numpy(), expected.numpy(), rtol=1e-6)
    assert "1,300 rows" in capsys.readouterr().out


def test_no_optimizer_of_the_dense_part_is_built(run, tmp_path, monkeypatch):
    """The constructor of torch's optimizers imports Dynamo."""
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", None)
    assert len(scores_of(run, tmp_path / "s.parquet")) == 1300


def test_other_columns_can_be_kept_and_csv_be_written(run, tmp_path):
    out = tmp_path / "s.csv"
    data = str(run.parent / "test.parquet")
    assert predict.main([str(run), "--data", data, "--out", str(out), "--keep", "clicked", "user"]) == 0
    found = csv.read_csv(out)
    assert found.column_names == ["clicked", "user", "score"]
    assert found["user"].to_pylist() == clicks(1300, seed=1)["user"].to_pylist()


def test_data_without_labels_is_scored(run, tmp_path):
    pq.write_table(clicks(50).drop_columns(["clicked"]), tmp_path / "new.parquet")
    args = [str(run), "--data", str(tmp_path / "new.parquet"), "--out", str(tmp_path / "s.parquet")]
    assert predict.main(args) == 0
    assert pq.read_table(tmp_path / "s.parquet")["score"].null_count == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda table: table.drop_columns(["user"]), "'user'"),
        (lambda table: table.set_column(0, "age", pa.array(["x"] * 50)), "'age'"),
    ],
)
def test_data_of_another_schema_is_refused(run, tmp_path, change, message):
    pq.write_table(change(clicks(50).drop_columns(["clicked"])), tmp_path / "new.parquet")
    args = [str(run), "--data", str(tmp_path / "new.parquet"), "--out", str(tmp_path / "s.parquet")]
    with pytest.raises(ValueError, match=message):
        predict.main(args)
    assert not (tmp_path / "s.parquet").exists()


def test_every_rank_refuses_data_that_is_not_there(run, tmp_path, capfd):
    args = [str(run), "--data", str(tmp_path / "no.parquet"), "--out", str(tmp_path / "s.parquet")]
    assert predict.main([*args, "--nproc", "2"]) == 1
    assert "stands for no file" in capfd.readouterr().err


def test_what_cannot_be_written_is_told_before_the_work(run, tmp_path):
    data = ["--data", str(run.parent / "test.parquet")]
    with pytest.raises(ValueError, match="written"):
        predict.main([str(run), *data, "--out", str(tmp_path / "s.txt")])
    with pytest.raises(ValueError, match="CSV"):
        predict.main([str(run), *data, "--out", str(tmp_path / "s.csv")])
    with pytest.raises(ValueError, match="'nobody'"):
        predict.main([str(run), *data, "--out", str(tmp_path / "s.csv"), "--keep", "nobody"])


def test_damaged_rows_are_skipped_where_asked(run, tmp_path):
    table = clicks(50, seed=2)
    users = pa.array([*table["user"].to_pylist()[:-1], None])
    data = tmp_path / "damaged.parquet"
    pq.write_table(table.set_column(table.column_names.index("user"), "user", users), data)
    args = [str(run), "--data", str(data), "--out", str(tmp_path / "s.parquet")]
    with pytest.raises(ValueError, match=r"--on-error.*`meshrec evaluate`.*`meshrec predict`"):
        predict.main(args)
    assert predict.main([*args, "--on-error", "skip"]) == 0
    scores = pq.read_table(tmp_path / "s.parquet")["score"].to_pylist()
    assert scores[-1] is None
    assert None not in scores[:-1]


def test_damaged_rows_have_no_score(run, tmp_path):
    dataset = load_scorer(RunFolder(run), join("cpu"), run.parent / "test.parquet", labelled=False).dataset
    scored = [Scored(torch.tensor([1, 2, 5]), torch.zeros(3), torch.zeros(3))]
    assert write_scores(tmp_path / "s.parquet", dataset, iter(scored)) == 1297
    found = pq.read_table(tmp_path / "s.parquet")["score"].to_pylist()
    assert found == [None, 0.5, 0.5, None, None, 0.5] + [None] * 1294


def test_a_file_of_scores_is_replaced_only_with_force(run, tmp_path):
    out = tmp_path / "s.parquet"
    scores_of_data = [str(run), "--data", str(run.parent / "test.parquet"), "--out", str(out)]
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"--out.*--force"):
        predict.main(scores_of_data)
    assert out.read_text() == "mine"
    assert predict.main([*scores_of_data, "--force"]) == 0
    assert out.read_bytes() != b"mine"
