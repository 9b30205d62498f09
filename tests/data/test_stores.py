"""Tables and logs in stores: S3 by moto's server, HTTP, and fsspec's memory."""

import gzip
import io
import json
import os
import signal
import subprocess
import sys

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from meshrec.data import DataError, parquet, stores
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Hashed, Integer, Label
from meshrec.data.frames import open_tables
from meshrec.data.locations import expand, expand_tables, opened
from meshrec.data.log_columns import LogColumns
from meshrec.data.log_parts import LogFiles, encode_parts
from meshrec.data.stores import StoreError, store_of, version_of
from meshrec.data.tables import ordered_reader
from tests.data.faulty_store import started

SCHEMA = Features(
    labels=(Label(column="y"),),
    features=(Integer(name="user", num_embeddings=50), Hashed(name="day", num_embeddings=8)),
)


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.001)
    with started(monkeypatch) as store:
        yield store


def rows(num=60, seed=0):
    rng = np.random.default_rng(seed)
    return pa.table({"y": rng.integers(0, 2, num), "user": rng.integers(0, 50, num)})


def write_everywhere(store, folder):
    """Write partitioned tables to the store and to a local folder."""
    for part, day in enumerate(("01", "02", "10")):
        name = f"day=05-{day}/part {part}.parquet"
        (folder / name).parent.mkdir()
        pq.write_table(rows(seed=part), folder / name, row_group_size=20)
        store.put(f"clicks/{name}", rows(seed=part), row_group_size=20)
        store.put(f"clicks/day=05-{day}/_SUCCESS", b"")


def batches(paths, **options):
    dataset = parquet(train=paths, schema=SCHEMA, seed=3, **options)
    return [
        (batch.labels.tolist(), batch.sparse["user"].values().tolist(), batch.sparse["day"].values().tolist())
        for batch in dataset.train.batches(7)
    ]


class CreatedDuringTheCall:
    """File system on which a folder appears during the first listing, as pyarrow 26 reports it."""

    def __init__(self, folder):
        self.folder, self.files = folder, fs.LocalFileSystem()

    def get_file_info(self, selector):
        if not self.folder.exists():
            self.folder.mkdir()
            (self.folder / "part").touch()
            raise FileNotFoundError(f"Cannot list directory '{self.folder}'")
        return self.files.get_file_info(selector)


def test_a_folder_can_be_created_while_it_is_listed(tmp_path):
    folder = tmp_path / "new"
    assert [info.base_name for info in stores.listed(CreatedDuringTheCall(folder), str(folder))] == ["part"]
    assert stores.listed(fs.LocalFileSystem(), str(tmp_path / "missing")) == []


@pytest.mark.parametrize(
    "pattern",
    ["", "/", "/day=*", "/day=05-0*/*.parquet", "/*/part*[12].parquet", "/day=05-10/part 2.parquet"],
)
def test_folders_and_patterns_in_a_bucket_stand_for_what_they_stand_for_locally(store, tmp_path, pattern):
    write_everywhere(store, tmp_path)
    if pattern == "":
        assert len(batches(str(tmp_path))) == 26
    assert batches(store.address(f"clicks{pattern}")) == batches(f"{tmp_path}{pattern}")
    names = [str(file).partition("?")[0] for file in expand(store.address(f"clicks{pattern}"), "*.parquet")]
    local = [str(file) for file in expand(f"{tmp_path}{pattern}", "*.parquet")]
    assert [name.removeprefix(f"s3://{store.bucket}/clicks") for name in names] == [
        name.removeprefix(str(tmp_path)) for name in local
    ]


def test_text_in_a_bucket_is_read_like_local_text(store, tmp_path):
    table = pa.table({"y": [0, 1] * 40, "user": [*range(40)] * 2, "day": ["mon", "tue"] * 40})
    csv.write_csv(table, tmp_path / "a.csv")
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    for name in ("a.csv", "b.jsonl.gz"):
        store.put(name, (tmp_path / name).read_bytes())

    def read(path):
        reader = ordered_reader(open_tables, path, SCHEMA, labelled=True)
        return [batch.sparse["user"].values().tolist() for batch in reader.batches(32)]

    for name in ("a.csv", "b.jsonl.gz"):
        assert read(store.address(name)) == read(f"{tmp_path}/{name}")
    assert expand_tables(store.address(""))[1]


def test_faults_of_reads_are_retried_and_change_no_row(store, tmp_path, caplog):
    write_everywhere(store, tmp_path)
    kinds = (503, "cut", 500, 429)
    # Every third request fails, of whatever kind.
    store.fault = lambda number, *_: kinds[number // 3 % len(kinds)] if number % 3 == 2 else None
    assert batches(store.address("clicks")) == batches(str(tmp_path))
    retried = [line for line in caplog.messages if "retry 1 of 3" in line]
    # A HEAD request has no content to cut.
    assert len(retried) > len(store.requests) // 6


@pytest.mark.parametrize("on_error", ["raise", "skip"])
@pytest.mark.parametrize("fault", [503, "cut"])
def test_a_store_that_stays_away_is_an_error_after_the_retries_of_the_address(
    store, tmp_path, fault, on_error
):
    write_everywhere(store, tmp_path)
    address = store.address("clicks/day=05-02/part 1.parquet", retries=2)
    dataset = parquet(train=address, schema=SCHEMA, on_error=on_error)
    requests = len(store.requests)
    store.fault = lambda _, method, __: fault if method == "GET" else None
    with pytest.raises(StoreError, match=r"part 1.parquet.*tried 3 times"):
        [*dataset.train.batches(7)]
    assert [method for method, _ in store.requests[requests:]].count("GET") == 3
    assert dataset.skipped == {}


def test_what_does_not_pass_is_told_at_once(store, tmp_path):
    write_everywhere(store, tmp_path)
    with pytest.raises(DataError, match="no bucket 'elsewhere'"):
        expand(store.address("clicks", bucket="elsewhere"), "*.parquet")
    with pytest.raises(DataError, match=r"stands for no file\. Name"):
        expand(store.address("click"), "*.parquet")
    with pytest.raises(StoreError, match=r"x\.parquet.*address"), opened(store.address("x.parquet")):
        pass
    requests = len(store.requests)
    store.fault = lambda *_: 403
    with pytest.raises(StoreError, match="AWS_ACCESS_KEY_ID"):
        expand(store.address("clicks"), "*.parquet")
    assert len(store.requests) == requests + 1
    for retries in ("101", "-1", "x"):
        with pytest.raises(StoreError, match=f"retries.*'{retries}'"):
            store_of(f"s3://bucket/x?retries={retries}")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_changes_between_blocks_is_an_error(store, on_error):
    store.put("a.parquet", rows(600), row_group_size=20)  # more than the reader decodes ahead
    dataset = parquet(train=store.address("a.parquet"), schema=SCHEMA_WITHOUT_DAY, on_error=on_error)
    read = dataset.train.batches(20)
    next(read)
    store.put("a.parquet", rows(600, seed=1), row_group_size=20)
    with pytest.raises(StoreError, match="has changed"):
        list(read)


@pytest.mark.parametrize("change", [{}, {"num": 30}, {"num": 90}])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_a_file_that_changes_inside_a_block_is_an_error(store, on_error, change):
    store.put("a.parquet", rows())
    dataset = parquet(train=store.address("a.parquet"), schema=SCHEMA_WITHOUT_DAY, on_error=on_error)

    def fault(_, method, __):
        # Between the start of the reader and the answer with the rows, which is of the new file.
        if method == "GET":
            store.fault = lambda *_: None
            store.put("a.parquet", rows(seed=1, **change))
            return 503
        return None

    store.fault = fault
    with pytest.raises(StoreError, match="has changed"):
        [*dataset.train.batches(20)]


def test_text_that_changes_while_it_is_read_is_an_error(store):
    text = io.BytesIO()
    csv.write_csv(rows(), text)
    store.put("a.csv", text.getvalue())
    faults = iter([None, "change"])

    def fault(_, method, __):
        if method == "GET" and next(faults, None):
            store.put("a.csv", text.getvalue() + b"1,2\n")

    store.fault = fault
    with pytest.raises(StoreError, match="has changed"):
        open_tables(store.address("a.csv"), SCHEMA_WITHOUT_DAY, Faults("skip"))


SCHEMA_WITHOUT_DAY = Features(labels=SCHEMA.labels, features=SCHEMA.features[:1])

READER = """
import sys
from meshrec.data import Position, parquet
from tests.data.test_stores import SCHEMA_WITHOUT_DAY

address, sample = sys.argv[1], int(sys.argv[2])
dataset = parquet(train=address, schema=SCHEMA_WITHOUT_DAY, seed=5, lanes=2)
for batch in dataset.train.batches(16, position=Position(sample=sample)):
    print(*batch.sparse["user"].values().tolist(), flush=True)
"""


def test_a_reader_killed_in_the_middle_of_a_read_continues_at_the_exact_sample(store):
    table = rows(400)
    store.put("a.parquet", table, row_group_size=50)
    plain = parquet(train=store.address("a.parquet"), schema=SCHEMA_WITHOUT_DAY, seed=5, lanes=2).train
    expected = [batch.sparse["user"].values().tolist() for batch in plain.batches(16)]
    assert len(expected) == 25
    reads = iter(range(100))
    # The footer and some row groups arrive, and half of the next one.
    store.fault = lambda _, method, __: "stall" if method == "GET" and next(reads) == 5 else None

    def started_at(sample):
        words = [sys.executable, "-c", READER, store.address("a.parquet"), str(sample)]
        return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)

    with started_at(0) as reader:
        assert store.stalled.wait(60)
        os.kill(reader.pid, signal.SIGKILL)
        read = [[int(word) for word in line.split()] for line in reader.stdout]
    assert reader.returncode == -signal.SIGKILL
    assert 0 < len(read) < len(expected)
    store.fault = lambda *_: None
    with started_at(16 * len(read)) as reader:
        read += [[int(word) for word in line.split()] for line in reader.stdout]
    assert reader.returncode == 0
    assert read == expected


def test_a_log_in_a_bucket_is_encoded_once_per_version(store, tmp_path):
    rng = np.random.default_rng(0)
    log = pa.table({name: rng.integers(0, 9, 50) for name in ("user", "item", "time")})
    pq.write_table(log, tmp_path / "log.parquet", row_group_size=20)
    store.put("log.parquet", log, row_group_size=20)

    def encoded(path, folder):
        folder.mkdir(exist_ok=True)
        files = LogFiles(name="log", paths=path, columns=LogColumns(), kinds={})
        parts = encode_parts(files, folder, Faults("raise"), memory=0)
        return parts, pa.concat_tables(part.table() for part in parts.parts).to_pydict()

    here, stored = tmp_path / "here", tmp_path / "stored"
    address = store.address("log.parquet")
    parts, content = encoded(address, stored)
    assert content == encoded(str(tmp_path / "log.parquet"), here)[1]
    reads = [method for method, _ in store.requests].count("GET")
    assert encoded(store.address("log.parquet", retries=7), stored) == (parts, content)
    # Only the footer is read again.
    assert [method for method, _ in store.requests].count("GET") == reads + 1
    store.put("log.parquet", log.slice(10), row_group_size=20)
    assert encoded(address, stored)[1]["item"] == log["item"].to_pylist()[10:]


def test_fsspec_reads_other_schemes(tmp_path):
    memory = fsspec.filesystem("memory")
    folder = f"/{tmp_path.name}"
    for day in ("mon", "tue"):
        with memory.open(f"{folder}/day={day}/a.parquet", "wb") as file:
            pq.write_table(rows(), file)
    address = f"memory://{tmp_path.name}"
    files = expand(f"{address}/day=*", "*.parquet")
    assert files == [f"memory://{tmp_path.name}/day={day}/a.parquet" for day in ("mon", "tue")]
    table = pa.concat_tables([rows(), rows()]).append_column("day", pa.array(["mon"] * 60 + ["tue"] * 60))
    pq.write_table(table, tmp_path / "all.parquet", row_group_size=60)
    assert batches(address) == batches(str(tmp_path / "all.parquet"))
    version = version_of(files[0])
    with memory.open(f"{folder}/day=mon/a.parquet", "wb") as file:
        pq.write_table(rows(30), file)
    with pytest.raises(StoreError, match="has changed"), opened(files[0], version):
        pass
    with pytest.raises(StoreError, match="nowhere://x"):
        store_of("nowhere://x/y")


def test_http_is_read_with_retries(store):
    pytest.importorskip("aiohttp", reason="fsspec needs it for HTTP")
    store.put("a.parquet", rows(), row_group_size=20)
    address = f"http://127.0.0.1:{store.port}/{store.bucket}/a.parquet"
    expected = batches_of_users(store.address("a.parquet"))
    reads = iter(range(100))
    store.fault = lambda _, method, __: (503, "cut")[k % 2] if (k := next(reads)) % 5 == 4 else None
    assert batches_of_users(address) == expected
    store.fault = lambda *_: None
    with pytest.raises(StoreError, match=r"b\.parquet"), opened(address.replace("a.parquet", "b.parquet")):
        pass


def batches_of_users(address):
    train = parquet(train=address, schema=SCHEMA_WITHOUT_DAY, seed=3).train
    return [batch.sparse["user"].values().tolist() for batch in train.batches(7)]


@pytest.mark.parametrize(
    ("message", "passes"),
    [
        ("AWS Error UNKNOWN (HTTP status 503) during GetObject", True),
        ("AWS Error UNKNOWN (HTTP status 429) during GetObject", True),
        ("AWS Error UNKNOWN (HTTP status 301) during GetObject", False),
        ("AWS Error UNKNOWN (HTTP status 400) during GetObject", False),
        ("AWS Error NETWORK_CONNECTION during GetObject", True),
        ("AWS Error RESOURCE_NOT_FOUND during GetObject", False),
        ("of key 'INVALID_rows.parquet': AWS Error SLOW_DOWN during GetObject", True),
        ("of key 'rows.parquet': AWS Error INVALID_ACCESS_KEY_ID during GetObject", False),
    ],
)
def test_only_what_may_pass_is_retried(monkeypatch, message, passes):
    monkeypatch.setattr(stores, "_FIRST_WAIT", 0.0)
    calls = []

    def call():
        calls.append(1)
        raise OSError(message)

    with pytest.raises(StoreError, match=r"s3://bucket/x"):
        stores.Store(None, 2).retried(call, "s3://bucket/x")
    assert len(calls) == (3 if passes else 1)
