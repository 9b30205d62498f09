"""A refused load changes nothing: no table, optimizer, object or random number, on no rank."""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, Hashed, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DamagedCheckpointError,
    hashed,
    load,
    read_manifest,
    save,
)
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.tables import LRU, MinCount

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


class Position:
    """An object of a state that refuses some values."""

    def __init__(self, value=0, refused=None):
        self.value, self.refused = value, refused

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        if state["value"] == self.refused:
            raise ValueError(f"position {self.refused} is not in this data")
        self.value = state["value"]


def make(*, groups=False):
    """A model with two hashed tables, a fixed one and a dense layer, and its state."""
    torch.manual_seed(1)
    keys = Hashed(max_rows=400, admit=MinCount(2), evict=LRU())
    tables = [
        EmbeddingBagConfig(name=name, embedding_dim=4, feature_names=[name], keys=keys) for name in ("u", "v")
    ]
    tables.append(EmbeddingBagConfig(name="w", embedding_dim=4, feature_names=["w"], num_embeddings=50))
    ebc = EmbeddingBagCollection(tables, device="meta")
    model = DistributedModelParallel(
        torch.nn.Sequential(ebc, Dense()),
        md.ShardingEnv.single_process(),
        sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.02))],
    )
    dense = [p for name, p in model.named_parameters() if name.startswith("1.")]
    optimizer = torch.optim.Adam([{"params": [p]} for p in dense] if groups else dense, lr=0.1)
    return {"model": model, "tables": model.fused_optimizer, "dense": optimizer, "position": Position()}


class Dense(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.over = torch.nn.Linear(12, 1)

    def forward(self, pooled):
        return self.over(pooled.values())


def train(state, step):
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, 40, (3 * 32,), generator=generator)
    batch = KeyedJaggedTensor(["u", "v", "w"], ids, lengths=torch.ones(96, dtype=torch.int64))
    state["model"](batch).square().sum().backward()
    state["dense"].step()
    state["dense"].zero_grad()
    state["position"].value = step


def contents(state):
    """Everything that a load may change, as values that can be compared."""
    tensors = {name: value.clone() for name, value in state["model"].state_dict().items()}
    slots = copy.deepcopy(state["tables"].state_dict())
    dense = copy.deepcopy(state["dense"].state_dict())
    return tensors, slots, dense, state["position"].value, torch.get_rng_state()


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def flip(folder, end):
    """Flip a bit in the tensor whose name ends so."""
    manifest = read_manifest(folder)
    name = next(name for name in manifest.tensors if name.endswith(end))
    piece = next(piece for piece in manifest.tensors[name].pieces if 0 not in piece.shape)
    path = folder / manifest.files[piece.file].name
    content = bytearray(path.read_bytes())
    content[piece.start + 3] ^= 4
    path.write_bytes(content)
    return name


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1 and 2."""
    manager, state = CheckpointManager(tmp_path), make()
    for step in (1, 2):
        train(state, step)
        manager.save(step, state)
    return manager


@pytest.mark.parametrize(
    "end", ["v.weight", "v.ids", "v.waiting", "w.weight", "v.weight.sum", "over.bias", "random.0.torch"]
)
def test_damaged_tensor_changes_nothing_and_older_checkpoint_is_loaded(saved, end):
    manager, newest = saved, saved.path(2)
    state = make()
    train(state, 7)
    before = contents(state)
    name = flip(newest, end)
    with pytest.raises(DamagedCheckpointError, match=name):
        load(newest, state)
    assert same(contents(state), before)
    train(state, 8)
    assert manager.load_latest(state) == state["position"].value == 1
    expected = make()
    load(manager.path(1), expected)
    train(state, 9), train(expected, 9)
    assert same(contents(state)[:4], contents(expected)[:4])


def test_object_that_refuses_leaves_tables_and_other_objects(saved):
    state = {"first": Position(5), **make()}
    train(state, 7)
    save(saved.folder / "both", {**state, "first": Position(6)})
    state["position"].value, state["position"].refused = 4, 7
    before = contents(state)
    with pytest.raises(ValueError, match="position 7"):
        load(saved.folder / "both", state)
    assert same(contents(state), before)
    assert state["first"].value == 5


def test_other_groups_of_parameters_change_nothing(saved):
    state = make(groups=True)
    before = contents(state)
    with pytest.raises(ValueError, match="grouped"):
        load(saved.path(2), state)
    assert same(contents(state), before)


def test_model_is_refused_after_a_read_failed_halfway_until_a_load_succeeds(saved, monkeypatch):
    state, read = make(), hashed.read_rows

    def fail(folder, manifest, name, rows):
        if name.endswith("v.weight"):
            raise OSError(5, "Input/output error")
        return read(folder, manifest, name, rows)

    monkeypatch.setattr(hashed, "read_rows", fail)
    with pytest.raises(CheckpointError, match="Input/output"):
        load(saved.path(2), state)
    monkeypatch.undo()
    for use in (lambda: train(state, 3), lambda: saved.save(3, state)):
        with pytest.raises(CheckpointError, match=r"partly loaded.*step-0000000002.*Input/output"):
            use()
    load(saved.path(1), state)
    expected = make()
    load(saved.path(1), expected)
    assert same(contents(state), contents(expected))


def load_damaged(folder):
    model, optimizer = models.make("mix", "adam", hashed=True)
    state = models.state_of(model, optimizer)
    before = {name: models_full(value) for name, value in model.state_dict().items()}
    with pytest.raises(DamagedCheckpointError):
        load(folder, state)
    after = {name: models_full(value) for name, value in model.state_dict().items()}
    return same(before, after) and not optimizer.state_dict()["state"]


def models_full(value):
    return (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()


def save_hashed(folder):
    model, optimizer = models.make("rw", "adam", hashed=True)
    for step in range(3):
        models.train(model, optimizer, [step], hashed=True)
    save(folder, models.state_of(model, optimizer))


def test_damage_that_one_rank_reads_changes_nothing_on_any(ranks, tmp_path):
    ranks(2).run(save_hashed, tmp_path)
    flip(tmp_path, "t2.weight")
    assert ranks(2).run(load_damaged, tmp_path) == [True, True]
