"""The pipeline's numbers are those of the plain loop, bit for bit."""

import functools
import importlib.util
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import distributed as md
from meshrec.optim import LAMB, LARS, SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.plan.mesh import default_env

# Ranks do not know the folder of tests.
_spec = importlib.util.spec_from_file_location("pipeline_models", Path(__file__).parent / "models.py")
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)

MIXED = models.MIXED
KINDS = [
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid",
    "data_parallel",
]
SPECS = {
    "none": None,
    "sgd": SGD(lr=0.1),
    "adagrad": Adagrad(lr=0.1),
    "rowwise_adagrad": RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    "adam": Adam(lr=0.01),
    "partial_rowwise_adam": PartialRowWiseAdam(lr=0.01),
    "lamb": LAMB(lr=0.01, weight_decay=0.01),
    "lars": LARS(lr=0.1, weight_decay=0.01),
}


@functools.cache
def environment(mesh):
    if mesh == "flat":
        return default_env()
    axes = {"replicated": ("replicate", "shard"), "nodes": ("node", "local")}[mesh]
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=axes))


def check(
    kinds, name, sequence=False, accumulate=1, clip=None, update=None, mesh="flat", dense="ddp", steps=12
):
    options = {
        "sequence": sequence,
        "update": update,
        "clip": clip,
        "env": environment(mesh),
        "dense": dense,
    }
    batches = models.make_batches(steps, options["env"].world.rank)
    model, optimizer = models.sharded(kinds, SPECS[name], **options)
    expected = models.plain_loop(model, optimizer, batches, accumulate)
    other, its_optimizer = models.sharded(kinds, SPECS[name], **options)
    pipeline = TrainPipeline(other, its_optimizer, torch.device("cpu"), accumulate=accumulate, strict=True)
    outputs = list(pipeline(batches))
    assert len(outputs) == steps
    assert torch.isfinite(torch.stack(expected)).all()
    assert torch.equal(torch.stack(outputs), torch.stack(expected))
    models.assert_same(models.state_of(other, its_optimizer), models.state_of(model, optimizer))


def check_all(arguments):
    for each in arguments:
        try:
            check(**each)
        except AssertionError as error:
            raise AssertionError(f"{each}: {error}") from error


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
def test_every_placement(ranks, sequence):
    ways = [
        {},
        {"update": "on_step"},
        {"update": "on_step", "clip": 0.5, "accumulate": 3},
    ]
    arguments = [
        {"kinds": (kind,) * 4, "name": "rowwise_adagrad", "sequence": sequence, **way}
        for kind in KINDS
        for way in ways
    ]
    arguments[0]["steps"] = 50
    ranks(2).run(check_all, arguments)


@pytest.mark.parametrize("way", [{}, {"accumulate": 4}, {"update": "on_step", "clip": 0.5}], ids=str)
def test_every_optimizer(ranks, way):
    arguments = [
        {"kinds": MIXED, "name": name, **way} for name in SPECS if name != "none" or "clip" not in way
    ]
    ranks(2).run(check_all, arguments)


@pytest.mark.parametrize("mesh", ["flat", "replicated", "nodes"])
def test_every_mesh(ranks, mesh):
    arguments = [
        {"kinds": MIXED, "name": "rowwise_adagrad", "mesh": mesh, "dense": dense}
        for dense in ("ddp", "fsdp2")
    ]
    ranks(4).run(check_all, arguments)


def semi_synchronous():
    """Against its definition, written out for SGD on whole tables."""
    world, steps = default_env().world, 10
    batches = [models.make_batches(steps, rank) for rank in range(world.size)]
    model, optimizer = models.sharded(("table_wise",) * 4, SGD(lr=0.1))
    pipeline = TrainPipeline(model, optimizer, semi_synchronous_from=4)
    outputs = list(pipeline(batches[world.rank]))
    reference = models.Model()
    weights = [table.weight for table in reference.collection.embedding_bags.values()]
    dense = torch.optim.SGD(reference.over.parameters(), lr=0.01, momentum=0.5)
    before = None
    for step in range(steps):
        now = [weight.detach().clone() for weight in weights]
        read = now if before is None or step < 4 else before
        for weight, old in zip(weights, read, strict=True):
            weight.data.copy_(old)
            weight.grad = None
        dense.zero_grad()
        losses = [reference(of_rank[step])[0] for of_rank in batches]
        assert torch.allclose(outputs[step], losses[world.rank].detach(), rtol=1e-4)
        (sum(losses) / world.size).backward()
        for weight, new in zip(weights, now, strict=True):
            weight.data.copy_(new - 0.1 * weight.grad)
        dense.step()
        before = now


def test_semi_synchronous(ranks):
    ranks(2).run(semi_synchronous)
