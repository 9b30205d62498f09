import json
import shutil

import numpy as np
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.checkpoint import read_manifest
from meshrec.cli import evaluate, export, predict, quantize
from meshrec.cli.train import main as train
from meshrec.data import DataError
from meshrec.data.features import Features
from meshrec.data.raw_values import RawValues
from meshrec.export import Predictor
from meshrec.runs import load_recipe
from meshrec.runs.fitting import FEATURES, data_of_run, features_of, load_data
from meshrec.runs.job import Job
from meshrec.runs.worker import run_rank
from meshrec.testing import RankError
from meshrec.train import Csv, Frame, RunFolder, join
from meshrec.train.observers import Progressed
from tests.train.shop import FEATURES as UNFITTED
from tests.train.shop import shop, source, write_shop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder)
    args = ["tests/train/shop.py:recipe", "--data.train", str(folder), "--runs", str(folder), "--name", "r"]
    assert train([*args, "--quiet"]) == 0
    return RunFolder(folder / "r")


def test_a_run_keeps_what_it_fitted_on_its_training_rows(run):
    features = features_of(run)
    assert features.to_json() == UNFITTED.fit([shop(1500).slice(0, 1200)]).to_json()
    assert load_recipe(run).data.features == UNFITTED
    assert run.read_json("summary.json")["test"]["auc"] > 0.6


def test_the_rows_of_the_test_split_are_scored_as_in_training(run, tmp_path):
    pq.write_table(shop(1500).slice(1350), tmp_path / "test.parquet")
    args = [str(run.path), "--data", str(tmp_path / "test.parquet")]
    assert evaluate.main([*args, "--json", str(tmp_path / "m.json")]) == 0
    found = RunFolder(tmp_path).read_json("m.json")["metrics"]
    assert found == pytest.approx(run.read_json("summary.json")["test"], rel=1e-12)
    assert predict.main([*args, "--out", str(tmp_path / "s.parquet"), "--keep", "user", "time"]) == 0
    scores = pq.read_table(tmp_path / "s.parquet")
    assert scores.select(["user", "time"]).equals(shop(1500).slice(1350).select(["user", "time"]))
    # Training, validation, and another file give the same row the same ids and values.
    (trained,) = data_of_run(load_recipe(run).data, run).test.batches(150)
    (again,) = (
        source()
        .dataset_for_scoring(features_of(run), tmp_path / "test.parquet", labelled=True)
        .train.batches(150)
    )
    assert torch.equal(trained.dense, again.dense)
    assert torch.equal(trained.sparse.values(), again.sparse.values())
    assert torch.equal(trained.sparse.lengths(), again.sparse.lengths())


def test_a_column_of_values_that_training_never_saw_is_warned_of(run, tmp_path, caplog):
    data = shop(100)
    names = data.column_names
    strange = data.set_column(names.index("user"), "user", [[f"other-{n}" for n in range(100)]])
    pq.write_table(strange, tmp_path / "a.parquet")
    args = [str(run.path), "--data", str(tmp_path / "a.parquet"), "--out", str(tmp_path / "s.parquet")]
    assert predict.main(args) == 0
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert "feature 'user': 100.0 % of the 100 values of column 'user' did not occur in training" in warning
    assert "which holds 'user-" in warning


def test_every_split_and_predictions_read_a_row_alike(run):
    data = data_of_run(load_recipe(run).data, run)
    path = run.path.parent / "all.parquet"
    (every,) = source().dataset_for_scoring(features_of(run), path, labelled=False).train.batches(1500)
    for reader, num in ((data.train, 1200), (data.validation, 150), (data.test, 150)):
        (batch,) = reader.batches(1500)
        assert len(batch) == num
        assert torch.equal(batch.dense, every.dense[batch.rows])
        for key in ("user", "tags", "city", "hour"):
            bags = every.sparse[key].to_dense()
            for row, bag in zip(batch.rows.tolist(), batch.sparse[key].to_dense(), strict=True):
                assert torch.equal(bag, bags[row])


def train_on_ranks(folder, recipe):
    events = []
    job = Job(recipe=recipe, name="two", runs=folder, device="cpu", on_event=events.append)
    run_rank(job, lambda _: lambda _: None)
    return [
        event.share for event in events if isinstance(event, Progressed) and event.task == "fitting features"
    ]


def test_two_ranks_keep_what_one_keeps_and_tell_how_far_they_are(run, ranks):
    folder = run.path.parent
    shares = ranks(2).run(train_on_ranks, folder, load_recipe(run))
    assert features_of(RunFolder(folder / "two")).to_json() == features_of(run).to_json()
    for of_rank in shares:
        assert of_rank == sorted(of_rank)
        assert of_rank[-1] == 1


def test_a_run_of_an_earlier_release_is_read(run, tmp_path):
    assert "user-" not in (run.path / FEATURES).read_text()
    old = RunFolder(tmp_path / "old")
    shutil.copytree(run.path, old.path)
    (old.path / "features.arrow").unlink()
    with pytest.raises(DataError, match=r"features\.arrow"):
        features_of(old)
    old.write_json(FEATURES, features_of(run).to_json(), seal=True)
    assert features_of(old) == features_of(run)
    pq.write_table(shop(100), tmp_path / "new.parquet")
    for name, folder in (("a", run), ("b", old)):
        args = [str(folder.path), "--data", str(tmp_path / "new.parquet")]
        assert predict.main([*args, "--out", str(tmp_path / f"{name}.parquet")]) == 0
    assert pq.read_table(tmp_path / "a.parquet").equals(pq.read_table(tmp_path / "b.parquet"))


def load_in_folders(folders):
    ranks = join("cpu")
    data = load_data(source(train=(str(folders[0] / "all.parquet"),)), RunFolder(folders[ranks.rank]), ranks)
    (batch,) = data.test.batches(150)
    return batch.sparse.values().tolist()


def test_ranks_that_do_not_see_the_folder_receive_its_vocabularies(run, tmp_path, ranks):
    expected = next(data_of_run(load_recipe(run).data, run).test.batches(150)).sparse.values().tolist()
    write_shop(tmp_path)
    (tmp_path / "other").mkdir()
    for _ in range(2):  # fitted, and read
        assert ranks(2).run(load_in_folders, [tmp_path, tmp_path / "other"]) == [expected] * 2
    assert list((tmp_path / "other").iterdir()) == []
    (tmp_path / "features.arrow").unlink()
    with pytest.raises(RankError, match=r"features\.arrow"):
        ranks(2).run(load_in_folders, [tmp_path, tmp_path / "other"])


def test_a_run_is_exported_with_what_it_fitted(run, tmp_path):
    assert export.main([str(run.path), "--out", str(tmp_path / "p"), "--no-compile"]) == 0
    request = shop(30).drop_columns(["clicked"])
    raw = Predictor(tmp_path / "p").raw
    assert raw is not None
    encoded = raw.encode(request)
    # Packages of earlier releases have the vocabularies in JSON.
    (tmp_path / "p" / "features.arrow").unlink()
    (tmp_path / "p" / FEATURES).write_text(json.dumps(features_of(run).to_json()))
    old = RawValues.load(tmp_path / "p").encode(request)
    for key, values in encoded.values.items():
        assert old.values[key].tolist() == values.tolist()


def test_export_and_quantize_need_no_data_files(run, tmp_path):
    moved = RunFolder(shutil.copytree(run.path.parent, tmp_path / "moved") / "r")
    config = moved.read_json("config.json")
    config["recipe"]["data"]["train"] = [str(tmp_path / "missing")]
    moved.write_json("config.json", {k: v for k, v in config.items() if k != "crc32"}, seal=True)
    for folder, name in ((run, "with"), (moved, "without")):
        assert export.main([str(folder.path), "--out", str(tmp_path / name), "--no-compile"]) == 0
        assert quantize.main([str(folder.path), "--out", str(tmp_path / f"{name}-int8")]) == 0
    for name in ("features.json", "columns.arrow"):
        assert (tmp_path / "with" / name).read_bytes() == (tmp_path / "without" / name).read_bytes()
    weights, same = (Predictor(tmp_path / name).weights for name in ("with", "without"))
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    tensors, same = (read_manifest(tmp_path / name).tensors for name in ("with-int8", "without-int8"))
    assert tensors == same
    with pytest.raises(ValueError, match="missing"):
        quantize.main([str(moved.path), "--out", str(tmp_path / "budget"), "--max-loss", "0.1"])


def test_a_column_that_changed_its_type_is_refused(run, tmp_path):
    table = shop(50)
    pq.write_table(table.set_column(2, "user", [np.arange(50)]), tmp_path / "new.parquet")
    args = [str(run.path), "--data", str(tmp_path / "new.parquet"), "--out", str(tmp_path / "s.parquet")]
    with pytest.raises(DataError, match=r"'user'.*'user'"):
        predict.main(args)


def test_a_run_that_was_never_fitted_is_named(tmp_path):
    with pytest.raises(DataError, match="features"):
        features_of(RunFolder(tmp_path))
    (tmp_path / FEATURES).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        features_of(RunFolder(tmp_path))


def test_frames_and_csv_give_what_parquet_gives(tmp_path):
    write_shop(tmp_path)
    table = shop(1500)
    flat = Features(
        labels=UNFITTED.labels, features=tuple(each for each in UNFITTED.features if each.name != "tags")
    )
    csv.write_csv(table.drop_columns(["tags"]), tmp_path / "all.csv")
    split = {"features": flat, "split_by": "time", "split_column": "time"}
    sources = [
        source(train=(str(tmp_path / "all.parquet"),), features=flat),
        Csv(train=(str(tmp_path / "all.csv"),), **split),
        Frame(train=table, **split),
        Frame(train=table.to_pandas(), **split),
    ]
    batches = [next(each.load().test.batches(150)) for each in sources]
    for batch in batches[1:]:
        torch.testing.assert_close(batch.dense, batches[0].dense)
        assert torch.equal(batch.sparse.values(), batches[0].sparse.values())
        assert torch.equal(batch.labels, batches[0].labels)


def test_what_is_no_table_is_named():
    with pytest.raises(ValueError, match="table"):
        Frame(train={}, features=UNFITTED).load()
