"""A storage that keeps its rows in a dict trains, is saved, moved and exported as ordinary memory is."""

import copy
import dataclasses
import importlib.util
import io
import itertools
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, checkpoint
from meshrec import distributed as md
from meshrec.checkpoint.tables import read_weights
from meshrec.comms.mesh import default_env
from meshrec.export.whole_tables import with_whole_tables
from meshrec.model_parallel import DistributedModelParallel
from meshrec.modules import table_lookup
from meshrec.optim import Adam, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.quant import quantize
from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.dense.table import parts_of
from meshrec.tables.hashed import memory as growing
from meshrec.tables.hashed.memory import GrowingRows
from meshrec.tables.index import Resolved
from meshrec.tables.storage import ExternalRows
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock
from meshrec.testing import RankError

SIZES = {"t0": (40, 8), "t1": (30, 4)}
BLOCK_ROWS = 7

_path = Path(__file__).parents[1] / "checkpoint" / "models.py"
_spec = importlib.util.spec_from_file_location("checkpoint_models", _path)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


class Pin:
    """A batch in flight has it."""


class DictTable:
    """Rows in a dict, and rows of 0 for all other keys. The kernels see those of batches in flight."""

    slot_keys = None
    is_growable = False

    def __init__(self, rectangle, storage, spec, device):
        self.rectangle, self.parts, self.index = rectangle, parts_of(storage, spec), self
        c0, c1 = rectangle.columns
        row = [torch.zeros(1, c1 - c0, dtype=storage.dtype), *storage.new_state(spec, 1, c1 - c0, device)]
        self._growing_rows = GrowingRows(row, max_rows=1 << 30, name="a table")
        self.rows, *self.state = self._growing_rows.tensors
        self._start = {part.name: tensor[0].clone() for part, tensor in zip(self.parts, row, strict=True)}
        self._side, self._slots, self._pins = {}, {}, Counter()

    def _memory(self):
        return zip(self.parts, self._growing_rows.tensors, strict=True)

    def resolve(self, keys, *, train):
        self._write_back()
        self._slots = {key: slot for key, slot in self._slots.items() if self._pins[slot]}
        used = set(self._slots.values())
        free = (slot for slot in itertools.count() if slot not in used)
        for key in keys.unique().tolist():
            if key not in self._slots:
                self._slots[key] = slot = next(free)
                self._growing_rows.grow(slot + 1)
                for part, tensor in self._memory():
                    tensor[slot] = self._side.get(key, self._start)[part.name]
        slots, pin = torch.tensor([self._slots[key] for key in keys.tolist()], dtype=torch.int64), Pin()
        self._pins.update(slots.tolist())
        weakref.finalize(pin, self._pins.subtract, slots.tolist())
        return Resolved(slots, pin)

    def keys_at(self, slots):
        keys = {slot: key for key, slot in self._slots.items()}
        return torch.tensor([keys[slot] for slot in slots.tolist()], dtype=torch.int64)

    def _write_back(self):
        for key, slot in self._slots.items():
            self._side[key] = {part.name: tensor[slot].clone() for part, tensor in self._memory()}

    def tensors(self):
        return streamed_parts(self)

    def snapshot(self):
        self._write_back()
        frozen = copy.copy(self)
        frozen._side, frozen._slots = copy.deepcopy(self._side), {}
        return frozen

    def close(self):
        self._side = None

    def stream(self, columns=None, *, keys=None):
        self._write_back()
        r, (c0, c1) = self.rectangle, columns or self.rectangle.columns
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        for begin in range(first, end, BLOCK_ROWS):
            keys_here = range(begin, min(begin + BLOCK_ROWS, end))
            rows = [self._side.get(key, self._start) for key in keys_here]
            parts = {part.name: torch.stack([row[part.name] for row in rows]) for part in self.parts}
            yield RowBlock(
                keys_here,
                (c0, c1),
                {
                    name: part if part.dim() == 1 else part[:, c0 - r.c0 : c1 - r.c0]
                    for name, part in parts.items()
                },
            )

    def load(self, blocks):
        self._write_back()
        r = self.rectangle
        for block in blocks:
            columns = slice(block.columns[0] - r.c0, block.columns[1] - r.c0)
            for number, key in enumerate(block.keys):
                row = self._side.setdefault(
                    int(key), {name: start.clone() for name, start in self._start.items()}
                )
                for name, values in block.parts.items():
                    target = row[name] if row[name].dim() == 0 else row[name][columns]
                    target.copy_(values[number])
        for key, slot in self._slots.items():
            for part, tensor in self._memory():
                tensor[slot] = self._side[key][part.name]


@dataclasses.dataclass(frozen=True)
class DictRows(ExternalRows, DenseRows):
    may_fail = False

    def table(self, rectangle, spec, device):
        return DictTable(rectangle, self, spec, device)


def test_a_part_is_loaded_from_that_of_another_table():
    tables = [DictRows(torch.float32).table(Rectangle(0, 0, 10, 0, 4), None, None) for _ in range(2)]
    rows = torch.arange(40.0).view(10, 4)
    source, target = (table.tensors()["weight"] for table in tables)
    source.copy_(rows)
    target.copy_(source)
    assert torch.equal(target.clone(), rows)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"]
                )
                for name, (rows, dim) in SIZES.items()
            ],
            device="meta",
        )

    def forward(self, features):
        loss = self.ebc(features).values().square().sum()
        return loss, loss.detach()


BUILDERS = {
    "rows": (md.row_wise, md.row_wise),
    "columns": (lambda: md.column_wise(ranks=[0, 1, 0]), lambda: md.table_wise(rank=1)),
    "grid": (md.grid_shard, md.data_parallel),
    "one": (lambda: md.table_wise(rank=0), md.data_parallel),
}


def make_plan(kind, world_size):
    builders = dict(zip(SIZES, [builder() for builder in BUILDERS[kind]], strict=True))
    return md.ShardingPlan(
        {"ebc": md.construct_module_sharding_plan(Model().ebc, builders, world_size=world_size, local_size=1)}
    )


def make(kind, spec, side=True, update="in_backward", env=None):
    env = env or default_env()
    with pytest.MonkeyPatch.context() as patch:
        if side:
            patch.setattr(table_lookup, "storage_for", lambda data_type: DictRows(data_type.dtype))
        sharder = md.EmbeddingBagCollectionSharder(spec, update=update)
        return DistributedModelParallel(
            Model(), env, plan=make_plan(kind, env.shard.size), sharders=[sharder], init_data_parallel=False
        )


def batches(steps, rank=None):
    rank = default_env().world.rank if rank is None else rank
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        lengths = torch.randint(0, 4, (10,), generator=generator)
        ids = torch.randint(0, 30, (int(lengths.sum()),), generator=generator)
        yield KeyedJaggedTensor([f"f_{name}" for name in SIZES], ids, lengths=lengths)


def train(model, steps):
    for batch in batches(steps):
        model(batch)[0].backward()


def whole(model):
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, slots in model.fused_optimizer.state_dict()["state"].items():
        found |= {f"{name}.{slot}": full(value) for slot, value in slots.items()}
    return found


def full(value):
    if not isinstance(value, torch.Tensor):
        return value
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)


SPECS = {"rowwise": RowWiseAdagrad(lr=0.1), "adam": Adam(lr=0.1)}


def life(folder, spec, moves):
    """Trains, saves, goes from plan to plan, and loads under another one; beside it ordinary memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(growing, "_LEAST_ROWS", 2)
        if moves:
            patch.setattr(growing, "reserve_pages", lambda *_: None)
        lived(folder, spec)
    return True


def lived(folder, spec):
    kinds = ["rows", "columns", "grid", "one"] if default_env().world.size > 1 else ["one"]
    side, plain = (make(kinds[0], SPECS[spec], side) for side in (True, False))
    for model in (side, plain):
        train(model, range(3))
    assert same(whole(side), whole(plain))
    assert all(parameter.numel() == 0 for parameter in side.parameters())
    for background in (False, True):
        for name, model in (("side", side), ("plain", plain)):
            state = {"model": model, "tables": model.fused_optimizer}
            path = f"{folder}/{name}-{background}"
            if background:
                pending = checkpoint.async_save(path, state)
                train(model, range(3, 5))
                pending.wait()
            else:
                checkpoint.save(path, state)
    expected = whole(side)
    assert same(expected, whole(plain))
    for kind in kinds[1:]:
        side.reshard(make_plan(kind, default_env().shard.size))
        assert same(whole(side), expected)
    train(side, range(5, 7))
    trained = whole(side)
    for name in ("side", "plain"):
        for kind in kinds:
            loaded = make(kind, SPECS[spec])
            checkpoint.load(f"{folder}/{name}-True", {"model": loaded, "tables": loaded.fused_optimizer})
            before = make(kind, SPECS[spec], side=False)
            checkpoint.load(f"{folder}/side-True", {"model": before, "tables": before.fused_optimizer})
            assert same(whole(loaded), whole(before))
            for model in (loaded, before):
                train(model, range(3, 5))
            assert same(whole(loaded), whole(before))
    plain.reshard(make_plan(kinds[-1], default_env().shard.size))
    train(plain, range(5, 7))
    assert same(trained, whole(plain))


@pytest.mark.parametrize(("spec", "moves"), [("rowwise", True), ("adam", False)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_rows_in_a_dict_live_as_rows_in_memory_do(ranks, tmp_path, world_size, spec, moves):
    assert ranks(world_size).run(life, str(tmp_path), spec, moves) == [True] * world_size


def beside_dense(kind):
    """Whoever walks the parameters finds the names of all tables, and nothing of these to change."""
    env, found = default_env(), []
    for side in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if side:
                patch.setattr(table_lookup, "storage_for", lambda data_type: DictRows(data_type.dtype))
            model, dense = models.make("rw", "rowwise", dense=kind)
        names = [name for name, _ in model.named_parameters()]
        tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
        for step in range(6):
            tables[0].requires_grad_(step != 3)
            model(models.batch(step)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            dense.step()
            dense.zero_grad()
            if side:
                assert all(p.numel() == 0 and p.grad is None for p in tables)
        found.append((names, models.whole_state(model, dense)))
    assert found[0][0] == found[1][0]
    assert len(tables) == len(models.SIZES)
    frozen = found[0][1]["tables.ebc.embedding_bags.t0.weight.step"]
    return env.world.rank, frozen, models.differences(found[0][1], found[1][1])


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_ddp_fsdp2_and_clipping_leave_the_tables_alone(ranks, kind):
    assert ranks(2).run(beside_dense, kind) == [(0, 5, []), (1, 5, [])]


def ahead():
    """A pipeline finds the slots of the next batch before the update of this one."""
    found = []
    for side in (True, False):
        model = make("rows", SPECS["rowwise"], side)
        pipeline = TrainPipeline(model, model.fused_optimizer, semi_synchronous_from=1)
        feed = batches(range(6))
        for _ in range(6):
            pipeline.progress(feed)
        found.append(whole(model))
    return same(*found)


def test_slots_of_batches_in_flight_stay(ranks):
    assert ranks(2).run(ahead) == [True, True]


def published(folder):
    found = []
    for side in (True, False):
        model = make("columns", SPECS["rowwise"], side)
        train(model, range(2))
        tracker = checkpoint.RowTracker(model)
        train(model, range(2, 4))
        path = f"{folder}/{side}.safetensors"
        tracker.export(path, since=3, also={"ebc.embedding_bags.t0.weight": torch.tensor([0, 39])})
        found.append(read_weights(Path(path)))
    return same(*found)


def test_touched_rows_are_published(ranks, tmp_path):
    assert ranks(2).run(published, str(tmp_path)) == [True, True]


def codes():
    found = []
    for side in (True, False):
        model = make("columns", SPECS["rowwise"], side)
        train(model, range(3))
        found.append({n: full(v) for n, v in quantize(model, DataType.INT8).state_dict().items()})
        kept = quantize(model, DataType.FP32)
        assert same(
            {n: full(v) for n, v in kept.state_dict().items()},
            {n: full(v) for n, v in model.state_dict().items()},
        )
    return same(*found)


def test_rows_are_quantised(ranks):
    assert ranks(2).run(codes) == [True, True]


def exported():
    model = make("one", SPECS["rowwise"])
    train(model, range(3))
    made = with_whole_tables(model)
    batch = next(batches([7]))
    return torch.equal(made(batch)[1], model(batch)[1]) and all(p.numel() > 0 for p in made.parameters())


def test_a_model_is_exported_with_its_rows(ranks):
    assert ranks(1).run(exported) == [True]


def test_a_state_dict_has_a_tensor_that_streams():
    model = make("one", SPECS["rowwise"], env=md.ShardingEnv.single_process())
    train(model, range(3))
    name = "ebc.embedding_bags.t0.weight"
    weight = model.state_dict()[name]
    values = weight.clone()
    assert values.shape == (40, 8)
    assert values.abs().sum() > 0
    assert type(values) is torch.Tensor
    assert torch.equal(weight[3:9, 2:4].clone(), values[3:9, 2:4])
    assert torch.equal(copy.deepcopy(weight), values)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    saved = torch.load(buffer)
    train(model, range(3, 5))
    assert not torch.equal(weight.clone(), values)
    loss, _ = model(next(batches([8])))
    model.load_state_dict(saved)
    assert torch.equal(weight.clone(), values)
    with pytest.raises(ValueError, match="'t0'"):
        loss.backward()
    with pytest.raises(ValueError, match="tensor"):
        weight + 1


def refused(spec, update):
    make("rows", spec, update=update)


@pytest.mark.parametrize(
    ("spec", "update", "match"),
    [
        (None, "in_backward", "'t0'"),
        (SPECS["adam"], "on_step", "optimizer"),
    ],
)
def test_gradients_with_nowhere_to_stay_are_refused(ranks, spec, update, match):
    with pytest.raises(RankError, match=match):
        ranks(2).run(refused, spec, update)
