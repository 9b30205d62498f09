import gc
import logging
import weakref

import pytest
import torch

from meshrec import BoundsCheckMode, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.ops import operators
from meshrec.ops.operators import InputError, OutOfMemoryError
from meshrec.testing import RankError


def make(bounds_check=BoundsCheckMode.ERROR, weighted=False, env=None):
    env = default_env() if env is None else env
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name="t0", num_embeddings=10, embedding_dim=4, feature_names=["a"]),
            EmbeddingBagConfig(name="t1", num_embeddings=10, embedding_dim=4, feature_names=["b"]),
        ],
        is_weighted=weighted,
        bounds_check=bounds_check,
    )
    plan = md.construct_module_sharding_plan(
        collection, {"t0": md.row_wise(), "t1": md.data_parallel()}, world_size=env.shard.size
    )
    return md.EmbeddingBagCollectionSharder().shard(collection, plan, env)


def features(bad=None, keys=("a", "b"), weights=None):
    ids = torch.tensor([1, 2, 3, 4])
    if bad is not None:
        ids[bad[0]] = bad[1]
    return KeyedJaggedTensor(list(keys), ids, weights, lengths=torch.tensor([1, 1, 2, 0]))


def forward(kind):
    rank = default_env().world.rank
    weighted = kind in ("no_weights", "nan")
    module = make(weighted=weighted)
    if kind == "id":
        batch = features(bad=(1, 10) if rank == 1 else None)
    elif kind == "local_id":
        batch = features(bad=(2, -1) if rank == 1 else None)
    elif kind == "key":
        batch = features(keys=("a", "c") if rank == 1 else ("a", "b"))
    else:
        weights = torch.ones(4)
        if rank == 1:
            weights = None if kind == "no_weights" else torch.tensor([torch.nan, 1, 1, 1])
        batch = features(weights=weights)
    try:
        module(batch).wait()
    except ValueError as error:
        message = str(error)
    else:
        message = "no error"
    # The ranks are still in step: the next batch works.
    good = features(weights=torch.ones(4) if weighted else None)
    return message, module(good).values().shape == (2, 8)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("id", "rank 1: table 't0': id 10 of feature 'a' (sample 1) is outside [0, 10)."),
        ("local_id", "rank 1: table 't1': id -1 of feature 'b' (sample 0) is outside [0, 10)."),
        ("key", "rank 1: features ['b'] of tables ['t1'] are missing: the input has the keys ['a', 'c']."),
        ("no_weights", "rank 1: the collection is weighted (is_weighted=True) but the input has no weights."),
        ("nan", "rank 1: table 't0': the weight of id 1 of feature 'a' (sample 0) is nan."),
    ],
)
def test_one_ranks_bad_input_is_the_same_error_on_all(ranks, kind, message):
    for found, recovered in ranks(2).run(forward, kind):
        assert found.startswith(message)
        assert recovered


def with_a_failing_kernel(error):
    module, errors = make(), []
    with pytest.MonkeyPatch.context() as patch:
        if default_env().world.rank == 1:
            patch.setattr(operators, "route_ids", operators.with_translated_errors(raising(error)))
        try:
            module(features()).wait()
        except Exception as caught:
            errors.append((type(caught), str(caught)))
    return *errors, module(features()).values().shape == (2, 8)


def raising(error):
    def operator(*_):
        raise error

    return operator


# What an operator raises up to torch 2.14, and from 2.15 on.
@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("invalid input: id 7"), InputError, "rank 1: id 7"),
        (RuntimeError("invalid input: id 7"), InputError, "rank 1: id 7"),
        (MemoryError("std::bad_alloc"), OutOfMemoryError, "rank 1: std::bad_alloc"),
        (RuntimeError("std::bad_alloc"), OutOfMemoryError, "rank 1: std::bad_alloc"),
        (RuntimeError("a bug"), RuntimeError, "rank 1: RuntimeError: a bug"),
    ],
    ids=str,
)
def test_one_ranks_kernel_error_is_the_same_on_all_with_any_torch(ranks, error, kind, text):
    assert ranks(2).run(with_a_failing_kernel, error) == [((kind, text), True)] * 2


def test_one_process_raises_the_error_itself():
    with pytest.raises(ValueError, match=r"^table 't0': id 10 of feature 'a'"):
        make(env=md.ShardingEnv.single_process())(features(bad=(0, 10)))


def leave_nothing_behind():
    module, batch = make(), features(bad=(1, 10))
    kept = weakref.ref(batch.values())
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="id 10"):
            module(batch)
        del batch
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_error_keeps_no_batch(ranks, world_size):
    if world_size == 1:
        leave_nothing_behind()
    else:
        ranks(2).run(leave_nothing_behind)


def test_warn_counts_and_takes_row_0(caplog):
    module = make(BoundsCheckMode.WARN, env=md.ShardingEnv.single_process())
    with caplog.at_level(logging.WARNING, "meshrec"):
        bad = module(features(bad=(0, 10))).values()
        module(features(bad=(0, 11))).wait()
    assert torch.equal(bad, module(features(bad=(0, 0))).values())
    assert module.num_clamped_ids == 2
    assert len(caplog.records) == 1
    assert "1 IDs lie outside their table, most of them in feature 'a' for table 't0'" in caplog.text


def test_device_must_fit():
    module = make(env=md.ShardingEnv.single_process())
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.empty(4, dtype=torch.long, device="meta"),
        lengths=torch.ones(4, device="meta").long(),
    )
    with pytest.raises(ValueError, match="'t0'"):
        module(batch)


def other_errors():
    module = make()
    module(KeyedJaggedTensor(["a", "b"], torch.tensor([1]), lengths=torch.tensor([1, 0, 1, 0])))


def test_lengths_that_do_not_sum(ranks):
    with pytest.raises(RankError, match="validate"):
        ranks(2).run(other_errors)
