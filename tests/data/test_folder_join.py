"""Joined folders: every labelled row once and in order, whatever interrupts the process that writes them."""

import itertools
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.data import DataError, FilePosition, FolderJoin, Follow, LabelJoin, folder_join
from meshrec.data.faults import Faults
from meshrec.data.features import Features, Integer, Label
from meshrec.data.folder_tables import FolderTables
from tests.forked import ForkedProgram


def create_join(**options):
    options = {"window_seconds": 20, "allowed_lateness_seconds": 5} | options
    return LabelJoin(key="key", time="ts", label="y", **options)


def streams(num=3000):
    rng = np.random.default_rng(0)
    times = np.arange(num) // 4 + rng.integers(0, 5, num)
    shown = pa.table({"key": [f"{n}" for n in range(num)], "ts": times, "item": np.arange(num) % 50})
    hits = np.sort(rng.choice(num, num // 3, replace=False))
    when = times[hits] + rng.integers(0, 30, len(hits))
    order = np.argsort(when, kind="stable")
    return shown, pa.table({"key": [f"{n}" for n in hits[order]], "ts": when[order]})


def write(folder, table, num_files, first=0):
    """Write a table to files of both formats, each under its final name when it is complete."""
    folder.mkdir(exist_ok=True)
    cuts = np.linspace(0, table.num_rows, num_files + 1).astype(int)
    for number, (start, stop) in enumerate(itertools.pairwise(cuts), first):
        part, path = table.slice(start, stop - start), folder / f"_{number:04d}"
        if number % 2:
            pq.write_table(part, path, row_group_size=37)
        else:
            with pa.ipc.new_file(str(path), part.schema) as writer:
                writer.write_table(part)
        path.rename(folder / f"{number:04d}.{'parquet' if number % 2 else 'arrow'}")


def written(output):
    """Return the rows of a joined folder, and check that they are numbered."""
    tables, num = [], 0
    for path in sorted(output.glob("*.arrow")):
        assert path.name == f"{num:016d}.arrow"
        with pa.ipc.open_file(str(path)) as file:
            tables.append(file.read_all().replace_schema_metadata(None))
        num += tables[-1].num_rows
    return pa.concat_tables(tables).combine_chunks() if tables else None


def join_slowly():
    """Join in a process: new files come one by one."""
    folder, num_files = Path(sys.argv[1]), int(sys.argv[2])
    delay = iter(range(10**9))

    def stop():
        done = [len(list((folder / name).glob("0*"))) == num_files for name in ("shown", "acted")]
        return all(done) and next(delay) > 3

    folder_join.FolderJoin(
        folder / "shown",
        folder / "acted",
        folder / "out",
        create_join(),
        poll_seconds=0.001,
        snapshot_rows=500,
    ).run(stop)
    return 0


def test_kills_lose_and_repeat_no_row(tmp_path):
    shown, acted = streams()
    expected = create_join().add(shown, acted)
    num_files, choice = 40, random.Random(0)
    parts = np.linspace(0, shown.num_rows, num_files + 1).astype(int)
    acted_parts = np.linspace(0, acted.num_rows, num_files + 1).astype(int)
    program, num_kills, num_before = None, 0, 0
    for number in range(num_files):
        for name, table, cuts in (("shown", shown, parts), ("acted", acted, acted_parts)):
            part = table.slice(cuts[number], cuts[number + 1] - cuts[number])
            write(tmp_path / name, part, 1, number)
        if program is None:
            program = ForkedProgram("tests.data.test_folder_join:join_slowly", [tmp_path, num_files])
        if number in (5, 18, 31):
            deadline = time.monotonic() + 60
            while (num := len(list((tmp_path / "out").glob("*.arrow")))) == num_before:
                assert time.monotonic() < deadline
                time.sleep(0.001)
            num_before = num
            time.sleep(choice.random() / 20)
            program.send_signal(signal.SIGKILL)
            program.wait()
            program, num_kills = None, num_kills + 1
    if program is None:
        program = ForkedProgram("tests.data.test_folder_join:join_slowly", [tmp_path, num_files])
    assert program.wait() == 0
    assert num_kills == 3
    assert (tmp_path / "out" / "_state.pt").exists()
    assert written(tmp_path / "out").equals(expected)


@pytest.mark.parametrize("snapshot_rows", [300, 10**6])
@pytest.mark.parametrize("options", [{}, {"idle_seconds": 3}, {"max_rows": 50, "on_full": "decide"}])
def test_written_rows_stay_whatever_the_options_of_the_join(tmp_path, options, snapshot_rows, monkeypatch):
    shown, acted = streams()
    folders, output = [tmp_path / name for name in ("shown", "acted")], tmp_path / "out"
    polls, before = iter(range(10**9)), None

    def stop():
        number = next(polls)
        for folder, table, size in zip(folders, (shown, acted), (100, 33), strict=True):
            # Some files come later than others.
            if number % 7 > 1 or folder.name == "shown":
                write(folder, table.slice(number * size, size), 1, number)
        if number % 5 == 4:
            raise KeyboardInterrupt
        return number == 33

    # The clock is behind the events, or ahead of some that have not arrived.
    monkeypatch.setattr(folder_join.time, "time_ns", lambda: 10**10 * next(polls))
    while True:
        join = FolderJoin(
            *folders,
            output,
            create_join(**options),
            poll_seconds=1e-9,
            clock_lag_seconds=0,
            snapshot_rows=snapshot_rows,
        )
        try:
            join.run(stop)
            break
        except KeyboardInterrupt:
            rows = written(output)
            assert before is None or rows.slice(0, before.num_rows).equals(before)
            before = rows
    rows = written(output)
    assert rows.slice(0, before.num_rows).equals(before)
    assert rows.num_rows == len(set(rows["key"].to_pylist())) > before.num_rows > 100


def test_rows_are_followed_while_they_are_joined(tmp_path):
    shown, acted = streams()
    write(tmp_path / "shown", shown, 3)
    write(tmp_path / "acted", acted, 2)
    output = tmp_path / "out"
    expected = create_join().add(shown, acted)
    features = Features(labels=(Label(column="y"),), features=(Integer(name="item", num_embeddings=50),)).fit(
        [expected]
    )
    FolderJoin(tmp_path / "shown", tmp_path / "acted", output, create_join()).run(lambda: True)
    items, labels = [], []
    for burst in Follow(output, features, poll_seconds=0.001).bursts(10, stop=lambda: True):
        for batch in burst.batches:
            items += batch.sparse.values().tolist()
            labels += batch.labels.tolist()
    num = expected.num_rows // 10 * 10
    assert items == expected["item"].to_pylist()[:num]
    assert labels == expected["y"].to_pylist()[:num]


def test_inputs_that_changed_are_an_error(tmp_path):
    shown, acted = streams()
    write(tmp_path / "shown", shown, 2)
    write(tmp_path / "acted", acted, 2)
    folders, output = (tmp_path / "shown", tmp_path / "acted"), tmp_path / "out"
    FolderJoin(*folders, output, create_join()).run(lambda: True)
    (output / "_state.pt").unlink()
    FolderJoin(*folders, output, create_join()).run(lambda: True)
    (output / "_state.pt").unlink()
    write(tmp_path / "shown", shown.slice(0, 17), 1)
    with pytest.raises(DataError, match=r"1,500 rows.*17"):
        FolderJoin(*folders, output, create_join()).run(lambda: True)
    (output / f"{0:016d}.arrow").rename(output / f"{5:016d}.arrow")
    with pytest.raises(DataError, match=r"0000005\.arrow"):
        FolderJoin(*folders, output, create_join()).run(lambda: True)


def test_two_processes_cannot_write_to_one_folder(tmp_path):
    write(tmp_path / "shown", streams()[0], 1)

    def other():
        with pytest.raises(ValueError, match=r"another process.*out"):
            FolderJoin(tmp_path / "shown", tmp_path / "shown", tmp_path / "out", create_join()).run()
        return True

    FolderJoin(tmp_path / "shown", tmp_path / "shown", tmp_path / "out", create_join()).run(other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"poll_seconds": 0}, "poll_seconds.*0"),
        ({"clock_lag_seconds": -1}, "clock_lag_seconds.*-1"),
        ({"snapshot_rows": 0}, "snapshot_rows.*0"),
    ],
)
def test_options_that_cannot_be(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        FolderJoin(tmp_path, tmp_path, tmp_path, create_join(), **options)


def test_impressions_of_a_broker_need_features_and_an_output_keeps_its_streams(tmp_path):
    address = "unix:///nowhere?stream=a&password=secret"
    with pytest.raises(ValueError, match=r"impressions are unix:///nowhere.*features") as error:
        FolderJoin(address, tmp_path, tmp_path, create_join())
    assert "secret" not in str(error.value)
    for name in ("shown", "acted"):
        (tmp_path / name).mkdir()
    FolderJoin(tmp_path / "shown", tmp_path / "acted", tmp_path / "out", create_join()).run(lambda: True)
    with pytest.raises(ValueError, match="other actions than unix:///nowhere"):
        FolderJoin(tmp_path / "shown", address, tmp_path / "out", create_join()).run(lambda: True)


def test_tables_continue_at_any_position(tmp_path, monkeypatch):
    monkeypatch.setattr("meshrec.data.folder_tables.TABLE_ROWS", 64)
    shown, _ = streams(400)
    write(tmp_path / "in", shown, 4)
    reader, tables, positions = FolderTables(tmp_path / "in", Faults("raise")), [], [FilePosition()]
    while (table := reader.read()) is not None:
        tables.append(table)
        positions.append(reader.position)
    assert pa.concat_tables(tables).equals(shown)
    for number, position in enumerate(positions):
        again = FolderTables(tmp_path / "in", Faults("raise"), position=position)
        assert [again.read() for _ in tables[number:]] == tables[number:]
        assert again.read() is None


def test_damaged_files_are_skipped_and_counted(tmp_path):
    shown, _ = streams(400)
    write(tmp_path / "in", shown, 3)
    for name in ("0001.parquet", "0002.arrow"):
        path = tmp_path / "in" / name
        content = path.read_bytes()
        path.write_bytes(content[:30] + b"\xff" * (len(content) - 60) + content[-30:])
    reader = FolderTables(tmp_path / "in", Faults("raise"))
    reader.read()
    with pytest.raises(DataError, match="0001"):
        reader.read()
    faults = Faults("skip")
    reader = FolderTables(tmp_path / "in", faults)
    assert reader.read().equals(shown.slice(0, 133))
    assert reader.read() is None
    assert len(faults.by_file) == 2
