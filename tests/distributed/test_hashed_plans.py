"""Hashed tables under plans drawn at random: trained, moved, saved, loaded under another plan and trained on,
they keep the IDs of a table on one rank, and the bits of the first plan.

``MESHREC_DRAWS=200 pytest tests/distributed/test_hashed_plans.py`` draws 200 plans.
"""

import dataclasses
import importlib.util
import itertools
import os
import random
from pathlib import Path

import pytest
import torch

from meshrec import KeyedJaggedTensor, checkpoint, fuse
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel

_spec = importlib.util.spec_from_file_location("hashed_life", Path(__file__).parent / "test_hashed.py")
life = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(life)
CHOICES, SPECS = life.CHOICES, life.SPECS

DRAWS = int(os.environ.get("MESHREC_DRAWS", "6"))
SEED = int(os.environ.get("MESHREC_SEED", "7"))
STEPS = 4
ROWS = {2: 13, 4: 15}
"""The rows of a table, as many as a batch of so many ranks needs."""


def keys_of(choice, world_size):
    keys = CHOICES[choice]
    return keys if keys.evict is None else dataclasses.replace(keys, max_rows=ROWS[world_size])


def cuts(rng, size):
    drawn = [rng.randint(0, size) for _ in range(rng.randint(0, 3))]
    return list(itertools.pairwise(sorted({0, size, *drawn})))


def drawn_table(rng, rows, dim, world_size):
    """Return bands of rows cut into columns, or of columns cut into rows, on any ranks; or a whole copy."""
    if rng.random() < 0.15:
        return md.ParameterSharding(sharding_type=md.ShardingType.DATA_PARALLEL)
    by_rows = rng.random() < 0.5
    outer, inner = (rows, dim) if by_rows else (dim, rows)
    shards = []
    for band in cuts(rng, outer):
        for piece in cuts(rng, inner):
            (r0, r1), (c0, c1) = (band, piece) if by_rows else (piece, band)
            shards.append(
                md.ShardMetadata(
                    shard_offsets=(r0, c0),
                    shard_sizes=(r1 - r0, c1 - c0),
                    placement=md.RemoteDevice(rank=rng.randrange(world_size)),
                )
            )
    return md.ParameterSharding(
        sharding_type=md.ShardingType.GRID_SHARD,
        sharding_spec=md.EnumerableShardingSpec(shards=tuple(shards)),
    )


def drawn_plan(rng, keys, world_size):
    tables = {
        "t": drawn_table(rng, keys.max_rows, 8, world_size),
        "u": drawn_table(rng, 30, 4, world_size),
    }
    return md.ShardingPlan({"ebc": md.EmbeddingModuleShardingPlan(tables)})


def make(keys, plan):
    return DistributedModelParallel(
        life.Model(life.unsharded(keys)),
        default_env(),
        plan=plan,
        sharders=[md.EmbeddingBagCollectionSharder(SPECS["adam"])],
        init_data_parallel=False,
    )


def whole_batch(step, world_size):
    """Return the samples of all ranks."""
    parts = [life.batch(step, rank=rank) for rank in range(world_size)]
    bags = [[each for part in parts for each in part[key].to_dense()] for key in "abc"]
    flat = [bag for key in bags for bag in key]
    return KeyedJaggedTensor(
        ["a", "b", "c"], torch.cat(flat), lengths=torch.tensor([len(bag) for bag in flat])
    )


def alone(keys, world_size):
    """Return the IDs alive after each step on one rank."""
    module, found = fuse(life.unsharded(keys), optimizer=SPECS["adam"]), []
    for step in range(STEPS):
        module(whole_batch(step, world_size)).values().square().sum().backward()
        found.append(sorted(module.hashed_tables()["t"].items()[0].tolist()))
    return found


def live(folder, number, choice, plans):
    """Train, move, save, load and train on under three plans; return the state after each step."""
    world_size = default_env().world.size
    keys = keys_of(choice, world_size)
    moving, loaded = make(keys, plans[0]), make(keys, plans[2])
    if number % 2:
        life.train(loaded, range(2, 3))  # rows that go when others are loaded
    states = []
    for step in range(STEPS):
        life.train(moving, [step])
        states.append(life.whole(moving))
        if step == 1:
            state = {"model": moving, "tables": moving.fused_optimizer}
            checkpoint.async_save(f"{folder}/{number}", state).wait()
            moving.reshard(plans[1])
            assert life.differences(states[1], life.whole(moving)) == [], (number, choice, "moved")
    checkpoint.load(f"{folder}/{number}", {"model": loaded, "tables": loaded.fused_optimizer})
    assert life.differences(states[1], life.whole(loaded)) == [], (number, choice, "loaded")
    life.train(loaded, range(2, STEPS))
    assert life.differences(states[-1], life.whole(loaded)) == [], (number, choice, "went on")
    return states


def check_equal(first, states, about):
    for step, (one, other) in enumerate(zip(first, states, strict=True)):
        assert life.differences(one, other) == [], (*about, step)


def lives(folder, seed, draws):
    """Return how many rows went, by choice."""
    rng, world_size, evicted = random.Random(seed), default_env().world.size, dict.fromkeys(CHOICES, 0)
    expected = {}
    for number in range(draws):
        choice = list(CHOICES)[number % len(CHOICES)]
        keys = keys_of(choice, world_size)
        states = live(folder, number, choice, [drawn_plan(rng, keys, world_size) for _ in range(3)])
        check_equal(expected.setdefault(choice, states), states, (number, choice))
        ids = [sorted(state["ebc.embedding_bags.t.ids"].tolist()) for state in states]
        if choice != "norm":  # on one rank sums of squares are rounded otherwise
            assert ids == alone(keys, world_size), (number, choice)
        gone = [set(one) - set(other) for one, other in itertools.pairwise(ids)]
        evicted[choice] += sum(map(len, gone))
    return evicted


@pytest.mark.parametrize("world_size", [2, 4])
def test_drawn_plans_keep_the_same_ids_alive(ranks, tmp_path, world_size):
    draws = max(len(CHOICES), DRAWS // 2) if world_size == 2 else DRAWS // 2
    (evicted, *others) = ranks(world_size).run(lives, str(tmp_path), SEED + world_size, draws)
    assert all(each == evicted for each in others)
    if world_size == 2:
        assert all(evicted[choice] for choice in ("lru", "norm"))


def plan_of(pieces):
    """Return a plan of table t with 13 rows; ``pieces``: (r0, r1, c0, c1, rank)."""
    tables = {}
    for name, each in {"t": pieces, "u": [(0, 30, 0, 4, 0)]}.items():
        shards = [
            md.ShardMetadata(
                shard_offsets=(r0, c0), shard_sizes=(r1 - r0, c1 - c0), placement=md.RemoteDevice(rank=rank)
            )
            for r0, r1, c0, c1, rank in each
        ]
        tables[name] = md.ParameterSharding(
            sharding_type=md.ShardingType.GRID_SHARD,
            sharding_spec=md.EnumerableShardingSpec(shards=tuple(shards)),
        )
    return md.ShardingPlan({"ebc": md.EmbeddingModuleShardingPlan(tables)})


WHOLE = plan_of([(0, 13, 0, 8, 0)])
CUTS = {
    "uneven": [(0, 1, 0, 1, 0), (1, 13, 0, 1, 1), (0, 3, 1, 2, 0), (3, 13, 1, 2, 1), (0, 13, 2, 8, 1)],
    "nested": [(0, 13, 0, 1, 0), (0, 11, 1, 3, 0), (11, 13, 1, 3, 1), (0, 13, 3, 8, 1)],
    "empty": [(0, 12, 0, 8, 0), (12, 13, 0, 8, 1)],  # no ID of the first two steps is in the last row
}


def chosen(folder, choice, cut):
    plan = plan_of(CUTS[cut])
    plain = live(folder, 0, choice, [WHOLE] * 3)
    for number, plans in enumerate(([plan, WHOLE, plan], [WHOLE, plan, plan]), start=1):
        check_equal(plain, live(folder, number, choice, plans), (choice, cut, number))


# Each of both once, and with MESHREC_THOROUGH each with each.
CHOICES_AND_CUTS = [("count", "uneven"), ("lru", "nested"), ("norm", "empty")]
if "MESHREC_THOROUGH" in os.environ:
    CHOICES_AND_CUTS = [*itertools.product(("lru", "count", "norm"), CUTS)]


@pytest.mark.parametrize(("choice", "cut"), CHOICES_AND_CUTS)
def test_columns_may_be_cut_at_different_rows(ranks, tmp_path, choice, cut):
    ranks(2).run(chosen, str(tmp_path), choice, cut)
