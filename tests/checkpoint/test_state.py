import json
import zlib

import pytest
import torch
from torch import nn

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec import distributed as md
from meshrec.checkpoint import DamagedCheckpointError, load, read_manifest, save
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.state import collect, merge_values
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel


class Odd:
    """Something with a state of its own."""

    def __init__(self, content):
        self.content = content

    def state_dict(self):
        return {"content": self.content}

    def load_state_dict(self, state):
        self.content = state["content"]


def trained(optimizer=torch.optim.AdamW, steps=2):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = optimizer(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3], gamma=0.5)
    torch.manual_seed(0)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.rand(5, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_modules_optimizers_and_schedulers_go_on(tmp_path, optimizer):
    state = trained(optimizer)
    odd = Odd({"seen": torch.arange(3), "best": (0.5, {"at": 2})})
    save(tmp_path, {**state, "odd": odd, "position": {"epoch": 1}, "none": None})
    fresh = {**trained(optimizer, steps=0), "odd": Odd(None), "position": None, "none": 3}
    load(tmp_path, fresh)
    for name, tensor in state["model"].state_dict().items():
        assert torch.equal(fresh["model"].state_dict()[name], tensor)
    assert fresh["scheduler"].state_dict() == state["scheduler"].state_dict()
    assert fresh["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"] == 0.05
    for mine, other in zip(fresh["optimizer"].state.values(), state["optimizer"].state.values(), strict=True):
        assert {k: torch.as_tensor(v).tolist() for k, v in mine.items()} == {
            k: torch.as_tensor(v).tolist() for k, v in other.items()
        }
    assert fresh["odd"].content["seen"].tolist() == [0, 1, 2]
    assert fresh["odd"].content["best"] == (0.5, {"at": 2})
    assert (fresh["position"], fresh["none"]) == ({"epoch": 1}, None)


def test_a_state_before_the_first_step(tmp_path):
    save(tmp_path, trained(steps=0))
    fresh = trained(steps=0)
    load(tmp_path, fresh)
    assert fresh["optimizer"].state == {}


def test_random_numbers_go_on(tmp_path):
    save(tmp_path, {})
    expected = torch.rand(3)
    load(tmp_path, {})
    assert torch.equal(torch.rand(3), expected)


def test_an_entry_may_be_left_out(tmp_path):
    save(tmp_path, trained())
    load(tmp_path, {"model": trained()["model"]})


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.update(other=1), r"'other'.*\['model'"),
        (lambda state: state.update(model=1), "'model'"),
        (lambda state: state.update(model=nn.Linear(3, 4)), r"'model\.bias'"),
        (
            lambda state: state.update(model=nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))),
            r"model\.0\.weight.*\[4, 2\].*\[4, 3\]",
        ),
    ],
)
def test_what_does_not_fit_changes_nothing(tmp_path, change, match):
    save(tmp_path, trained())
    state = trained(steps=1)
    before = state["model"].state_dict()["0.weight"].clone()
    kept = state["model"]
    change(state)
    with pytest.raises(ValueError, match=match):
        load(tmp_path, state)
    assert torch.equal(kept.state_dict()["0.weight"], before)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"random": 1}, "'random'.*'random'"),
        ({"": 1}, "'random'"),
        ({"a": object()}, "checkpoint"),
        (
            {"__metadata__": torch.ones(1)},
            "'__metadata__'",
        ),
        ({"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, r"'a\.b'"),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, state, match):
    with pytest.raises(ValueError, match=match):
        save(tmp_path, state)


def split_with_plain_gradients():
    config = EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=2, feature_names=["f"])
    module = EmbeddingBagCollection(tables=[config])
    plan = md.construct_module_sharding_plan(
        module, {"t": md.row_wise()}, world_size=default_env().shard.size
    )
    model = DistributedModelParallel(
        nn.ModuleDict({"ebc": module}),
        plan=md.ShardingPlan({"ebc": plan}),
        sharders=[md.EmbeddingBagCollectionSharder()],
        dense=None,
    )
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    with pytest.raises(ValueError, match=r"'ebc\.embedding_bags\.t\.weight'"):
        collect(state, 0)


def test_optimizers_of_parts_are_refused(ranks):
    ranks(2).run(split_with_plain_gradients)


def test_plain_values_need_a_dict_to_go_to(tmp_path):
    from types import MappingProxyType

    save(tmp_path, {"a": 1})
    with pytest.raises(ValueError, match="'a'"):
        load(tmp_path, MappingProxyType({"a": 2}))


def test_what_ranks_hold_of_one_entry_is_put_together():
    one = {"state": {"a": {"step": 1}}, "param_groups": [{"lr": 0.1, "params": ["a"]}]}
    other = {
        "state": {"b": {"step": 1}},
        "param_groups": [{"lr": 0.1, "params": ["b"]}, {"lr": 1.0, "params": []}],
    }
    assert merge_values(one, other, "optimizer") == {
        "state": {"a": {"step": 1}, "b": {"step": 1}},
        "param_groups": [{"lr": 0.1, "params": ["a", "b"]}, {"lr": 1.0, "params": []}],
    }
    other["param_groups"][0]["lr"] = 0.2
    with pytest.raises(ValueError, match=r"optimizer.param_groups.lr.*0.1.*0.2"):
        merge_values(one, other, "optimizer")


def sealed(folder, change):
    """Changes a manifest, and gives it the right checksum."""
    path = folder / MANIFEST
    said = json.loads(path.read_bytes().split(b"\n")[0])
    change(said)
    body = json.dumps(said).encode()
    path.write_bytes(body + f'\n{{"crc32": {zlib.crc32(body)}}}\n'.encode())


def test_values_that_put_tensors_elsewhere_change_no_weights(tmp_path):
    """The names of the tensors are right, and so are their places, written with dots."""
    save(tmp_path, {"model": nn.Sequential(nn.Linear(3, 2))})

    def change(said):
        content = said["values"]["model"]["content"]
        content["0"] = {"weight": content.pop("0.weight")}

    sealed(tmp_path, change)
    model = nn.Sequential(nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(DamagedCheckpointError, match="'model'"):
        load(tmp_path, {"model": model})
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("exchange", [True, False])
def test_tensors_that_take_the_places_of_others_are_refused(tmp_path, exchange):
    save(tmp_path, {"plain": [torch.zeros(2), torch.ones(2)], "module": nn.Linear(3, 3)})

    def change(said):
        plain = said["values"]["plain"]["content"]
        if exchange:
            plain.reverse()
        else:
            plain.append(plain[0])

    sealed(tmp_path, change)
    with pytest.raises(DamagedCheckpointError, match=r"'plain\..'"):
        read_manifest(tmp_path)


class Grown(nn.Module):
    """A layer of an earlier release, with a buffer that this release has added."""

    older_checkpoints = {"bias": 0.0}  # noqa: RUF012

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("bias", torch.ones(2))


@pytest.mark.parametrize("path", ["", "inner"])
def test_an_added_buffer_is_neutral_for_older_checkpoints(tmp_path, path):
    def models():
        grown, older = Grown(), Grown()
        del older.bias
        return [nn.ModuleDict({path: module}) if path else module for module in (older, grown)]

    older, _ = models()
    save(tmp_path / "older", {"model": older})
    _, grown = models()
    load(tmp_path / "older", {"model": grown})
    inner = grown[path] if path else grown
    assert inner.bias.tolist() == [0, 0]
    assert torch.equal(inner.layer.weight, (older[path] if path else older).layer.weight)

    inner.bias.fill_(3)
    save(tmp_path / "newer", {"model": grown})
    _, fresh = models()
    load(tmp_path / "newer", {"model": fresh})
    assert (fresh[path] if path else fresh).bias.tolist() == [3, 3]


def test_a_missing_tensor_beside_an_added_buffer_is_an_error(tmp_path):
    save(tmp_path, {"model": nn.Module()})
    with pytest.raises(ValueError, match=r"layer\.weight"):
        load(tmp_path, {"model": Grown()})
