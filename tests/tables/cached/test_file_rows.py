"""Tables in files train, are saved, moved, killed and resumed as tables in memory are: to the bit."""

import errno
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FileRows,
    KeyedJaggedTensor,
    checkpoint,
)
from meshrec.checkpoint.snapshot import shared_memory
from meshrec.export.whole_tables import with_whole_tables
from meshrec.ops import records
from meshrec.optim import OptimizerSpec
from meshrec.tables.cached import file as row_file
from meshrec.tables.cached.file import RowFileError
from meshrec.testing import RankError
from tests.tables.cached.file_tables import (
    FIXED,
    SIZES,
    FileTables,
    check_drawn_programs,
    fails_on_one_rank,
    same,
    tables_of,
    too_small,
    whole,
)

alone, batches, train = FIXED.alone, FIXED.batches, FIXED.train
DRAWS = int(os.environ.get("MESHREC_DRAWS", "6"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_drawn_programs_give_the_bits_of_memory(ranks, tmp_path, world_size):
    check_drawn_programs(ranks(world_size), "fixed", tmp_path, DRAWS // 2)


@pytest.mark.parametrize("spec", OptimizerSpec.__subclasses__(), ids=lambda spec: spec.__name__)
def test_every_optimizer_gives_the_bits_of_memory_for_any_number_of_threads(tmp_path, spec):
    tables = FileTables(FIXED.configs, FIXED.draw_ids, {"one": spec(lr=0.1)}, longest=3, cached=(70, 70))
    threads, found = torch.get_num_threads(), []
    try:
        for folder, number in ((tmp_path, 3), (None, 1)):
            torch.set_num_threads(number)
            model = tables.alone(folder)
            tables.train(model, range(8))
            found.append(whole(model))
    finally:
        torch.set_num_threads(threads)
    assert same(*found)


def test_the_number_of_requests_in_flight_does_not_matter(tmp_path, monkeypatch):
    found = []
    for in_flight in (0, 1, 7):
        monkeypatch.setattr(row_file, "IN_FLIGHT", in_flight)
        model = alone(tmp_path)
        train(model, range(8))
        found.append(whole(model))
    assert same(found[0], found[1])
    assert same(found[0], found[2])


def test_a_row_is_read_and_written_at_most_once_per_batch(tmp_path, monkeypatch):
    calls = {"read": [], "write": []}
    for name, seen in calls.items():
        plain = getattr(records, name)

        def watched(file, layout, keys, *rest, plain=plain, seen=seen, **options):
            seen.append(keys.tolist())
            return plain(file, layout, keys, *rest, **options)

        monkeypatch.setattr(records, name, watched)
    model = alone(tmp_path, cached=60)
    train(model, range(3))
    for table in tables_of(model):
        table.snapshot().close()  # waits for all that is under way
    calls["read"].clear()
    train(model, range(3, 4))
    rows = [row for keys in calls["read"] for row in keys]
    assert rows
    assert all(keys == sorted(set(keys)) for kind in calls.values() for keys in kind)


def test_a_snapshot_stays_while_training_and_loading_go_on(tmp_path):
    model = alone(tmp_path, cached=60)
    train(model, range(4))
    before = whole(model)
    table = tables_of(model)[0]
    snapshot = table.snapshot()
    train(model, range(4, 12))
    model.load_state_dict(
        {name: value + 1 for name, value in whole(model).items() if name in model.state_dict()}
    )
    train(model, range(12, 16))
    parts = [block.parts["weight"].clone() for block in snapshot.stream()]
    snapshot.close()
    assert torch.equal(torch.cat(parts), before["ebc.embedding_bags.t0.weight"])
    assert not list(Path(tmp_path).glob("*/*.log-*"))


def test_a_damaged_row_is_named_and_loading_heals(tmp_path):
    model = alone(tmp_path, cached=60)
    train(model, range(6))
    saved = {name: value for name, value in whole(model).items() if name in model.state_dict()}
    table = tables_of(model)[0]
    table._transfers.finish_writes()
    cached = set(table.slot_keys.tolist())
    key = next(key for key in range(400) if key not in cached)
    path, layout = table.stored.file.path, table.stored.file.layout
    with open(path, "r+b") as file:
        file.seek(layout.position(key) + layout.offset(key) + 3)
        file.write(b"\x5a")
    ids = torch.tensor([key])
    broken = KeyedJaggedTensor([f"f_{name}" for name in SIZES], ids, lengths=torch.tensor([1, 0, 0]))
    with pytest.raises(RowFileError, match=f"'t0'.*{key}"):
        model(broken)
    with pytest.raises(RowFileError, match=f"{key}"):
        model.state_dict()["ebc.embedding_bags.t0.weight"].clone()
    train(model, range(6, 7))  # other rows are well
    state = {
        f"ebc.embedding_bags.{name}.weight": saved[f"ebc.embedding_bags.{name}.weight"] for name in SIZES
    }
    with pytest.raises(RuntimeError, match=f"'t0'.*{key}"):
        model.load_state_dict(state)  # its optimizer state would be lost


def full_disk(monkeypatch, is_full):
    plain = records.write

    def write(file, layout, keys, *rest, **options):
        if is_full and len(keys):
            return torch.tensor([[0, errno.ENOSPC]])
        return plain(file, layout, keys, *rest, **options)

    monkeypatch.setattr(records, "write", write)


def test_a_full_disk_refuses_the_step_and_loses_nothing(tmp_path, monkeypatch):
    models = {
        name: alone(folder, cached=40) for name, folder in (("side", tmp_path / "rows"), ("plain", None))
    }
    for model in models.values():
        train(model, range(8))
    side = models["side"]
    checkpoint.save(tmp_path / "before", {"model": side})
    expected, is_full, refusal = whole(side), [True], ""
    full_disk(monkeypatch, is_full)
    done = 0
    for done in range(8, 30):
        try:
            train(side, [done])
        except RowFileError as error:
            refusal = str(error)
            break
    assert "no space is left on the disk" in refusal
    assert "No row is lost" in refusal
    train(models["plain"], range(8, done))
    assert same(
        whole(side), whole(models["plain"])
    )  # rows that could not be written are read from their copies
    is_full.clear()
    for model in models.values():
        train(model, range(done, done + 4))
    assert same(whole(side), whole(models["plain"]))
    checkpoint.load(tmp_path / "before", {"model": side})
    names = list(side.state_dict())
    assert all(torch.equal(whole(side)[name], expected[name]) for name in names)


def may_mount():
    probe = ["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which("unshare") is not None and not subprocess.run(probe, capture_output=True).returncode


@pytest.mark.skipif(not may_mount(), reason="needs a file system of its own")
def test_a_disk_that_is_full_refuses_the_step_until_it_has_room(tmp_path):
    program = Path(__file__).with_name("full_disk_file_rows.py")
    found = subprocess.run(
        ["unshare", "--mount", sys.executable, str(program), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert "was refused" in found.stdout


def test_a_cache_that_is_too_small_is_named_on_every_rank(ranks, tmp_path):
    with pytest.raises(RankError, match=r"rank 0.*'t\d'.*cache_rows"):
        ranks(2).run(too_small, str(tmp_path))


def test_an_error_of_one_rank_is_raised_on_all_of_them(ranks, tmp_path):
    one, other = ranks(2).run(fails_on_one_rank, str(tmp_path))
    assert one == other
    assert one == ["rank 1: the disk is gone"]


def test_files_of_killed_processes_are_removed(tmp_path):
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import file_tables as t; "
        "m = t.FIXED.alone(sys.argv[2]); print('made', flush=True); import time; time.sleep(60)"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "made\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob("*/rows"))) == 3
    mine = alone(tmp_path)
    other = alone(tmp_path)  # a live process keeps its files
    assert len(list(tmp_path.glob("*/rows"))) == 6
    for model in (mine, other):
        for table in tables_of(model):
            table.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "FileRows.*cache_rows.*cache_bytes.*cache_rows=None.*cache_bytes=None"),
        ({"cache_rows": 3, "cache_bytes": 3}, "Give"),
        ({"cache_rows": 0}, "cache_rows.*1.*0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        FileRows(path="rows", **options)


def test_quantised_tables_and_folders_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"FP32.*FP16.*BF16"):
        EmbeddingBagConfig(
            name="t", num_embeddings=8, embedding_dim=8, feature_names=["f"], data_type=DataType.INT8,
            storage=FileRows(path=tmp_path, cache_rows=4),
        )  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(RowFileError, match="used"):
        alone(tmp_path / "file")


def test_an_unsharded_module_is_refused_outside_of_meta(tmp_path):
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=8,
        embedding_dim=8,
        feature_names=["f"],
        storage=FileRows(path=tmp_path, cache_rows=4),
    )
    with pytest.raises(ValueError, match=r"'t'.*storage=FileRows....*'meta'"):
        EmbeddingBagCollection([config])
    with pytest.raises(ValueError, match="module"):
        EmbeddingBagCollection([config], device="meta").to_empty(device="cpu")


def test_whole_tables_are_mapped_and_not_in_memory(tmp_path):
    model = alone(tmp_path)
    train(model, range(3))
    made = with_whole_tables(model)
    batch = next(batches([7]))
    assert torch.equal(made(batch)[1], model(batch)[1])
    weight = made.ebc.embedding_bags["t0"].weight
    assert any(begin <= weight.data_ptr() < end for begin, end in shared_memory())
    assert len(list(tmp_path.iterdir())) == len(tables_of(model))


def test_the_cache_stays_within_its_bytes(tmp_path):
    options = FileRows(path=tmp_path, cache_bytes=1 << 16)
    assert options.num_cached(260) * 260 < 1 << 16


def test_runs_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    program = Path(__file__).with_name("killed_file_rows.py")
    kills = os.environ.get("MESHREC_KILLS", "2")
    found = subprocess.run(
        [sys.executable, str(program), str(tmp_path), kills, "1", "fixed"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"{kills} kills" in found.stdout
