import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshrec.comms.mesh import ShardingEnv
from meshrec.plan.checks import verify_plan
from meshrec.plan.sharding_plan import ShardingPlan, TableSize
from meshrec.planner.calibration import trials
from meshrec.planner.calibration.trials import Trial, make_trials, measure
from meshrec.planner.estimators import PHASES
from meshrec.planner.evaluate import evaluate
from meshrec.planner.types import Topology

TINY = {"num_tables": 4, "num_rows": 40, "dim": 8, "batch_size": 3, "bag": 2}
DEVICE = torch.device("cpu")


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 16])
def test_trials_keep_all_ranks_equally_busy(num_ranks, profile):
    topology = Topology(world_size=num_ranks, local_world_size=num_ranks, hardware=profile)
    found = make_trials(num_ranks, 32)
    assert len(found) == (16 if num_ranks > 1 else 4)
    for trial in found:
        plan = trial.plan(num_ranks)
        sizes = {table.name: TableSize(table.num_embeddings, table.embedding_dim) for table in trial.tables()}
        verify_plan(ShardingPlan({"": plan}), {"": sizes}, world_size=num_ranks)
        load_RF = evaluate({"": plan}, trial.tables(), topology, batch_size=trial.batch_size).load_RF
        np.testing.assert_allclose(load_RF, np.broadcast_to(load_RF[0], load_RF.shape), rtol=0.02)


def test_one_rank_has_lookups_and_updates():
    (found,) = measure([Trial("table_wise", **TINY)], ShardingEnv.single_process(), DEVICE, steps=2, rounds=2)
    assert {"lookup", "update"} <= set(found) <= set(PHASES)
    assert all(0 < seconds < 1 for seconds in found.values())


@pytest.mark.parametrize(("max_seconds", "num_rounds"), [(0.0, 1), (35.0, 3), (60.0, 5)])
def test_no_round_begins_that_would_end_too_late(max_seconds, num_rounds, monkeypatch):
    clock = itertools.count(0, 10)  # read before the first round, and after each
    monkeypatch.setattr(trials.time, "monotonic", lambda: float(next(clock)))
    made = []
    monkeypatch.setattr(trials, "_take_steps", lambda *_: made.append(1) or [{"lookup": 1.0}])
    env = ShardingEnv.single_process()
    measure([Trial("table_wise", **TINY)], env, DEVICE, steps=1, rounds=5, max_seconds=max_seconds)
    assert len(made) == num_rounds


def measured_by_late_ranks():
    """Ranks whose steps take equally long, though another one of them is late in each."""
    late = dist.get_rank()
    steps = [
        {"lookup": 2.0 * late + 1, "output": 10.0 - 2 * late},
        {"lookup": 3.0 - 2 * late, "output": 8.0 + 2 * late},
    ]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "_take_steps", lambda *_: steps)
        return measure([Trial("table_wise", **TINY)], env, DEVICE, steps=2, rounds=1)


def test_phases_add_up_to_a_step_however_late_single_ranks_are(ranks):
    for found in ranks(2).run(measured_by_late_ranks):
        assert found == [{"lookup": 2.0, "output": 9.0}]


def measured():
    tried = [Trial(kind, **TINY) for kind in ("column_wise", "data_parallel")]
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return measure(tried, env, DEVICE, steps=1, rounds=1)


def test_ranks_take_the_steps_together(ranks):
    for split, copied in ranks(2).run(measured):
        assert split["row_stats"] > 0
        assert copied["data_parallel"] > 0
