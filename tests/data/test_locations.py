from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError, criteo, parquet
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Integer, Label
from meshrec.data.frames import open_tables
from meshrec.data.locations import expand, expand_tables

SCHEMA = Features(labels=(Label(column="y"),), features=(Integer(name="user", num_embeddings=50),))


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    for part in range(2):
        table = pa.table({"y": rng.integers(0, 2, 30), "user": rng.integers(0, 50, 30)})
        pq.write_table(table, tmp_path / f"part-{part}.parquet")
        csv.write_csv(table, tmp_path / f"part-{part}.csv")
    (tmp_path / "notes.txt").write_text("no data")
    return tmp_path


def users(reader):
    return [user for batch in reader.batches(7) for user in batch.sparse["user"].values().tolist()]


@pytest.mark.parametrize("name", ["", "/part-*.parquet", "/part-0.parquet"])
def test_addresses_stand_for_what_paths_stand_for(folder, name):
    local = parquet(train=f"{folder}{name}", schema=SCHEMA, seed=3)
    stored = parquet(train=f"file://{folder}{name}", schema=SCHEMA, seed=3)
    assert users(stored.train) == users(local.train)
    assert stored.train.files[0].name == f"file://{folder}/part-0.parquet"
    names = [each.removeprefix("file://") for each in map(str, expand(f"file://{folder}{name}", "*.parquet"))]
    assert names == [str(each) for each in expand(f"{folder}{name}", "*.parquet")]


def test_csv_files_of_a_store(folder):
    found = open_tables([f"file://{folder}/part-1.csv"], SCHEMA, Faults("raise"))
    here = open_tables([f"{folder}/part-1.csv"], SCHEMA, Faults("raise"))
    for each, expected in zip(found.windows(0, 0, 100), here.windows(0, 0, 100), strict=True):
        assert np.array_equal(each.ids[0].values, expected.ids[0].values)


@pytest.mark.parametrize("store", ["", "file://"])
def test_a_folder_stands_for_its_tables(folder, store):
    (folder / "part-0.csv").rename(folder / "part-0.csv.gz")
    names, text = expand_tables([f"{store}{folder}"])
    assert ([Path(str(each)).name for each in names], text) == (["part-0.parquet", "part-1.parquet"], False)
    for path in folder.glob("*.parquet"):
        path.unlink()
    names, text = expand_tables([f"{store}{folder}"])
    assert ([Path(str(each)).name for each in names], text) == (["part-0.csv.gz", "part-1.csv"], True)
    with pytest.raises(DataError, match=r"notes.txt.*CSV"):
        expand_tables([f"{store}{folder}", f"{store}{folder}/notes.txt"])


def test_what_cannot_be_reached(folder):
    with pytest.raises(DataError, match="searched"):
        expand(f"file://{folder}/other", "*.parquet")
    with pytest.raises(DataError, match="bucket/x"):
        expand("nowhere://bucket/x", "*.parquet")
    with pytest.raises(DataError, match="machine"):
        criteo(train=f"file://{folder}/notes.txt")
