"""The pipeline's numbers are those of the plain loop, bit for bit.

``MESHREC_DRAWS=420 pytest tests/pipeline/test_train_pipeline.py`` takes every way to train, 50 steps each.
"""

import functools
import importlib.util
import itertools
import os
import random
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import LAMB, LARS, SGD, Adagrad, Adam, PartialRowWiseAdam, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline

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


def draws():
    """Of all ways to train 15, or as many as MESHREC_DRAWS says: every placement and every optimizer is among
    them.
    """
    clipped = {"update": "on_step", "clip": 0.5}
    ways = [
        {"kinds": (kind,) * 4, "name": name, "sequence": sequence, "accumulate": accumulate, **clipping}
        for kind, name, sequence, accumulate, clipping in itertools.product(
            KINDS, SPECS, (False, True), (1, 3), ({}, clipped)
        )
        if not (clipping and name == "none")  # such tables are clipped without being told
    ]
    random.Random(int(os.environ.get("MESHREC_SEED", "0"))).shuffle(ways)
    first = [next(way for way in ways if way["kinds"][0] == kind) for kind in KINDS]
    first += [next(way for way in ways if way["name"] == name) for name in SPECS]
    rest = [way for way in ways if way not in first]
    drawn = [way for n, way in enumerate(first) if way not in first[:n]] + rest
    return drawn[: int(os.environ.get("MESHREC_DRAWS", "15"))]


def test_every_way_to_train(ranks):
    """MESHREC_DRAWS=420: all of them."""
    steps = 50 if "MESHREC_DRAWS" in os.environ else 12
    ways = [{"steps": steps, **way} for way in draws()]
    ways[0]["steps"] = 50
    for start in range(0, len(ways), 6):
        ranks(2).run(check_all, ways[start : start + 6])


@pytest.mark.parametrize("way", [{}, {"accumulate": 4}, {"update": "on_step", "clip": 0.5}], ids=str)
def test_placements_side_by_side(ranks, way):
    arguments = [{"kinds": MIXED, "name": name, **way} for name in ("rowwise_adagrad", "lamb")]
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
