"""Hashed tables over several devices of one process: the unsharded results, state dicts and checkpoints."""

import itertools
import os

import pytest
import torch

from meshrec import DataType
from meshrec import distributed as md
from meshrec.checkpoint import load, save
from meshrec.comms.mesh import ShardingEnv
from meshrec.model_parallel import DistributedModelParallel
from meshrec.quant import quantize
from tests.export import hashed_models as made

BUILDERS = {
    "rows": md.row_wise,
    "columns": lambda: md.column_wise(ranks=[0, 2]),
    "one": lambda: md.table_wise(rank=1),
    "everywhere": md.data_parallel,
}


def fresh():
    return made.drawn_model(5, widths=(8, 16), max_rows=40, evict=made.LRU(), admit=None)


@pytest.fixture(scope="module")
def trained():
    model = fresh()
    seen = made.trained(model, 5)
    return {name: value.clone() for name, value in model.state_dict().items()}, seen


def unsharded(state, data_type):
    """The trained model without its optimizer; sharding changes it."""
    model = fresh().requires_grad_(False).eval()
    model.load_state_dict(state)
    return model if data_type is None else quantize(model, data_type)


def spread(model, kind):
    plan = {}
    for name, module in (("bags", model.bags), ("sequences", model.sequences)):
        builders = {config.name: BUILDERS[kind]() for config, _ in module.tables().values()}
        plan[name] = md.construct_module_sharding_plan(module, builders, world_size=3)
    env = ShardingEnv.from_local(["cpu"] * 3)
    return DistributedModelParallel(model, env, plan=md.ShardingPlan(plan))


# Each of both, and with MESHREC_THOROUGH each with each.
KINDS = [("rows", None), ("columns", DataType.INT8), ("one", DataType.INT4), ("everywhere", None)]
KINDS += [("rows", DataType.INT4)]
if "MESHREC_THOROUGH" in os.environ:
    KINDS = [*itertools.product(BUILDERS, (None, DataType.INT8, DataType.INT4))]


@pytest.mark.parametrize(("kind", "data_type"), KINDS)
def test_they_give_what_the_unsharded_model_gives(trained, kind, data_type, tmp_path):
    numbers, seen = trained
    whole, parts = (unsharded(numbers, data_type) for _ in range(2))
    parts = spread(parts, kind)
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    for size in (0, 1, 50):
        batch = made.drawn_batch(size, made.drawn_ids(size, seen), size)
        found, expected = made.evaluated(parts, *batch), made.evaluated(whole, *batch)
        assert torch.equal(found, expected) if kind != "rows" else torch.allclose(found, expected)
    shown = parts.state_dict()
    assert state.keys() == shown.keys()
    assert [name for name in state if not torch.equal(state[name], torch.as_tensor(shown[name]))] == []
    nothing = {name: value.clone() for name, value in fresh().state_dict().items()}
    other, third = (spread(unsharded(nothing, data_type), kind) for _ in range(2))
    other.load_state_dict({name: value.clone() for name, value in state.items()})
    assert torch.equal(made.evaluated(other, *batch), found)
    save(tmp_path / "saved", {"model": parts})
    load(tmp_path / "saved", {"model": third})
    assert torch.equal(made.evaluated(third, *batch), found)
