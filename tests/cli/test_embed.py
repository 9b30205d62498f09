import numpy as np
import pyarrow.parquet as pq
import pytest

from meshrec.cli import embed
from meshrec.cli.train import main as train
from meshrec.runs.fitting import features_of
from meshrec.runs.vectors import load_table
from meshrec.train import RunFolder
from tests.train.shop import write_shop


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shop")
    write_shop(folder)
    args = ["tests/train/shop.py:recipe", "--data.train", str(folder), "--runs", str(folder), "--name", "r"]
    assert train([*args, "--quiet"]) == 0
    return RunFolder(folder / "r")


def test_every_value_has_the_vector_of_its_row(run, tmp_path):
    out = tmp_path / "users.parquet"
    assert embed.main([str(run.path), "--feature", "user", "--out", str(out)]) == 0
    found, weights = pq.read_table(out).to_pylist(), load_table(run, "user").rows
    feature = features_of(run)["user"]
    assert len(found) == feature.rows == len(weights)
    assert [each["value"] for each in found[:2]] == [None, None]
    for each in found[2:]:
        assert feature.row_of(each["value"]) == each["row"]
        assert each["vector"] == weights[each["row"]].tolist()


def test_hashed_values_have_rows_alone_and_vectors_can_be_plain(run, tmp_path):
    assert embed.main([str(run.path), "--feature", "city", "--out", str(tmp_path / "c.npy")]) == 0
    assert np.load(tmp_path / "c.npy").shape == (16, 8)
    assert embed.main([str(run.path), "--feature", "city", "--out", str(tmp_path / "c.parquet")]) == 0
    assert pq.read_table(tmp_path / "c.parquet")["value"].null_count == 16


def test_what_cannot_be_written(run, tmp_path):
    with pytest.raises(ValueError, match="'price'"):
        embed.main([str(run.path), "--feature", "price", "--out", str(tmp_path / "p.npy")])
    with pytest.raises(ValueError, match="ends"):
        embed.main([str(run.path), "--feature", "user", "--out", str(tmp_path / "p.txt")])


@pytest.mark.parametrize(("package", "suffix"), [("usearch", ".usearch"), ("faiss", ".faiss")])
def test_an_index_finds_the_rows_with_the_largest_products(run, tmp_path, package, suffix):
    pytest.importorskip(package)
    out = tmp_path / f"users{suffix}"
    assert embed.main([str(run.path), "--feature", "user", "--out", str(out)]) == 0
    vectors = load_table(run, "user").rows.numpy()
    query = vectors[5]
    if package == "usearch":
        from usearch.index import Index

        keys = Index.restore(str(out)).search(query, 3).keys
    else:
        import faiss

        keys = faiss.read_index(str(out)).search(query[None], 3)[1][0]
    assert keys.tolist() == np.argsort(-(vectors @ query))[:3].tolist()
    assert pq.read_table(tmp_path / "users.parquet").num_rows == len(vectors)
