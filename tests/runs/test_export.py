"""From runs to packages: raw values, quantised tables, towers."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli import export as cli
from meshrec.cli.train import main as train
from meshrec.data import DataError
from meshrec.data.features import Cross, Features, Hashed, Join, Label, Number
from meshrec.data.raw_values import RawValues
from meshrec.export import Predictor
from meshrec.modules import DataType
from meshrec.runs.export import export_run
from meshrec.runs.fitting import features_of
from meshrec.runs.quantize import quantize_run
from meshrec.train import RunFolder, join
from tests.export.conftest import torchs_own_warnings
from tests.train.shop import shop, source, write_shop


def trained(folder, recipe):
    write_shop(folder)
    args = [
        f"tests/train/shop.py:{recipe}",
        "--data.train",
        str(folder),
        "--runs",
        str(folder),
        "--name",
        "r",
    ]
    assert train([*args, "--quiet"]) == 0
    return RunFolder(folder / "r")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("shop"), "recipe")


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("towers"), "two_towers")


def predictor_of(folder):
    with torchs_own_warnings():
        return Predictor(folder, verify=True)


def export_with(run, folder, **options):
    with torchs_own_warnings():
        return export_run(run, folder, compile=False, **options)


def as_arrays(batch):
    values, lengths = {}, {}
    for name, jagged in batch.sparse.to_dict().items():
        values[name], lengths[name] = jagged.values().long(), jagged.lengths().long()
    return batch.dense, values, lengths


def test_raw_values_become_what_training_reads(run, tmp_path):
    pq.write_table(shop(200, seed=3), tmp_path / "new.parquet")
    (batch,) = (
        source()
        .dataset_for_scoring(features_of(run), tmp_path / "new.parquet", labelled=False)
        .train.batches(200)
    )
    dense, values, lengths = as_arrays(batch)
    raw = predictor_of(export_with(run, tmp_path / "p")).raw
    assert list(raw.columns) == ["price", "user", "tags", "city", "time"]
    columns = shop(200, seed=3).select(list(raw.columns))
    found = raw.encode(columns)
    np.testing.assert_array_equal(found.dense, dense.numpy())
    for name in values:
        np.testing.assert_array_equal(found.values[name], values[name].numpy())
        np.testing.assert_array_equal(found.lengths[name], lengths[name].numpy())
    # The user's columns once, those of the samples beside them.
    same = columns.slice(0, 1)
    user = ["user", "price"]
    repeated = columns
    for name in user:
        at = columns.column_names.index(name)
        repeated = repeated.set_column(at, name, same[name].take(pa.array([0] * 200)))
    once, all_of_them = raw.encode(columns.drop_columns(user), same.select(user)), raw.encode(repeated)
    assert once.shared == {"user", "dense"}
    for name in values:
        times = 200 if name in once.shared else 1
        np.testing.assert_array_equal(np.tile(once.values[name], times), all_of_them.values[name])
    np.testing.assert_array_equal(np.repeat(once.dense, 200, axis=0), all_of_them.dense)


def test_joins_and_crosses_go_into_the_package(tmp_path):
    pq.write_table(pa.table({"item": ["a", "b"], "kind": ["x", "y"]}), tmp_path / "items.parquet")
    joined = Join(path=str(tmp_path / "items.parquet"), key="item", columns=("kind",))
    features = Features(
        labels=(Label(column="y"),),
        features=(
            Number(name="age"),
            Hashed(name="kind", num_embeddings=50),
            Cross(name="both", columns_crossed=("user", "kind"), num_embeddings=50),
        ),
        joins=(joined,),
    )
    table = pa.table({"y": [0.0, 1], "age": [1.0, 2], "user": ["u", "u"], "item": ["a", "b"]})
    features = features.fit([table])
    RawValues(features, table.schema).save(tmp_path)
    (tmp_path / "items.parquet").unlink()
    raw = RawValues.load(tmp_path)
    columns = table.select(list(raw.columns))
    whole = raw.encode(columns)
    split = raw.encode(columns.drop_columns(["user"]), columns.select(["user"]).slice(0, 1))
    np.testing.assert_array_equal(whole.values["kind"], [features["kind"].row_of(v) for v in "xy"])
    np.testing.assert_array_equal(whole.values["both"], split.values["both"])
    np.testing.assert_array_equal(whole.values["both"], [features["both"].row_of(("u", v)) for v in "xy"])
    assert split.shared == frozenset()
    with pytest.raises(DataError, match=r"'age'.*row 1"):
        raw.encode(columns.set_column(0, "age", pa.array([1.0, None])))


def test_a_quantised_checkpoint_of_the_run_is_exported(run, tmp_path):
    ranks = join("cpu")
    made = quantize_run(run, ranks, tmp_path / "q", weights=DataType.INT4).model
    package = predictor_of(export_with(run, tmp_path / "p", quantised=tmp_path / "q"))
    assert set(package.quantised.values()) == {"INT4"}
    assert package.rounding == "search"
    assert package.about["step"] == predictor_of(export_with(run, tmp_path / "f")).about["step"]
    for name, weight in made.named_parameters():
        assert torch.equal(package.weights[name], weight)
    with pytest.raises(ValueError, match="Leave"):
        export_with(run, tmp_path / "x", quantised=tmp_path / "q", last=True)


def test_towers_give_vectors_whose_products_are_the_scores(towers, tmp_path):
    whole = predictor_of(export_with(towers, tmp_path / "whole"))
    query = predictor_of(export_with(towers, tmp_path / "query", tower="query"))
    items = shop(30, seed=5).select(["city", "tags"])
    pq.write_table(items, tmp_path / "items.parquet")
    args = [str(towers.path), "--out", str(tmp_path / "item"), "--tower", "item", "--no-compile"]
    out = tmp_path / "vectors.parquet"
    with torchs_own_warnings():
        assert cli.main([*args, "--items", str(tmp_path / "items.parquet"), "--vectors", str(out)]) == 0
    item = predictor_of(tmp_path / "item")
    assert (item.outputs, item.features, item.num_dense) == ("vectors", ["tags", "city"], 0)
    assert query.features == ["user", "hour"]
    assert set(query.raw.columns) == {"price", "user", "time"}
    assert sum(weight.numel() for weight in item.weights.values()) < sum(
        weight.numel() for weight in whole.weights.values()
    )
    table = pq.read_table(out)
    assert table.select(["city", "tags"]).equals(items)
    found = torch.from_numpy(np.stack(table["vector"].to_numpy()))
    torch.testing.assert_close(found.norm(dim=1), torch.ones(30))

    columns = shop(30, seed=5)

    def outputs(predictor):
        encoded = predictor.raw.encode(columns.select(list(predictor.raw.columns)))
        values, lengths = (
            {name: torch.from_numpy(own) for name, own in each.items()}
            for each in (encoded.values, encoded.lengths)
        )
        return predictor(torch.from_numpy(encoded.dense), values, lengths)

    products = (outputs(query) * found).sum(1) / 0.1
    torch.testing.assert_close(torch.sigmoid(products), outputs(whole), rtol=1e-5, atol=1e-6)


def test_what_has_no_towers_is_named(run, tmp_path):
    with pytest.raises(ValueError, match=r"DLRM.*0.*TwoTower"):
        export_with(run, tmp_path / "p", tower="item")
    with pytest.raises(ValueError, match="--tower"):
        cli.main([str(run.path), "--out", "p", "--items", "x"])
