import itertools

import numpy as np
import pytest

from meshrec.data import DataError, Position, parquet
from meshrec.data.features import Features, Hashed, Integer, Label, Number, Vocabulary

from .streams import covered, epoch, numbers

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

SCHEMA = Features(
    labels=(Label(column="y"),),
    features=(
        Number(name="x"),
        Integer(name="one", num_embeddings=1000),
        Integer(name="some", num_embeddings=1000),
    ),
)


def write(path, first, last, row_group_size=10, **changes):
    """Rows as `streams.numbers` wants them."""
    rows = np.arange(first, last)
    table = {
        "y": rows % 2,
        "x": rows.astype(np.float32),
        "one": rows,
        "some": [[row] * (row % 3) for row in rows],
    }
    pq.write_table(pa.table(table | changes), path, row_group_size=row_group_size)
    return path


@pytest.fixture
def folder(tmp_path):
    write(tmp_path / "a.parquet", 0, 35)
    write(tmp_path / "b.parquet", 35, 60, row_group_size=100)
    (tmp_path / "notes.txt").write_text("not data")
    return tmp_path


def read(path, **options):
    return parquet(train=path, schema=SCHEMA, **({"window": 4, "lanes": 3} | options)).train


@pytest.mark.parametrize("kind", [pa.list_(pa.string()), pa.large_list(pa.large_binary())])
def test_lists_of_text_have_the_ids_of_their_values(tmp_path, kind):
    tags = [["a", "b"], [], None, ["b", None, "z"], ["a"]] * 3
    table = pa.table({"y": [0.0] * 15, "tags": pa.array(tags, kind), "tags.n": [[1, 2]] * 15})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    schema = Features(
        labels=(Label(column="y"),),
        features=(Vocabulary(name="tags"), Hashed(name="hashed", column="tags", num_embeddings=50)),
    ).fit([table.slice(0, 2)])
    reader = parquet(train=tmp_path, validation=tmp_path, schema=schema).validation
    for batch in reader.batches(15):
        for feature in schema.ids:
            jagged = batch.sparse.to_dict()[feature.name]
            expected = [feature.row_of(tag) for row in tags for tag in row or []]
            assert jagged.lengths().tolist() == [len(row or []) for row in tags]
            assert jagged.values().tolist() == expected


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_row_once_on_any_number_of_ranks(folder, world_size):
    steps = epoch(read(folder), 5, world_size)
    assert sorted(itertools.chain.from_iterable(covered(steps))) == list(range(60))
    position = Position(0, 10 * world_size)
    assert covered(epoch(read(folder), 5, world_size, position)) == covered(steps)[2:]


def test_without_shuffling_rows_keep_their_order(folder):
    (batch,) = parquet(train=folder, validation=folder, schema=SCHEMA, lanes=1).validation.batches(100)
    assert numbers(batch) == list(range(60))


def test_paths_may_be_files_lists_and_patterns(folder):
    assert read(folder / "a.parquet").num_samples == 35
    assert read([folder / "b.parquet", str(folder / "a*.parquet")]).num_samples == 60
    with pytest.raises(DataError, match=r"none.parquet"):
        read(folder / "none.parquet")
    with pytest.raises(DataError, match="paths"):
        read([])


def damage(path, row_group, column):
    """Overwrites the pages of a column."""
    chunk = pq.ParquetFile(path).metadata.row_group(row_group).column(column)
    start = chunk.dictionary_page_offset or chunk.data_page_offset
    data = bytearray(path.read_bytes())
    data[start : start + chunk.total_compressed_size] = b"\xff" * chunk.total_compressed_size
    path.write_bytes(data)


def test_a_damaged_page_names_file_row_group_and_column(folder):
    damage(folder / "a.parquet", 2, 2)
    with pytest.raises(DataError, match=r"a\.parquet.*group 2.*'one'"):
        list(read(folder).batches(5))


def test_a_damaged_row_group_can_be_skipped(folder):
    damage(folder / "a.parquet", 2, 2)
    reader = read(folder, on_error="skip")
    steps = epoch(reader, 5, 2)
    assert reader.num_samples == 60
    assert sorted(itertools.chain.from_iterable(covered(steps))) == [*range(20), *range(30, 60)]
    assert [len(step) for step in steps] == [2] * 6
    assert all("row group 2, column 'one'" in message for message in reader.skipped)
    # The places of what is skipped count: what is left resumes as if nothing were damaged.
    resumed = covered(epoch(read(folder, on_error="skip"), 5, 2, Position(0, 30)))
    assert resumed == covered(steps)[3:]


def test_damaged_rows_can_be_skipped(tmp_path):
    path = write(tmp_path / "a.parquet", 0, 20, one=pa.array([*range(18), None, 1000]))
    with pytest.raises(DataError, match=r"a\.parquet: row group 1, column 'one': row \d+ has null"):
        list(read(path).batches(5))
    reader = read(path, on_error="skip")
    assert sorted(itertools.chain.from_iterable(covered(epoch(reader, 5)))) == list(range(18))
    assert sum(reader.skipped.values()) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": ["text"] * 20}, r"b\.parquet.*'x'.*'x'"),
        ({"one": ["1"] * 20}, r"b\.parquet.*'one'.*'one'"),
    ],
)
def test_files_with_other_columns(tmp_path, change, message):
    write(tmp_path / "a.parquet", 0, 10)
    write(tmp_path / "b.parquet", 10, 30, **change)
    with pytest.raises(DataError, match=message):
        read(tmp_path)
    reader = read(tmp_path, on_error="skip")
    assert reader.num_samples == 10
    assert sum(reader.skipped.values()) == 20


def test_files_without_rows_are_nothing(tmp_path):
    write(tmp_path / "a.parquet", 0, 0, some=pa.array([], pa.list_(pa.int64())))
    with pytest.raises(DataError, match=r"none.*1"):
        read(tmp_path)
    write(tmp_path / "b.parquet", 0, 5)
    write(tmp_path / "c.parquet", 0, 0, x=pa.nulls(0))
    reader = read(tmp_path)
    assert reader.num_samples == 5
    assert not reader.skipped


def test_files_that_are_no_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match=r"a\.parquet"):
        read(tmp_path)
    write(tmp_path / "b.parquet", 0, 5)
    reader = read(tmp_path, on_error="skip")
    assert reader.num_samples == 5
    assert list(reader.skipped.values()) == [0]  # how many rows it had, nobody knows


def test_a_missing_column(tmp_path):
    pq.write_table(pa.table({"y": [1], "x": [1.0], "one": [1]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a\.parquet.*'some'.*\['y', 'x', 'one'\]"):
        read(tmp_path)
