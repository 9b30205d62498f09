"""Checkpoints in the format of earlier versions stay loadable.

``format1`` was written on 2 ranks by the first version of the format: a table for each kind of state, one of
them with two rectangles of the same rows on a rank, each filled with the numbers that ``number`` gives.
"""

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from meshrec import DataType, EmbeddingBagCollection, EmbeddingBagConfig, checkpoint
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import SGD, Adam, PartialRowWiseAdam, RowWiseAdagrad, apply_optimizer_in_backward

_spec = importlib.util.spec_from_file_location("checkpoint_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

FOLDER = Path(__file__).parent / "format1"
SPECS = {"rows": RowWiseAdagrad, "elements": Adam, "both": PartialRowWiseAdam, "none": SGD}


def number(name, shape):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + sum(name.encode())).view(shape)


def loaded(builder):
    model = nn.Module()
    tables = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=6,
            embedding_dim=4,
            feature_names=[name],
            data_type=DataType.BF16 if name == "none" else DataType.FP32,
        )
        for name in SPECS
    ]
    model.ebc = EmbeddingBagCollection(tables=tables)
    model.over = nn.Linear(3, 1)
    for name, spec in SPECS.items():
        apply_optimizer_in_backward(spec, [model.ebc.embedding_bags[name].weight], {"lr": 0.5})
    builders = dict.fromkeys(SPECS, getattr(md, builder)())
    plan = md.construct_module_sharding_plan(model.ebc, builders, world_size=default_env().world.size)
    plan = md.ShardingPlan({"ebc": plan})
    sharders = [md.EmbeddingBagCollectionSharder()]
    model = DistributedModelParallel(model, plan=plan, sharders=sharders)
    dense = torch.optim.Adam(model.module.over.parameters(), lr=0.5)
    state = {"model": model, "tables": model.fused_optimizer, "dense": dense, "epoch": 0}
    checkpoint.load(FOLDER, state)
    return models.whole_state(model, dense), state["epoch"], [g["lr"] for g in dense.param_groups]


@pytest.mark.parametrize("builder", ["row_wise", "column_wise"])
def test_the_first_format_loads(ranks, builder):
    for values, epoch, rates in ranks(2).run(loaded, builder):
        assert (epoch, rates) == (4, [0.1])
        for number_of_table, name in enumerate(SPECS):
            weight = number(name, (6, 4)).to(torch.bfloat16 if name == "none" else torch.float32)
            table = f"ebc.embedding_bags.{name}.weight"
            assert torch.equal(values.pop(table).to(weight.dtype), weight)
            assert values.pop(f"tables.{table}.step") == 3 + number_of_table
            for slot in SPECS[name](lr=0.5).state_slots():
                expected = number(name + slot.name, slot.shape(6, 4))
                assert torch.equal(values.pop(f"tables.{table}.{slot.name}"), expected)
        for position, (name, shape) in enumerate((("weight", (1, 3)), ("bias", (1,)))):
            assert torch.equal(values.pop(f"over.{name}"), number(name, shape))
            for slot in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(values.pop(f"dense.{position}.{slot}"), number(slot, shape))
            assert values.pop(f"dense.{position}.step") == 1
        assert values == {}
