"""What torch's tools do with tables of every storage: each cell of docs/guides/copy-a-model.md."""

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.optim.swa_utils import AveragedModel

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, FileRows, Hashed, KeyedJaggedTensor, fuse
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import Adam
from meshrec.quant import quantize
from meshrec.tables import LRU, MinCount

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "copy-a-model.md"


def cells():
    """Return (storage, tool, expected) per cell of the page's first table."""
    lines = ("|" + PAGE.read_text().partition("\n|")[2].partition("\n\n")[0]).splitlines()
    head, _, *rows = [
        [cell.strip().replace("`", "") for cell in line.strip("|").split("|")] for line in lines
    ]
    return [(row[0], tool, cell) for row in rows for tool, cell in zip(head[1:], row[1:], strict=True)]


def batch(first=0, count=20):
    ids = torch.arange(first, first + count).repeat(2)
    return KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))


def train(model, steps=1, first=0):
    for _ in range(steps):
        model(batch(first)).values().square().sum().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    parameter.grad = None


def rows(model):
    with torch.no_grad():
        return model(batch(count=30)).values().clone()


def make(storage, folder):
    """A model with one table "t", which has been trained for two steps if it can be."""
    torch.manual_seed(0)
    options = {"name": "t", "embedding_dim": 4, "feature_names": ["f"]}
    hashed, filed = storage.startswith("hashed"), "in a file" in storage
    options |= (
        {"keys": Hashed(max_rows=99, admit=MinCount(2), evict=LRU())} if hashed else {"num_embeddings": 99}
    )
    options |= {"storage": FileRows(path=folder, cache_rows=60)} if filed else {}
    sharded = "sharded" in storage

    def model(device=None):
        return torch.nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(**options)], device=device))

    if sharded:
        env, adam = md.ShardingEnv.single_process(), md.EmbeddingBagCollectionSharder(Adam(lr=0.1))
        made = DistributedModelParallel(model("meta"), env, sharders=[adam])
    else:
        made = model() if storage in ("dense", "quantised") else fuse(model(), optimizer=Adam(lr=0.1))
    train(made, 2)
    if storage == "hashed":
        plain = model()
        plain.load_state_dict(made.state_dict())
        return plain
    return quantize(made) if storage.startswith("quantised") else made


def is_trained(storage):
    return not storage.startswith("quantised") and storage != "hashed"


def by_pickle(model):
    return pickle.loads(pickle.dumps(model))


def by_save(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def check_copy(storage, model, copied):
    """A copy is equal, trains on as the original does, also with new IDs, and neither changes the other."""
    before = rows(model)
    assert torch.equal(rows(copied), before)
    if not is_trained(storage):
        assert copied.state_dict().keys() == model.state_dict().keys()
        return
    for first in (0, 15):
        train(copied, 2, first)
    assert torch.equal(rows(model), before)
    assert not torch.equal(rows(copied), before)
    for first in (0, 15):
        train(model, 2, first)
    assert torch.equal(rows(copied), rows(model))
    if hasattr(model, "fused_optimizer"):
        one, other = (each.fused_optimizer.state_dict()["state"] for each in (model, copied))
        for name, slots in one.items():
            assert all(torch.equal(torch.as_tensor(slots[s]), torch.as_tensor(other[name][s])) for s in slots)


def deep_copied(storage, model, _):
    check_copy(storage, model, copy.deepcopy(model))


def pickled(storage, model, _):
    check_copy(storage, model, by_pickle(model))
    check_copy(storage, model, by_save(model))


def copied(storage, model, _):
    other = copy.copy(model)
    if is_trained(storage):
        train(other)
    assert torch.equal(rows(model), rows(other))


def averaged(storage, model, expected):
    average = AveragedModel(model)
    average.update_parameters(model)
    first = rows(model)
    if expected == "averages":
        train(model)
    average.update_parameters(model)
    torch.testing.assert_close(rows(average.module), (first + rows(model)) / 2)


def frozen(storage, model, _):
    before = rows(model)
    model.requires_grad_(False)
    found = model(batch()).values()
    if found.requires_grad:
        found.sum().backward()
    assert torch.equal(rows(model), before)


def cast(storage, model, expected):
    before = rows(model)
    found = rows(model.half())
    assert found.dtype == (torch.float16 if expected == "casts" else before.dtype)
    torch.testing.assert_close(found.float(), before, rtol=1e-3, atol=1e-3)


def to_double(storage, model, _):
    before = rows(model)
    assert torch.equal(rows(model.double()), before)


def zeroed(storage, model, _):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert not rows(model).any()


def in_shared_memory(storage, model, _):
    model.share_memory()
    assert all(parameter.is_shared() for parameter in model.parameters())


def loaded(storage, model, _):
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    before = rows(model)
    if is_trained(storage):
        train(model, 2, first=5)
        assert not torch.equal(rows(model), before)
    model.load_state_dict(saved)
    assert torch.equal(rows(model), before)


def clipped(storage, model, expected):
    found = model(batch()).values()
    if found.requires_grad:
        found.sum().backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert (norm > 0) == (expected == "clips")


TOOLS = {
    "copy.deepcopy": deep_copied,
    "pickle, torch.save": pickled,
    "copy.copy": copied,
    "AveragedModel": averaged,
    "requires_grad_(False)": frozen,
    ".half()": cast,
    ".double()": to_double,
    "p.zero_()": zeroed,
    "share_memory()": in_shared_memory,
    "load_state_dict": loaded,
    "clip_grad_norm_": clipped,
}


@pytest.mark.parametrize(("storage", "tool", "expected"), cells())
def test_cell(storage, tool, expected, tmp_path):
    model = make(storage, tmp_path)
    if storage == "hashed":
        model.requires_grad_(tool in ("requires_grad_(False)",))  # it is read, and has no optimizer
        if tool == "requires_grad_(False)":
            with torch.no_grad():
                return frozen(storage, model, expected)
    if expected != "refused":
        return TOOLS[tool](storage, model, expected)
    before = rows(model)
    with pytest.raises(ValueError, match=r"'t'|a fused module"):
        TOOLS[tool](storage, model, expected)
    if storage != "dense":
        assert torch.equal(rows(model), before)
    return None


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("storage", dict.fromkeys(storage for storage, _, _ in cells()))
def test_torch_checkpoint_loads_what_it_saves(storage, tmp_path):
    first, second = make(storage, tmp_path / "a"), make(storage, tmp_path / "b")
    if is_trained(storage):
        train(first)
    if storage.startswith("hashed"):
        with pytest.raises(BaseException, match=r"meshrec\.checkpoint\.save"):  # DCP's error is no Exception
            dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
        return
    dcp.save({"model": first.state_dict()}, checkpoint_id=tmp_path / "saved", no_dist=True)
    state = {"model": second.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "saved", no_dist=True)
    second.load_state_dict(state["model"])
    assert torch.equal(rows(first), rows(second))


@pytest.mark.parametrize(
    "write",
    [
        torch.nn.init.normal_,
        lambda p: p.add_(1),
        lambda p: p.copy_(torch.zeros(0, 4)),
        lambda p: p.pow(2).sum(),
        lambda p: torch._foreach_mul_([p], 2.0),
        lambda p: torch.nn.utils.parameters_to_vector([p]),
    ],
)
def test_arithmetic_on_the_parameter_of_a_hashed_table_is_refused_by_name(write, tmp_path):
    model = make("hashed, fused", tmp_path)
    with torch.no_grad(), pytest.raises(ValueError, match="'t'"):
        write(next(model.parameters()))


def refused(_):
    model = DistributedModelParallel(
        torch.nn.Sequential(
            EmbeddingBagCollection(
                [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=9, feature_names=["f"])],
                device="meta",
            )
        ),
        sharders=[md.EmbeddingBagCollectionSharder(Adam(lr=0.1))],
    )
    errors = []
    for tool in (copy.deepcopy, pickle.dumps, AveragedModel):
        with pytest.raises(ValueError, match=r"meshrec\.checkpoint\.save") as error:
            tool(model)
        errors.append(str(error.value))
    return errors


def test_a_model_over_ranks_is_neither_copied_nor_pickled(ranks):
    for errors in ranks(2).run(refused, None):
        assert len(errors) == 3
