from unittest import mock

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.distributed import CollectiveError, row_stats
from meshrec.distributed.lookup_batch import Stage
from meshrec.optim import SGD, RowWiseAdagrad


def make(builder=None):
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", num_embeddings=10, embedding_dim=4, feature_names=["a"])]
    )
    env = default_env()
    plan = md.construct_module_sharding_plan(
        module, {"t0": builder or md.row_wise()}, world_size=env.shard.size
    )
    return module, md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, plan, env)


def overlapped():
    """Two batches in flight at once, stage by stage, as a pipeline runs them."""
    module, sharded = make()
    batches = [
        KeyedJaggedTensor(["a"], torch.tensor([id, id + 5]), lengths=torch.tensor([1, 1])) for id in range(2)
    ]
    tables = sharded.tables
    lookups = [tables.route(batch) for batch in batches]
    for stage in (Stage.EXCHANGED, Stage.ARRIVED):
        for lookup in lookups:
            tables.advance(lookup, stage)
    results = [sharded.awaited(lookup, tables.look_up(lookup)) for lookup in lookups]
    assert all("on its way" in repr(result) for result in results)
    expected = [module(batch).values() for batch in batches]
    return all(torch.equal(one.values(), other) for one, other in zip(results, expected, strict=True))


def test_stages_of_several_batches_interleave(ranks):
    assert ranks(2).run(overlapped) == [True, True]


def ids_change_before_backward(row_wise):
    _module, sharded = make(md.row_wise() if row_wise else md.data_parallel())
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))
    result = sharded(batch).values().sum()
    batch.values().fill_(3)
    before = {name: value.detach().clone() for name, value in sharded.named_parameters()}
    with pytest.raises(ValueError, match=r"^the ids changed in place between the forward pass"):
        result.backward()
    return all(torch.equal(before[name], value) for name, value in sharded.named_parameters())


@pytest.mark.parametrize("row_wise", [True, False])
def test_ids_that_change_before_backward_are_refused(ranks, row_wise):
    assert ranks(2).run(ids_change_before_backward, row_wise) == [True, True]


def a_table_changes_before_backward():
    _module, sharded = make(md.row_wise())
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))
    first, second, third = (sharded(batch).values().sum() for _ in range(3))
    (first + second).backward()  # updates of other batches do no harm
    with torch.no_grad():
        sharded.embedding_bags["t0"].weight.add_(1)
    with pytest.raises(ValueError, match=r"^table 't0' changed in place"):
        third.backward()


def test_a_table_that_changes_before_backward_is_refused(ranks):
    ranks(2).run(a_table_changes_before_backward)


def gradients_are_averaged():
    _module, sharded = make()
    before = torch.cat([shard.detach().clone() for shard in sharded.embedding_bags["t0"].shards()])
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))
    sharded(batch).values().sum().backward()
    return (before[0] - sharded.embedding_bags["t0"].weight[0]).tolist()


def test_gradients_are_averaged_over_ranks(ranks):
    for change in ranks(2).run(gradients_are_averaged):
        torch.testing.assert_close(torch.tensor(change), torch.full((4,), 0.1))


def all_on_rank_0():
    """Two steps where rank 1 has no rectangle, and nothing else that requires a gradient."""
    _module, sharded = make(md.table_wise(rank=0))
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))
    first = sharded(batch).values().detach()
    sharded(batch).values().sum().backward()
    return (first - sharded(batch).values()).tolist()


def test_a_rank_without_a_rectangle_sends_its_gradients(ranks):
    for change in ranks(2).run(all_on_rank_0):
        torch.testing.assert_close(torch.tensor(change), torch.full((2, 4), 0.1))


def broken_wire(update):
    """Row statistics fail while other tables wait for their update, and after the first of two tries."""
    env = default_env()
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=["a"])
            for name in ("t0", "t1", "t2")
        ]
    )
    builders = {"t0": md.row_wise(), "t1": md.column_wise(), "t2": md.data_parallel()}
    plan = md.construct_module_sharding_plan(module, builders, world_size=env.shard.size)
    sharder = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1), update=update)
    sharded = sharder.shard(module, plan, env)
    held = [
        *sharded.parameters(),
        *(
            slot
            for part in (sharded.tables.split, sharded.tables.local)
            for s in part.shards.state
            for slot in s
        ),
    ]
    before = [tensor.detach().clone() for tensor in held]
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))

    def fail(*_):
        raise CollectiveError("the wire is broken")

    def step():
        sharded(batch).values().square().sum().backward()
        sharded.fused_optimizer.step()

    with mock.patch.object(row_stats, "all_to_all", fail), pytest.raises(CollectiveError, match="broken"):
        step()
    unchanged = all(map(torch.equal, before, held))
    steps = {slots["step"] for slots in sharded.fused_optimizer.state.values()}
    sharded.fused_optimizer.zero_grad()
    step()
    return unchanged, steps, not any(map(torch.equal, before, held))


@pytest.mark.parametrize("update", ["in_backward", "on_step"])
def test_a_failed_step_leaves_weights_and_state_as_they_were(ranks, update):
    assert ranks(2).run(broken_wire, update) == [(True, {0}, True)] * 2


def no_gradients_wanted():
    _, sharded = make()
    batch = KeyedJaggedTensor(["a"], torch.tensor([0, 5]), lengths=torch.tensor([1, 1]))
    with torch.no_grad():
        return sharded(batch).values().requires_grad


def test_inference_records_nothing(ranks):
    assert ranks(2).run(no_gradients_wanted) == [False, False]


def keep_what_a_step_gave(kind):
    """Outputs and gradients that the caller keeps, beside copies of them, over more steps."""
    torch.manual_seed(0)
    module = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", num_embeddings=5000, embedding_dim=64, feature_names=["a"])]
    )
    env = default_env()
    arguments = {"rank": 0} if kind == "table_wise" else {}
    plan = md.construct_module_sharding_plan(module, {"t0": getattr(md, kind)(**arguments)}, world_size=2)
    sharded = md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, plan, env)
    kept, copies = [], []

    def keep(tensor):
        kept.append(tensor)
        copies.append(tensor.detach().clone())

    for step in range(6):
        torch.manual_seed(2 * step + env.world.rank)
        ids = torch.randint(0, 5000, (4096,))
        values = sharded(KeyedJaggedTensor(["a"], ids, lengths=torch.full((2048,), 2))).values()
        keep(values)
        values.register_hook(keep)
        values.square().sum().backward()
    return all(map(torch.equal, kept, copies)), len(kept)


@pytest.mark.parametrize("kind", ["row_wise", "column_wise", "table_wise", "data_parallel"])
def test_what_the_caller_keeps_is_never_written_again(ranks, kind):
    assert ranks(2).run(keep_what_a_step_gave, kind) == [(True, 12)] * 2
