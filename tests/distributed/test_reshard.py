import importlib.util
import itertools
import os
from pathlib import Path

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec import distributed as md
from meshrec.comms.mesh import Axis, ShardingEnv, default_env
from meshrec.distributed import reshard
from meshrec.distributed.reshard import RankRectangle, plan_transfers
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.operators import OutOfMemoryError
from meshrec.optim import SGD
from meshrec.tables.table import Rectangle
from meshrec.testing import RankError

_path = Path(__file__).parents[1] / "checkpoint" / "models.py"
_spec = importlib.util.spec_from_file_location("checkpoint_models", _path)
models = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(models)


def tour(kinds):
    """Every kind after every other, and after itself: a de Bruijn sequence of pairs, closed."""
    pairs = [
        [first, *(x for second in kinds[i + 1 :] for x in (first, second))] for i, first in enumerate(kinds)
    ]
    return [*itertools.chain(*pairs), kinds[0]]


def there_and_on(optimizer, dense, kinds):
    """Trains, moves from plan to plan, and trains on; beside it a run that stays where it is."""
    trainee, still = (models.make("rw", optimizer, dense=dense) for _ in range(2))
    models.train(*trainee, range(3))
    models.train(*still, range(3))
    holder = trainee[0].fused_optimizer
    scheduler = torch.optim.lr_scheduler.StepLR(holder, step_size=1, gamma=0.5)
    before = models.whole_state(*trainee)
    wrong = []
    for kind in kinds:
        trainee[0].reshard(models.make_plan(kind))
        if differ := models.differences(models.whole_state(*trainee), before):
            wrong.append((kind, differ))
    assert trainee[0].plan.digest() == models.make_plan(kinds[-1]).digest()
    for each in (holder, still[0].fused_optimizer):
        each.step()
    scheduler.step()
    for group in still[0].fused_optimizer.param_groups:
        group["lr"] /= 2
    for each in (trainee, still):
        models.train(*each, range(3, 8))
    return wrong, models.whole_state(*trainee), models.whole_state(*still)


# Others meet in tests/checkpoint/test_random_plans.py.
@pytest.mark.parametrize(
    ("world_size", "optimizer", "dense"), [(1, "adam", "fsdp2"), (2, "rowwise", "ddp"), (4, "adam", "fsdp2")]
)
def test_tables_move_bit_by_bit_and_train_on(ranks, world_size, optimizer, dense):
    """From every plan to every other on two ranks, and with MESHREC_THOROUGH on one and four."""
    is_tour = world_size == 2 or "MESHREC_THOROUGH" in os.environ
    kinds = tour(models.KINDS) if is_tour else models.KINDS
    for wrong, moved, still in ranks(world_size).run(there_and_on, optimizer, dense, kinds):
        assert wrong == []
        for name, value in moved.items():
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(still[name]), rtol=1e-5, atol=1e-6, msg=name
            )


def in_many_rounds():
    reshard._TRANSFER_BYTES, reshard._ROUND_BYTES = 40, 100
    model, optimizer = models.make("rw", "adam", dense=None)
    models.train(model, optimizer, range(2))
    before = models.whole_state(model, optimizer)
    model.reshard(models.make_plan("cw"))
    model.reshard(models.make_plan("tw"))
    return models.differences(models.whole_state(model, optimizer), before)


def test_large_tables_move_in_rounds(ranks):
    assert ranks(2).run(in_many_rounds) == [[], []]


def replicated():
    from torch.distributed.device_mesh import init_device_mesh

    env = ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    module = models.Model()

    def plan(kind):
        builders = {name: models.builder(kind, i, 2) for i, name in enumerate(models.SIZES)}
        return md.ShardingPlan({"ebc": md.construct_module_sharding_plan(module.ebc, builders, world_size=2)})

    sharders = [md.EmbeddingBagCollectionSharder(models.SPECS["rowwise"])]
    model = models.DistributedModelParallel(module, env, plan=plan("rw"), sharders=sharders)
    expected = models.whole_state(model, torch.optim.SGD(model.module.over.parameters(), lr=0.1))
    wrong = []
    for kind in models.KINDS:
        model.reshard(plan(kind))
        found = models.whole_state(model, torch.optim.SGD(model.module.over.parameters(), lr=0.1))
        wrong += models.differences(found, expected)
    models.train(model, torch.optim.SGD(model.module.over.parameters(), lr=0.1), range(2))
    return wrong


def test_replica_groups_move_each_for_itself(ranks):
    assert ranks(4).run(replicated) == [[]] * 4


def refused(kind):
    """The new plan is refused, or fails half-way; the old one goes on."""
    model, optimizer = models.make("rw")
    before = models.whole_state(model, optimizer)
    plan = models.make_plan("cw")
    if kind == "wrong":
        del plan.plan["ebc"]["t0"]
    elif kind == "different" and default_env().world.rank:
        plan = models.make_plan("tw")
    try:
        if kind == "memory" and default_env().world.rank:
            reshard._empty = out_of_memory
        if kind == "disk" and default_env().world.rank:
            reshard._TableTransport._load_block = disk_full
        model.reshard(plan)
    finally:
        assert models.differences(models.whole_state(model, optimizer), before) == []
        models.train(model, optimizer, range(2))


def out_of_memory(*_):
    raise RuntimeError("can't allocate memory: you tried to allocate 1 byte")


def disk_full(*_):
    raise OSError(28, "No space left on device")


def rows_that_fail(kind, part):
    """Rank 1 fails while rows move; then the tables are as they were, and move."""
    model, optimizer = models.make("rw", "adam", dense=None)
    models.train(model, optimizer, range(2))
    before, mover = models.whole_state(model, optimizer), getattr(reshard._TableTransport, part)

    def fail(*arguments):
        raise kind("row 7")

    if default_env().world.rank:
        setattr(reshard._TableTransport, part, fail)
    try:
        model.reshard(models.make_plan("cw"))
    except Exception as error:
        caught = type(error), str(error)
    setattr(reshard._TableTransport, part, mover)
    differences = models.differences(models.whole_state(model, optimizer), before)
    model.reshard(models.make_plan("cw"))
    return caught, differences + models.differences(models.whole_state(model, optimizer), before)


@pytest.mark.parametrize(("kind", "part"), [(ValueError, "_num_bytes"), (OutOfMemoryError, "_load_block")])
def test_rows_that_one_rank_cannot_move_fail_on_all_ranks_and_stay(ranks, kind, part):
    assert ranks(2).run(rows_that_fail, kind, part) == [((kind, "rank 1: row 7"), [])] * 2


def plain_gradients():
    module = models.Model()
    plan = models.make_plan("rw")
    sharders = [md.EmbeddingBagCollectionSharder()]
    models.DistributedModelParallel(module, plan=plan, sharders=sharders).reshard(models.make_plan("tw"))


@pytest.mark.parametrize(
    ("function", "arguments", "match"),
    [
        (refused, ["wrong"], "ValueError.*'t0'"),
        (refused, ["different"], "ValueError.*'t0'.*'ebc'"),
        (plain_gradients, [], "ValueError.*'t0'.*'ebc'"),
        (
            refused,
            ["memory"],
            "OutOfMemoryError.*rank 1",
        ),
        (refused, ["disk"], "rank 1.*No space left"),
    ],
)
def test_a_refused_plan_leaves_the_old_one(function, arguments, match):
    from meshrec.testing import RankPool

    # A pool of its own: a rank's reshard module is broken on purpose.
    with RankPool(2) as pool, pytest.raises(RankError, match=match) as failure:
        pool.run(function, *arguments)
    assert "rank 0:" in str(failure.value)
    assert "rank 1:" in str(failure.value)


def test_transfers_cover_the_new_rectangles():
    def held(rank, *rectangle):
        return RankRectangle(rank, 0, Rectangle(0, *rectangle))

    rows = [held(0, 0, 5, 0, 4), held(1, 5, 10, 0, 4)]
    columns = [held(0, 0, 10, 0, 2), held(1, 0, 10, 2, 4)]
    found = list(plan_transfers(rows, columns, Axis(size=2)))
    assert [(t.source.rank, t.target.rank, *t[2:]) for t in found] == [
        (0, 0, 0, 5, 0, 2),
        (1, 0, 5, 10, 0, 2),
        (0, 1, 0, 5, 2, 4),
        (1, 1, 5, 10, 2, 4),
    ]
    to_all = list(plan_transfers(rows, None, Axis(size=2)))
    assert [(t.source.rank, t.target.rank) for t in to_all] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    from_all = list(plan_transfers(None, columns, Axis(size=2)))
    assert [(t.source.rank, t.target.rank) for t in from_all] == [(0, 0), (1, 1)]
    assert list(plan_transfers(None, None, Axis(size=2))) == []


@pytest.mark.parametrize("name", ["items", "keys"])
def test_a_table_named_like_a_dict_s_method_moves(name):
    collection = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name=name, num_embeddings=8, embedding_dim=4, feature_names=["a"])]
    )
    env = ShardingEnv.single_process()
    plan = [
        md.construct_module_sharding_plan(collection, {name: builder}, world_size=1)
        for builder in (md.table_wise(rank=0), md.data_parallel())
    ]
    before = collection.state_dict()[f"embedding_bags.{name}.weight"].clone()
    model = DistributedModelParallel(
        collection,
        env=env,
        plan=md.ShardingPlan({"": plan[0]}),
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
        dense=None,
    )
    model.reshard(md.ShardingPlan({"": plan[1]}))
    assert torch.equal(dict(model.named_parameters())[f"embedding_bags.{name}.weight"], before)
