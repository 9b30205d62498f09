"""Tables in files train, are saved, moved, killed and resumed as tables in memory are: to the bit."""

import errno
import os
import random
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
from meshrec import distributed as md
from meshrec.checkpoint.snapshot import shared_memory
from meshrec.comms.mesh import default_env
from meshrec.export.whole_tables import with_whole_tables
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops import records
from meshrec.optim import SGD, Adam, PartialRowWiseLAMB, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.tables import row_file
from meshrec.tables.row_file import RowFileError
from meshrec.testing import RankError

SIZES = {"t0": (400, 8), "t1": (90, 64), "t2": (50, 12)}
SPECS = {
    "rowwise": RowWiseAdagrad(lr=0.1),
    "adam": Adam(lr=0.1),
    "sgd": SGD(lr=0.1),
    "lamb": PartialRowWiseLAMB(lr=0.1),
}
BUILDERS = {
    "one": (lambda: md.table_wise(rank=0), md.data_parallel, lambda: md.table_wise(rank=0)),
    "rows": (md.row_wise, md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1]), lambda: md.table_wise(rank=1), md.column_wise),
    "grid": (md.grid_shard, md.data_parallel, md.row_wise),
}


class Model(torch.nn.Module):
    def __init__(self, folder, cached, data_type):
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name,
                    num_embeddings=rows,
                    embedding_dim=dim,
                    feature_names=[f"f_{name}"],
                    data_type=data_type,
                    storage=None if folder is None else FileRows(path=folder, cache_rows=cached),
                )
                for name, (rows, dim) in SIZES.items()
            ],
            device="meta",
        )

    def forward(self, features):
        loss = self.ebc(features).values().square().sum()
        return loss, loss.detach()


def plan_of(kind, world_size):
    kind = "one" if world_size == 1 else kind
    builders = dict(zip(SIZES, [builder() for builder in BUILDERS[kind]], strict=True))
    ebc = Model(None, 1, DataType.FP32).ebc
    made = md.construct_module_sharding_plan(ebc, builders, world_size=world_size, local_size=1)
    return md.ShardingPlan({"ebc": made})


def make(folder, spec="rowwise", kind="one", cached=70, data_type=DataType.FP32, env=None):
    env = env or default_env()
    return DistributedModelParallel(
        Model(folder, cached, data_type),
        env,
        plan=plan_of(kind, env.shard.size),
        sharders=[md.EmbeddingBagCollectionSharder(SPECS[spec])],
        init_data_parallel=False,
    )


def batches(steps, rank=None):
    rank = default_env().world.rank if rank is None else rank
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + rank)
        lengths = torch.randint(0, 4, (3, 5), generator=generator)
        ids = [
            (rows * torch.rand(int(own.sum()), generator=generator) ** 2).long()
            for (rows, _), own in zip(SIZES.values(), lengths, strict=True)
        ]
        yield KeyedJaggedTensor([f"f_{name}" for name in SIZES], torch.cat(ids), lengths=lengths.view(-1))


def train(model, steps):
    for batch in batches(steps):
        model(batch)[0].backward()


def full(value):
    if not isinstance(value, torch.Tensor):
        return torch.as_tensor(value)
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def whole(model):
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, slots in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{slot}": full(value) for slot, value in slots.items()}
    return found


def same(one, other):
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])] == []


def tables_of(model):
    return [table for shards in model.module.ebc.built.shards.values() for table in shards.tables]


def alone(folder, **options):
    return make(folder, env=md.ShardingEnv.single_process(), **options)


def drawn_program(folder, number):
    """Trains, evaluates, loads, moves, saves in the background; beside it the same in memory."""
    draw = random.Random(number)
    size = default_env().world.size
    spec, kind = draw.choice(list(SPECS)), draw.choice(list(BUILDERS))
    data_type = draw.choice([DataType.FP32, DataType.FP32, DataType.BF16, DataType.FP16])
    options = {"spec": spec, "kind": kind, "data_type": data_type}
    side = make(f"{folder}/rows", cached=draw.randint(65, 100) * size, **options)
    plain = make(None, **options)
    saved, step = None, 0
    for turn in range(draw.randint(3, 7)):
        action = draw.choice(["train", "train", "ahead", "evaluate", "save", "load", "move"])
        steps = range(step, step + draw.randint(1, 4))
        step = steps.stop
        if action == "move" and size > 1:
            kind = draw.choice(list(BUILDERS))
        for name, model in (("side", side), ("plain", plain)):
            state = {"model": model, "tables": model.fused_optimizer}
            if action == "ahead":
                pipeline, feed = TrainPipeline(model, model.fused_optimizer), batches(steps)
                for _ in steps:
                    pipeline.progress(feed)
            elif action == "evaluate":
                with torch.no_grad():
                    for batch in batches(steps):
                        model(batch)
            elif action == "save":
                pending = checkpoint.async_save(f"{folder}/{name}-{turn}", state)
                train(model, steps)
                pending.wait()
            elif action == "load" and saved is not None:
                # What one kind of storage saved, the other loads.
                other = {"side": "plain", "plain": "side"}[name]
                checkpoint.load(f"{folder}/{other}-{saved}", state)
            elif action == "move" and size > 1:
                model.reshard(plan_of(kind, size))
            train(model, steps)
        if action == "save":
            saved = turn
    return same(whole(side), whole(plain))


DRAWS = int(os.environ.get("MESHREC_DRAWS", "16"))


@pytest.mark.parametrize("world_size", [1, 2])
def test_drawn_programs_give_the_bits_of_memory(ranks, tmp_path, world_size):
    pool = ranks(world_size)
    for number in range(DRAWS // 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert pool.run(drawn_program, str(folder), number) == [True] * world_size, number
    assert not list(tmp_path.glob("*/rows/*.log-*"))


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
    assert not list(Path(tmp_path).glob("*.log-*"))


def test_a_damaged_row_is_named_and_loading_heals(tmp_path):
    model = alone(tmp_path, cached=60)
    train(model, range(6))
    saved = {name: value for name, value in whole(model).items() if name in model.state_dict()}
    table = tables_of(model)[0]
    table._settle_writes()
    cached = set(table.slot_keys.tolist())
    key = next(key for key in range(400) if key not in cached)
    path, layout = table.stored.file.path, table.stored.file.layout
    with open(path, "r+b") as file:
        file.seek(layout.position(key) + layout.offset(key) + 3)
        file.write(b"\x5a")
    ids = torch.tensor([key])
    broken = KeyedJaggedTensor([f"f_{name}" for name in SIZES], ids, lengths=torch.tensor([1, 0, 0]))
    with pytest.raises(RowFileError, match=rf"table 't0': row {key} is damaged: the checksum .* at byte"):
        model(broken)
    with pytest.raises(RowFileError, match=f"row {key} is damaged"):
        model.state_dict()["ebc.embedding_bags.t0.weight"].clone()
    train(model, range(6, 7))  # other rows are well
    state = {
        f"ebc.embedding_bags.{name}.weight": saved[f"ebc.embedding_bags.{name}.weight"] for name in SIZES
    }
    with pytest.raises(RowFileError, match=f"row {key} is damaged"):
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


def too_small(folder):
    model = make(folder, kind="rows", cached=4)
    train(model, range(1))


def test_a_cache_that_is_too_small_is_named_on_every_rank(ranks, tmp_path):
    with pytest.raises(RankError, match=r"rank 0: table 't\d': a batch needs .* cache_rows"):
        ranks(2).run(too_small, str(tmp_path))


def fails_on_one_rank(folder):
    model = make(folder, kind="rows", cached=60)
    train(model, range(2))
    if default_env().world.rank == 1:
        for table in tables_of(model):
            table._workers.error = RowFileError("the disk is gone")
            table._last_read = table._workers.reader.submit(table._bring, None, [])
    found = []
    pipeline, feed = TrainPipeline(model, model.fused_optimizer), batches(range(2, 6))
    for _ in range(4):
        try:
            pipeline.progress(feed)
        except RowFileError as error:
            found.append(str(error))
    return found


def test_an_error_of_one_rank_is_raised_on_all_of_them(ranks, tmp_path):
    one, other = ranks(2).run(fails_on_one_rank, str(tmp_path))
    assert one == other
    assert one == ["rank 1: the disk is gone"]


def test_files_of_killed_processes_are_removed(tmp_path):
    program = (
        "import sys, torch; sys.path.insert(0, sys.argv[1]); import test_file_rows as t; "
        "m = t.alone(sys.argv[2]); print('made', flush=True); import time; time.sleep(60)"
    )
    arguments = [sys.executable, "-c", program, str(Path(__file__).parent), str(tmp_path)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "made\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.glob("*.rows"))) == 3
    mine = alone(tmp_path)
    other = alone(tmp_path)  # a live process keeps its files
    assert len(list(tmp_path.glob("*.rows"))) == 6
    for model in (mine, other):
        for table in tables_of(model):
            table.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "FileRows takes cache_rows or cache_bytes, got cache_rows=None and cache_bytes=None"),
        ({"cache_rows": 3, "cache_bytes": 3}, "Give one of the two"),
        ({"cache_rows": 0}, "cache_rows must be an integer >= 1, got 0"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        FileRows(path="rows", **options)


def test_quantised_tables_and_folders_that_cannot_be_made_are_refused(tmp_path):
    with pytest.raises(ValueError, match="of a table of FP32, FP16 or BF16"):
        EmbeddingBagConfig(
            name="t", num_embeddings=8, embedding_dim=8, feature_names=["f"], data_type=DataType.INT8,
            storage=FileRows(path=tmp_path, cache_rows=4),
        )  # fmt: skip
    (tmp_path / "file").write_text("")
    with pytest.raises(RowFileError, match="cannot be used"):
        alone(tmp_path / "file")


def test_an_unsharded_module_is_refused_outside_of_meta(tmp_path):
    config = EmbeddingBagConfig(
        name="t",
        num_embeddings=8,
        embedding_dim=8,
        feature_names=["f"],
        storage=FileRows(path=tmp_path, cache_rows=4),
    )
    with pytest.raises(ValueError, match=r"table 't' has storage=FileRows.*device='meta' and shard it"):
        EmbeddingBagCollection([config])
    with pytest.raises(ValueError, match="and the module was given the device cpu"):
        EmbeddingBagCollection([config], device="meta").to_empty(device="cpu")


def test_whole_tables_are_mapped_and_not_in_memory(tmp_path):
    model = alone(tmp_path)
    train(model, range(3))
    made = with_whole_tables(model)
    batch = next(batches([7]))
    assert torch.equal(made(batch)[1], model(batch)[1])
    weight = made.ebc.embedding_bags["t0"].weight
    assert any(begin <= weight.data_ptr() < end for begin, end in shared_memory())
    assert {path.suffix for path in tmp_path.iterdir()} == {".rows"}


def test_the_cache_stays_within_its_bytes(tmp_path):
    options = FileRows(path=tmp_path, cache_bytes=1 << 16)
    assert options.num_cached(260) * 260 < 1 << 16


def test_runs_that_are_killed_end_as_if_they_had_not_been(tmp_path):
    program = Path(__file__).with_name("killed_file_rows.py")
    kills = os.environ.get("MESHREC_KILLS", "4")
    found = subprocess.run(
        [sys.executable, str(program), str(tmp_path), kills, "1", "test_file_rows"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert f"{kills} kills" in found.stdout
