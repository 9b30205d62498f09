import gzip
import math

import numpy as np
import pytest
import torch

from meshrec.data import DataError, Position, criteo
from meshrec.data.criteo_data import criteo_features

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def line(number, **fields):
    """Sample `number`: I1 is its number, I2 is missing, I3 negative; C2 is missing."""
    values = {"label": number % 2, "I1": number, "I2": "", "I3": -2, "C2": ""} | fields
    names = criteo_features(10).columns()
    return "\t".join(str(values.get(name, f"{number:08x}" if name[0] == "C" else 3)) for name in names) + "\n"


def read(path, **options):
    return criteo(train=path, **({"num_embeddings": 50, "window": 4, "lanes": 2} | options)).train


def numbers(batch):
    batch.sparse.validate()
    found = batch.dense[:, 0].expm1().round().int()
    assert torch.equal(batch.labels, (found % 2).float())
    return found.tolist()


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_day_files(tmp_path, suffix):
    text = "".join(line(number) for number in range(30)).encode()
    for day, part in enumerate((text[: len(text) // 2], text[len(text) // 2 :])):
        cut = part  # the days meet inside a line; put it right
        if day == 0:
            cut, rest = part[: part.rfind(b"\n") + 1], part[part.rfind(b"\n") + 1 :]
        else:
            cut = rest + part
        (tmp_path / f"day_{day}{suffix}").write_bytes(gzip.compress(cut) if suffix else cut)
    reader = read(tmp_path)
    batches = list(reader.batches(4, world_size=1))
    assert sorted(number for batch in batches for number in numbers(batch)) == list(range(30))
    resumed = [numbers(batch) for batch in read(tmp_path).batches(4, position=Position(0, 8))]
    assert resumed == [numbers(batch) for batch in batches[2:]]
    first = batches[0]
    assert first.dense.shape == (4, 13)
    assert first.dense[:, 1:4].tolist() == [[0, 0, pytest.approx(math.log(4))]] * 4
    assert first.sparse.keys() == [f"C{number + 1}" for number in range(26)]
    assert first.sparse["C2"].values().tolist() == [0] * 4
    assert 1 <= int(first.sparse["C1"].values().min()) <= int(first.sparse["C1"].values().max()) < 50


def test_parquet_has_the_same_samples(tmp_path):
    (tmp_path / "day_0").write_text("".join(line(number) for number in range(20)))
    names = criteo_features(10).columns()
    rows = [line(number).rstrip("\n").split("\t") for number in range(20)]
    columns = dict(zip(names, zip(*rows, strict=True), strict=True))
    table = {
        name: pa.array(values)
        if name[0] == "C"
        else pa.array([float(v) if v else None for v in values], pa.float64())
        for name, values in columns.items()
    }
    pq.write_table(pa.table(table), tmp_path / "day_1.parquet")
    options = {"num_embeddings": 50, "lanes": 1}
    text = criteo(train=tmp_path / "day_0", validation=tmp_path / "day_0", **options).validation
    other = criteo(train=tmp_path / "day_0", validation=tmp_path / "day_1.parquet", **options).validation
    (one,), (two,) = text.batches(100), other.batches(100)
    assert torch.equal(one.sparse.values(), two.sparse.values())
    assert torch.equal(one.dense, two.dense)
    assert torch.equal(one.labels, two.labels)
    with pytest.raises(DataError, match="Parquet"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (line(3, I4="many"), "day_0.*line 4.*'I4'.*'many'"),
        (line(3, label=""), "day_0.*'label'.*row 3"),
        ("1\t2\n", "day_0.*line 4.*2 fields.*40"),
    ],
)
def test_damaged_lines(tmp_path, bad, message):
    lines = [line(number) for number in range(20)]
    lines[3] = bad
    (tmp_path / "day_0").write_text("".join(lines))
    with pytest.raises(DataError, match=message):
        list(read(tmp_path).batches(4))
    reader = read(tmp_path, on_error="skip")
    batches = [numbers(batch) for batch in reader.batches(4)]
    assert sorted(number for batch in batches for number in batch) == [*range(3), *range(4, 20)]
    assert sorted(map(len, batches)) == [3, 4, 4, 4, 4]
    assert len(reader.skipped) == 1


def test_all_lines_damaged(tmp_path):
    (tmp_path / "day_0").write_text("nothing\n" * 5)
    assert [len(batch) for batch in read(tmp_path, on_error="skip").batches(4)] == [0, 0]


def test_sizes_and_empty_files(tmp_path):
    with pytest.raises(ValueError, match=r"num_embeddings.*26.*2"):
        criteo_features([5, 5])
    sizes = [feature.num_embeddings for feature in criteo_features(np.arange(2, 28).tolist()).described()]
    assert sizes == list(range(2, 28))
    (tmp_path / "day_0").touch()
    with pytest.raises(DataError, match="day_0"):
        read(tmp_path)
    with pytest.raises(DataError, match="1 files"):
        read(tmp_path, on_error="skip")
