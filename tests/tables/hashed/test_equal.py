"""Hashed tables in one process against fixed tables with the same first rows: the same bits."""

import pytest
import torch

from meshrec import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    Hashed,
    KeyedJaggedTensor,
    PoolingType,
    fuse,
)
from meshrec.optim import optimizers
from meshrec.tables import LRU

NAMES = ("SGD", "Adagrad", "RowWiseAdagrad", "Adam", "PartialRowWiseAdam", "LAMB", "PartialRowWiseLAMB")
SPECS = {name: getattr(optimizers, name)(lr=0.05) for name in (*NAMES, "LARS", "FTRL")}
SPECS["RowWiseRMSpropAR"] = optimizers.RowWiseRMSpropAR(lr=0.05, ar_alpha=4.0)
IDS = torch.tensor([-1, 0, 1, 2**63 - 1, -(2**63), 2**62, *range(100, 158)])
TYPES = {DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16}


def test_every_optimizer_is_tried():
    assert {type(spec) for spec in SPECS.values()} == set(optimizers.OptimizerSpec.__subclasses__())


def made(pooling, data_type, spec, update, *, weighted):
    """Return a hashed collection and its fixed twin, whose row i is that of ``IDS[i]``.

    Each has another table, too.
    """
    config = EmbeddingConfig if pooling is PoolingType.NONE else EmbeddingBagConfig
    more = {"data_type": data_type} | ({} if pooling is PoolingType.NONE else {"pooling": pooling})
    other = config(name="u", embedding_dim=8, feature_names=["c"], num_embeddings=5)
    found = []
    for rows in ({"keys": Hashed(max_rows=len(IDS), evict=LRU())}, {"num_embeddings": len(IDS)}):
        twin = config(name="t", embedding_dim=8, feature_names=["a", "b"], **rows, **more)
        if pooling is PoolingType.NONE:
            module = EmbeddingCollection([twin, other])
        else:
            module = EmbeddingBagCollection([twin, other], is_weighted=weighted)
        weights = dict(module.named_parameters())
        with torch.no_grad():
            weights[next(name for name in weights if ".u." in name)].fill_(0.5)
            if "num_embeddings" in rows:
                storage = found[0].hashed_tables()["t"].storage
                weights[next(name for name in weights if ".t." in name)].copy_(
                    storage.initial.rows(IDS, (0, 8))
                )
        found.append(fuse(module, optimizer=spec, update=update, seed=0))
    return found


def batch(step, weighted):
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 6, (30,), generator=generator)
    rows = torch.randint(0, len(IDS), (int(lengths[:20].sum()),), generator=generator)
    others = torch.randint(0, 5, (int(lengths[20:].sum()),), generator=generator)
    weights = torch.rand(len(rows) + len(others), generator=generator) if weighted else None
    for values in (torch.cat([IDS[rows], others]), torch.cat([rows, others])):
        yield KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths, weights=weights)


def outputs(module, features):
    found = module(features)
    return (
        found.values()
        if hasattr(found, "values") and isinstance(found.values(), torch.Tensor)
        else (torch.cat([each.values().flatten() for each in found.values()]))
    )


def compare(pooling, data_type, spec, update, *, weighted=False):
    twins = made(pooling, data_type, spec, update, weighted=weighted)
    for step in range(4):
        found = []
        for module, features in zip(twins, batch(step, weighted), strict=True):
            out = outputs(module, features)
            out.float().square().sum().backward()
            if update == "on_step":
                module.fused_optimizer.step()
                module.fused_optimizer.zero_grad()
            found.append(out.detach())
        assert torch.equal(*found), step
    table = twins[0].hashed_tables()["t"]
    ids, rows, state = table.items()
    places = [int((each == IDS).nonzero()) for each in ids]
    assert len(places) > 50
    (name,) = (each for each in dict(twins[1].named_parameters()) if ".t." in each)
    assert torch.equal(rows, dict(twins[1].named_parameters())[name].detach()[places])
    own = twins[1].fused_optimizer.state_dict()["state"]
    (slots,) = (each for key, each in own.items() if ".t." in key)
    for slot, values in slots.items():
        if slot in state:
            assert torch.equal(state[slot], values[places]), slot
    assert state.keys() >= {slot for slot, value in slots.items() if torch.as_tensor(value).dim()}


@pytest.mark.parametrize("update", ["in_backward", "on_step"])
@pytest.mark.parametrize("name", SPECS)
def test_every_optimizer_gives_the_bits_of_a_fixed_table(name, update):
    compare(PoolingType.SUM, DataType.FP32, SPECS[name], update)


@pytest.mark.parametrize("data_type", TYPES)
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [(PoolingType.SUM, True), (PoolingType.MEAN, False), (PoolingType.MEAN, True), (PoolingType.NONE, False)],
)
def test_every_pooling_and_type_gives_the_bits_of_a_fixed_table(pooling, weighted, data_type):
    """16-bit rows are rounded to nearest here: random rounding draws by the key of a row."""
    compare(pooling, data_type, SPECS["Adam"], "in_backward", weighted=weighted)


def test_a_budget_without_room_for_a_row_is_refused():
    for max_bytes, num_rows in (
        (52, 1),
        (2 * 52, 2),
    ):  # a row, its 16 bytes in the index, and 4 of the policy
        config = EmbeddingBagConfig(
            name="t", embedding_dim=8, feature_names=["f"], keys=Hashed(max_bytes=max_bytes, evict=LRU())
        )
        assert config.num_embeddings == num_rows
    with pytest.raises(ValueError, match=r"max_bytes=40.*32 bytes.*max_bytes"):
        EmbeddingBagConfig(name="t", embedding_dim=8, feature_names=["f"], keys=Hashed(max_bytes=40))
