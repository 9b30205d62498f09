"""Following a folder: every row once and in order, on any number of ranks, whatever interrupts it."""

import json
import os
import shutil
import signal

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from meshrec.checkpoint import CheckpointManager
from meshrec.comms.mesh import Axis, default_env
from meshrec.data import DataError, FilePosition, Follow
from meshrec.data.features import Features, Integer, Label, Number, TimedFeatures
from meshrec.data.locations import without_secrets

NUM = 10_000
FEATURES = Features(
    labels=(Label(column="y"),),
    features=(Integer(name="id", num_embeddings=NUM), Number(name="x")),
).fit([pa.table({"y": [0, 1], "id": [0, 1], "x": [0.5, 1.5]})])


def rows(first, last, **changes):
    ids = np.arange(first, last)
    return pa.table({"y": ids % 2, "id": ids, "x": ids / 2.0} | changes)


def write(folder, name, table, group=4):
    """Write a file under its final name when it is complete."""
    path = folder / f"_{name}"
    if name.endswith(".parquet"):
        pq.write_table(table, path, row_group_size=group)
    else:
        with pa.ipc.new_file(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=group)
    path.rename(folder / name)


def write_all(folder):
    """Write 40 rows in five files, of which one is empty."""
    write(folder, "a.parquet", rows(0, 10))
    write(folder, "b.arrow", rows(10, 13))
    write(folder, "c.parquet", rows(0, 0))
    write(folder, "d.parquet", rows(13, 33), group=7)
    write(folder, "e.ipc", rows(33, 40))


def follow(folder, **options):
    return Follow(folder, FEATURES, poll_seconds=0.001, **options)


def steps(source, batch_size, **options):
    """Yield the batches of all bursts, and the position after each."""
    for burst in source.bursts(batch_size, **options):
        yield from zip(burst.batches, burst.positions, strict=True)


def read(folder, batch_size, *, axis=None, position=None, stop=lambda: True, **options):
    """Return the IDs of every batch, and the position after it."""
    source = follow(folder, **options)
    batches = steps(source, batch_size, position=position, axis=axis or Axis(), stop=stop)
    return [(batch.sparse.values().tolist(), after) for batch, after in batches]


def test_rows_come_in_order_and_continue_at_any_position(tmp_path):
    write_all(tmp_path)
    found = read(tmp_path, 3)
    assert [ids for ids, _ in found] == [list(range(n, n + 3)) for n in range(0, 39, 3)]
    assert [found[3][1][name] for name in ("file", "row", "num_rows")] == ["b.arrow", 2, 3]
    for number, (_, position) in enumerate(found):
        assert read(tmp_path, 3, position=position) == found[number + 1 :]
        # The last row waits for two more.
        assert [ids for ids, _ in read(tmp_path, 1, position=position)] == [
            [n] for n in range(3 * number + 3, 40)
        ]


def read_on_ranks(folder, batch_size, position):
    return read(folder, batch_size, axis=default_env().world, position=position)


def test_ranks_share_the_rows_of_a_step(ranks, tmp_path):
    write_all(tmp_path)
    expected = read(tmp_path, 8)
    first, second = ranks(2).run(read_on_ranks, tmp_path, 4, None)
    assert [a + b for (a, _), (b, _) in zip(first, second, strict=True)] == [ids for ids, _ in expected]
    assert [place for _, place in first] == [place for _, place in second] == [place for _, place in expected]
    position = expected[2][1]
    both = ranks(2).run(read_on_ranks, tmp_path, 4, position)
    assert [a + b for (a, _), (b, _) in zip(*both, strict=True)] == [ids for ids, _ in expected[3:]]


def skip_on_ranks(folder, aside):
    source = follow(folder, on_error="skip", set_aside=aside)
    batches = steps(source, 2, axis=default_env().world, stop=lambda: True)
    return [batch.sparse.values().tolist() for batch, _ in batches], [*source.faults.skipped]


def test_every_rank_names_the_rows_that_it_omits(ranks, tmp_path):
    folder, aside = tmp_path / "events", tmp_path / "aside"
    folder.mkdir()
    write(folder, "a.parquet", rows(0, 12, x=[0.0, 1, None, 3, 4, 5, 6, 7, 8, None, 10, 11]), group=12)
    (first, (of_first,)), (second, (of_second,)) = ranks(2).run(skip_on_ranks, folder, aside)
    assert first == [[0, 1], [4, 5], [8]]
    assert second == [[3], [6, 7], [10, 11]]
    assert "row 9 is" in of_first
    assert "row 2 is" in of_second
    lines = [json.loads((aside / f"rank{rank}.jsonl").read_text()) for rank in (0, 1)]
    assert [(line["row"], line["values"]["id"]) for line in lines] == [(9, 9), (2, 2)]


def test_files_are_read_when_they_are_complete(tmp_path):
    folder = tmp_path / "folder"
    events = []

    def stop():
        # Called whenever the rows do not suffice.
        actions = [
            folder.mkdir,
            lambda: write(folder, "b.parquet", rows(6, 12)),
            lambda: (folder / "a.parquet").write_bytes(whole[:-3]),
            lambda: (folder / "a.parquet").write_bytes(whole),
        ]
        if len(events) < len(actions):
            actions[len(events)]()
        events.append(len(events))
        return len(events) > len(actions) + 1

    write(tmp_path, "a.parquet", rows(0, 6))
    whole = (tmp_path / "a.parquet").read_bytes()
    assert [ids for ids, _ in read(folder, 12, stop=stop)] == [list(range(12))]


def test_a_burst_has_the_steps_whose_rows_exist_and_none_while_it_waits(tmp_path):
    write(tmp_path, "a.parquet", rows(0, 11))
    calls = []

    def stop():
        if len(calls) == 1:
            write(tmp_path, "b.parquet", rows(11, 12))
        calls.append(None)
        return len(calls) > 2

    bursts = follow(tmp_path).bursts(4, stop=stop)
    found = [[batch.sparse.values().tolist() for batch in burst.batches] for burst in bursts]
    assert found == [[[0, 1, 2, 3], [4, 5, 6, 7]], [], [], [[8, 9, 10, 11]]]


def test_events_have_the_time_of_a_column_or_of_their_file(tmp_path):
    seconds = 1.7e9 + np.arange(9)
    write(tmp_path, "a.parquet", rows(0, 9, ts=seconds))
    os.utime(tmp_path / "a.parquet", ns=(0, 5_000_000))
    found = [batch.times.tolist() for batch, _ in steps(follow(tmp_path), 3, stop=lambda: True)]
    assert found == [[5_000] * 3] * 3
    timed = Follow(tmp_path, TimedFeatures(FEATURES, "ts"))
    found = [batch.times for batch, _ in steps(timed, 4, stop=lambda: True)]
    assert torch.cat(found).tolist() == (1e6 * seconds[:8]).astype(int).tolist()


@pytest.mark.parametrize("bad", [None, "soon", "1901-01-01"])
def test_an_event_without_a_time_is_damaged(tmp_path, bad):
    write(tmp_path, "a.parquet", rows(0, 3, ts=["2026-01-01T00:00:01", bad, "2026-01-01T00:00:03"]))
    features = TimedFeatures(FEATURES, "ts")
    with pytest.raises(DataError, match="'ts': row 1"):
        next(steps(Follow(tmp_path, features), 3, stop=lambda: True))
    source = Follow(tmp_path, features, on_error="skip")
    ((batch, _),) = steps(source, 3, stop=lambda: True)
    assert batch.sparse.values().tolist() == [0, 2]
    assert batch.times.diff().tolist() == [2_000_000]


def test_a_missing_time_column_is_an_error(tmp_path):
    write(tmp_path, "a.parquet", rows(0, 3))
    with pytest.raises(DataError, match="'when'"):
        next(steps(Follow(tmp_path, TimedFeatures(FEATURES, "when")), 3, stop=lambda: True))


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_a_store_is_followed_too(tmp_path, scheme):
    write_all(tmp_path)
    for path in tmp_path.iterdir() if scheme == "memory" else ():
        fsspec.filesystem("memory").pipe(f"{tmp_path}/{path.name}", path.read_bytes())
    found = read(f"{scheme}://{tmp_path}", 4)
    assert [row for ids, _ in found for row in ids] == list(range(40))
    assert read(f"{scheme}://{tmp_path}", 4, position=found[4][1]) == found[5:]


def test_a_folder_may_be_relative_to_the_working_folder(tmp_path, monkeypatch):
    write_all(tmp_path)
    monkeypatch.chdir(tmp_path.parent)
    assert read(f"./{tmp_path.name}", 4) == read(tmp_path, 4)


def test_a_file_that_changed_or_vanished_is_an_error(tmp_path):
    write_all(tmp_path)
    position = read(tmp_path, 4)[4][1]
    assert position["file"] == "d.parquet"
    (tmp_path / "a.parquet").unlink()  # consumed: it may go
    assert len(read(tmp_path, 4, position=position)) == 5
    write(tmp_path, "d.parquet", rows(13, 34))
    with pytest.raises(DataError, match=r"d\.parquet has changed"):
        read(tmp_path, 4, position=position)
    (tmp_path / "d.parquet").unlink()
    with pytest.raises(DataError, match=r"d\.parquet has vanished"):
        read(tmp_path, 4, position=position)


def test_late_files_are_counted_and_named(tmp_path):
    folder, aside = tmp_path / "events", tmp_path / "aside"
    folder.mkdir()
    write(folder, "b.parquet", rows(0, 6))
    calls = []

    def stop():
        if not calls:
            write(folder, "a.parquet", rows(50, 55))
            write(folder, "c.parquet", rows(6, 9))
        calls.append(None)
        return len(calls) > 2

    source = follow(folder, set_aside=aside)
    found = [batch.sparse.values().tolist() for batch, _ in steps(source, 3, stop=stop)]
    assert found == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    ((message, num),) = source.faults.skipped.items()
    assert num == 5
    assert "a.parquet" in message
    assert json.loads((aside / "rank0.jsonl").read_text()) == {
        "file": "a.parquet",
        "row": None,
        "problem": "late",
    }


def test_damaged_rows_are_counted_and_kept_aside(tmp_path):
    folder, aside = tmp_path / "events", tmp_path / "aside"
    folder.mkdir()
    write(folder, "a.parquet", rows(0, 9, x=[0.0, 1, None, 3, 4, 5, 6, None, 8]))
    with pytest.raises(DataError, match="'x': row 2"):
        read(folder, 3)
    source = follow(folder, on_error="skip", set_aside=aside)
    found = [batch.sparse.values().tolist() for batch, _ in steps(source, 3, stop=lambda: True)]
    assert found == [[0, 1], [3, 4, 5], [6, 8]]
    assert sum(source.faults.skipped.values()) == 2
    lines = [json.loads(line) for line in (aside / "rank0.jsonl").read_text().splitlines()]
    assert [(line["file"], line["row"], line["values"]["id"]) for line in lines] == [
        ("a.parquet", 2, 2),
        ("a.parquet", 7, 7),
    ]


def test_damaged_files_are_left_out(tmp_path):
    write(tmp_path, "a.parquet", rows(0, 3))
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"x" * 50)  # a writer that was killed
    write(tmp_path, "c.parquet", rows(3, 6).set_column(2, "x", pa.array(["no", "number", "here"])))
    write(tmp_path, "d.parquet", rows(6, 9))
    calls = []

    def stop():
        calls.append(None)
        return len(calls) > 5

    with pytest.raises(DataError, match=r"b\.parquet"):
        read(tmp_path, 3, stop=stop, broken_seconds=1e-6)
    source = follow(tmp_path, on_error="skip", broken_seconds=1e-6)
    found = [batch.sparse.values().tolist() for batch, _ in steps(source, 3, stop=stop)]
    assert found == [[0, 1, 2], [6, 7, 8]]
    assert len(source.faults.skipped) == 2


def test_a_row_group_that_cannot_be_read_is_left_out(tmp_path):
    table = rows(0, 3000, x=np.random.default_rng(0).random(3000))
    write(tmp_path, "a.parquet", table, group=1000)
    path = tmp_path / "a.parquet"
    column = pq.ParquetFile(path).metadata.row_group(1).column(2)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    with pytest.raises(DataError, match="row group 1"):
        read(tmp_path, 500)
    found = [row for ids, _ in read(tmp_path, 500, on_error="skip") for row in ids]
    assert found == [*range(1000), *range(2000, 3000)]


def test_options_are_checked(tmp_path):
    with pytest.raises(ValueError, match="poll_seconds is 0"):
        Follow(tmp_path, FEATURES, poll_seconds=0)
    file = tmp_path / "a.parquet"
    file.touch()
    with pytest.raises(ValueError, match=r"a\.parquet is a file"):
        Follow(file, FEATURES)
    with pytest.raises(ValueError, match="got 0"):
        next(follow(tmp_path).bursts(0))
    with pytest.raises(ValueError, match="'partition'"):
        next(follow(tmp_path).bursts(1, position={"partition": 0}))


class Counts(torch.nn.Module):
    """Model that counts how often it has seen a row, and has a weight that depends on the order."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(NUM))
        self.weight = torch.nn.Parameter(torch.zeros(()))


def train(folder, out, batch_size, kill_at=None):
    """Train until the folder has no more rows; with a checkpoint every third step."""
    axis = default_env().world if dist.is_initialized() else Axis()
    model, state = Counts(), {"position": FilePosition()._asdict()}
    state["model"] = model
    manager = CheckpointManager(out)
    manager.load_latest(state)
    source = follow(folder)
    batches = steps(source, batch_size, position=state["position"], axis=axis, stop=lambda: True)
    for step, (batch, position) in enumerate(batches, int(model.seen.sum()) // (batch_size * axis.size) + 1):
        step_seen = torch.zeros(NUM).index_put_((batch.sparse.values(),), torch.ones(()), accumulate=True)
        if axis.size > 1:
            dist.all_reduce(step_seen)
        with torch.no_grad():
            model.seen += step_seen
            model.weight += model.weight * 0.5 + (step_seen * torch.arange(NUM)).sum()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        state["position"] = position
        if step % 3 == 0:
            manager.save(step, state)
    return model.state_dict()


@pytest.mark.parametrize("kill_at", [2, 3, 7])
def test_no_row_is_lost_or_read_twice_after_a_kill(ranks, tmp_path, kill_at):
    folder = tmp_path / "events"
    folder.mkdir()
    write_all(folder)
    expected = train(folder, tmp_path / "whole", 4)
    assert torch.equal(expected["seen"][:40], torch.ones(40))
    pid = os.fork()
    if not pid:
        try:
            train(folder, tmp_path / "one", 4, kill_at)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    other = tmp_path / "two"
    if (tmp_path / "one").exists():  # killed after the first checkpoint
        shutil.copytree(tmp_path / "one", other)
    found = train(folder, tmp_path / "one", 4)
    on_two_ranks = ranks(2).run(train, folder, other, 2)[0]
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
        assert torch.equal(on_two_ranks[name], value), name


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("events", "events"),
        ("s3://bucket/events?region=eu", "s3://bucket/events?region=eu"),
        ("s3://id:word@bucket/events", "s3://***@bucket/events"),
        ("redis://:word@host:6379/0?stream=a,b", "redis://***@host:6379/0?stream=a,b"),
        ("kafka://host/a?sasl.password=word&x=1", "kafka://host/a?sasl.password=***&x=1"),
        ("unix:///tmp/socket?db=0&stream=a", "unix:///tmp/socket?db=0&stream=a"),
    ],
)
def test_addresses_are_shown_without_secrets(address, shown):
    assert without_secrets(address) == shown
