"""A rank that fails alone between collectives; in pools of their own, as these cannot be used afterwards."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms import failures
from meshrec.comms.collectives import all_gather, all_reduce
from meshrec.comms.failures import POLL_SECONDS, CollectiveError, announced_on_failure
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.ops.operators import INVALID, InputError, OutOfMemoryError, translate_error
from meshrec.optim import SGD
from meshrec.testing.rank_pool import RankPool

FEATURES = KeyedJaggedTensor(["a"], torch.tensor([1, 5, 9]), lengths=torch.tensor([2, 1]))


def sharded_model():
    tables = [EmbeddingBagConfig(name="t0", num_embeddings=12, embedding_dim=4, feature_names=["a"])]
    module = torch.nn.ModuleDict({"ebc": EmbeddingBagCollection(tables)})
    plan = md.construct_module_sharding_plan(module["ebc"], {"t0": md.row_wise()}, world_size=2)
    return DistributedModelParallel(
        module, plan=md.ShardingPlan({"ebc": plan}), sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))]
    )


def outcome_of(run):
    try:
        run()
    except Exception as error:
        return type(error), str(error)
    return None


def fail_in_lookup(kind, text, links):
    """Fail on rank 1; return the outcome of this step and of the next."""
    os.environ["MESHREC_HOST_LINK"] = links
    ebc = sharded_model().module["ebc"]

    def step():
        ebc(FEATURES).values().sum().backward()

    step()

    def fail(*_):
        raise translate_error(kind(text))

    if dist.get_rank() == 1:
        ebc.tables.split.forward = fail
    return outcome_of(step), outcome_of(step)


@pytest.mark.parametrize(
    ("kind", "text", "links", "expected"),
    [
        # Up to 2.14, torch gives invalid input as a ValueError, and from 2.15 on as a RuntimeError.
        (ValueError, "row 7", "1", InputError),
        (RuntimeError, f"{INVALID}row 7", "0", InputError),
        (MemoryError, "row 7", "1", OutOfMemoryError),
    ],
)
def test_a_lone_error_is_raised_where_the_others_wait(kind, text, links, expected):
    with RankPool(2, timeout_seconds=120) as pool:
        told, own = pool.run(fail_in_lookup, kind, text, links)
    assert own[0] == (expected, "row 7")
    assert told[0] == (expected, "rank 1: row 7")
    assert [told[1][0], own[1][0]] == [CollectiveError] * 2


def fail_in_update():
    ebc = sharded_model().module["ebc"]
    output = ebc(FEATURES).values().sum()

    def fail(*_, **__):
        raise OutOfMemoryError("no memory for the update")

    if dist.get_rank() == 1:
        ebc.tables._updates[0].prepare = fail

    def update_and_go_on():
        output.backward()
        ebc(FEATURES).values()

    return outcome_of(update_and_go_on)


def test_a_lone_error_of_an_update_is_raised_in_the_next_step():
    with RankPool(2, timeout_seconds=120) as pool:
        told, own = pool.run(fail_in_update)
    assert own == (OutOfMemoryError, "no memory for the update")
    assert told == (OutOfMemoryError, "rank 1: no memory for the update")


@announced_on_failure
def fail():
    raise ValueError("as on every rank")


def fail_everywhere_and_go_on():
    """Catch an error of all ranks; then rank 1 comes later than the others look for announcements."""
    axis = default_env().world
    outcomes = []
    for collective in (all_gather, all_reduce):
        outcomes.append(outcome_of(fail))
        if axis.rank == 1:
            time.sleep(3 * POLL_SECONDS)
        one = torch.ones(1)
        result = collective(one, axis, "after an error")
        outcomes.append((one if result is None else result.wait()).sum().item())
    return outcomes


def test_ranks_that_all_fail_alike_may_catch_the_error_and_go_on(ranks):
    expected = [(ValueError, "as on every rank"), 2.0] * 2
    assert ranks(2).run(fail_everywhere_and_go_on) == [expected] * 2


def fail_alone_and_go_on():
    """Catch an error that rank 0 does not have, then start a collective on rank 1 only."""
    if dist.get_rank() == 0:
        return None
    failures._SAME_ERROR_SECONDS = 0.2
    outcome_of(fail)
    return outcome_of(lambda: all_gather(torch.ones(1), default_env().world, "after an error"))


def test_an_error_caught_on_one_rank_ends_the_group():
    with RankPool(2, timeout_seconds=120) as pool:
        _, (kind, text) = pool.run(fail_alone_and_go_on)
    assert kind is CollectiveError
    assert "[0]" in text
