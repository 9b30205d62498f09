import time

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms import collectives, phase_clock
from meshrec.comms.mesh import default_env
from meshrec.comms.phase_clock import DENSE, phase, record_phases
from meshrec.optim import RowWiseAdagrad
from meshrec.planner import measured
from meshrec.planner.estimators import PHASES


def test_phases_and_the_rest_make_up_the_whole():
    started = time.perf_counter()
    with record_phases() as seconds:
        with phase("update"):
            time.sleep(0.02)
            with phase("row_stats"):
                time.sleep(0.03)
        with phase("update"):
            time.sleep(0.02)
        time.sleep(0.01)
    took = time.perf_counter() - started
    assert set(seconds) == {"update", "row_stats", DENSE}
    assert seconds["update"] >= 0.04
    assert seconds["row_stats"] >= 0.03
    assert seconds[DENSE] >= 0.01
    assert sum(seconds.values()) <= took


def test_a_block_that_fails_ends_too():
    with pytest.raises(KeyError), record_phases() as seconds, phase("ids"):
        raise KeyError
    assert set(seconds) == {"ids", DENSE}
    assert not phase_clock.recorders


def test_blocks_do_not_nest():
    with (
        record_phases(),
        pytest.raises(ValueError, match="record_phases"),
        record_phases(),
    ):
        pass


def test_the_rest_has_the_planners_name():
    assert measured.DENSE == DENSE


def recorded_step():
    builders = [
        md.table_wise(rank=0),
        md.row_wise(),
        md.column_wise(),
        md.data_parallel(),
    ]
    module = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{n}", num_embeddings=10, embedding_dim=4, feature_names=[f"f{n}"])
            for n in range(len(builders))
        ]
    )
    env = default_env()
    chosen = {f"t{n}": builder for n, builder in enumerate(builders)}
    plan = md.construct_module_sharding_plan(module, chosen, world_size=env.shard.size)
    sharded = md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)).shard(module, plan, env)
    keys = [f"f{n}" for n in range(len(builders))]
    batch = KeyedJaggedTensor(keys, torch.arange(4), lengths=torch.ones(4, dtype=torch.int64))
    with record_phases() as seconds:
        sharded(batch).values().sum().backward()
    return seconds


def test_a_step_of_real_ranks_shows_its_phases(ranks):
    for seconds in ranks(2).run(recorded_step):
        assert set(seconds) == {*PHASES, DENSE} - {"replicas"}
        assert all(value > 0 for value in seconds.values())


def waits(overlap):
    axis = default_env().world
    sent = torch.full((axis.size,), float(axis.rank))
    with record_phases(overlap=overlap):
        exchange = collectives.all_to_all(sent, collectives.Splits([1, 1], [1, 1]), axis, "test")
        gather = collectives.all_gather(sent, axis, "test")
        return [exchange.work is None, gather.work is None, exchange.wait().tolist()]


@pytest.mark.parametrize("overlap", [True, False])
def test_without_overlap_collectives_end_where_they_start(ranks, overlap):
    assert ranks(2).run(waits, overlap) == [[not overlap, not overlap, [0.0, 1.0]]] * 2
